# SPDX-License-Identifier: Apache-2.0
"""The schema of every op of the registry, and what all ops do alike. test_contract.py runs each one over its cases."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.ops import Scaled, SideBySide, Weight
from lorakernels.ops.register import OPS, Implementation

# Saved graphs and exported programs hold these: a change of one breaks them.
SCHEMAS = (
    "amax_and_scale_update(Tensor(a0!) forward, Tensor(a1!) backward, Tensor? current, bool gated,"
    " float fp8_max_forward, float fp8_max_backward, SymInt margin, bool most_recent) -> ()",
    "bias_dropout_add(Tensor x, Tensor? bias, Tensor? residual, Tensor? slot, float p, SymInt site, SymInt row0=0,"
    " SymInt col0=0, SymInt[] chunks=[]) -> Tensor",
    "bias_dropout_add_(Tensor x, Tensor? bias, Tensor(a2!) residual, Tensor? slot, float p, SymInt site,"
    " SymInt row0=0, SymInt col0=0, SymInt[] chunks=[]) -> ()",
    "bias_dropout_add_backward(Tensor dout, Tensor? slot, float p, SymInt site, ScalarType? bias_dtype,"
    " SymInt row0=0, SymInt col0=0, SymInt[] chunks=[]) -> (Tensor, Tensor)",
    "block_diagonal(Tensor[] blocks, SymInt[] rows, SymInt[] ranks, Tensor factors, bool compact=False)"
    " -> (Tensor, Tensor)",
    "block_diagonal_parts(Tensor matrix, SymInt[] rows, SymInt[] ranks, Tensor factors, bool compact=False)"
    " -> Tensor[]",
    "cross_entropy_(Tensor(a0!) logits, Tensor labels, Tensor? factor, SymInt ignore_index, bool gradient) -> Tensor",
    "cross_entropy_fp8(Tensor logits, Tensor labels, SymInt ignore_index) -> (Tensor, Tensor)",
    "expert_route(Tensor chosen, SymInt experts) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "expert_sum(Tensor y, Tensor place, Tensor? weights) -> Tensor",
    "expert_sum_backward(Tensor dout, Tensor y, Tensor place, Tensor weights) -> (Tensor, Tensor)",
    "fp8_grad_input(Tensor dy, Tensor? dy_scale_inv, ScalarType fp8_dtype, Tensor weight, Tensor? weight_scale_inv,"
    " Tensor? ds, Tensor? lora_A, Tensor? slot, float p, SymInt site, ScalarType out_dtype,"
    " SymInt row0=0, SymInt col0=0, bool split=True, Tensor? dropped=None, SymInt[] chunks=[]) -> Tensor",
    "fp8_linear_lora(Tensor x, Tensor? x_scale_inv, Tensor weight, Tensor? weight_scale_inv, Tensor? bias, Tensor? s,"
    " Tensor? lora_B, float scaling, ScalarType out_dtype, bool split=False, Tensor? residual=None,"
    " SymInt[]? rows=None, SymInt[]? ranks=None) -> Tensor",
    "grouped_grad_input(Tensor dy, Tensor dy_scale_inv, ScalarType fp8_dtype, Tensor weight, Tensor weight_scale_inv,"
    " Tensor group_of, Tensor starts, Tensor ends, Tensor? ds, Tensor? lora_A, ScalarType out_dtype, bool split=True)"
    " -> Tensor",
    "grouped_linear_lora(Tensor x, Tensor x_scale_inv, Tensor weight, Tensor weight_scale_inv, Tensor group_of,"
    " Tensor starts, Tensor ends, Tensor? s, Tensor? lora_B, float scaling, ScalarType out_dtype) -> Tensor",
    "grouped_lora_grad_a(Tensor ds, Tensor x, Tensor x_scale_inv, Tensor group_of, Tensor starts, Tensor ends,"
    " ScalarType out_dtype) -> Tensor",
    "grouped_quantize_grad(Tensor dy, Tensor group_of, Tensor starts, Tensor ends, Tensor? lora_B, Tensor? s,"
    " Tensor(a6!) state, SymInt column, bool delayed, float scaling, ScalarType fp8_dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "grouped_quantize_lora_down(Tensor x, Tensor rows, Tensor group_of, Tensor starts, Tensor ends, Tensor? lora_A,"
    " Tensor(a6!) state, SymInt column, bool delayed) -> (Tensor, Tensor, Tensor)",
    "lora_grad_a(Tensor ds, Tensor x, Tensor? x_scale_inv, Tensor? slot, float p, SymInt site, ScalarType out_dtype,"
    " SymInt row0=0, SymInt col0=0, SymInt adapters=0, Tensor? dropped=None, SymInt[] chunks=[]) -> Tensor",
    "quantize_blocks(Tensor x, ScalarType fp8_dtype, bool power_of_two=False) -> (Tensor, Tensor)",
    "quantize_grad(Tensor dy, Tensor? lora_B, Tensor? s, Tensor(a3!)? state, SymInt column, bool delayed,"
    " float scaling, ScalarType fp8_dtype, SymInt[]? rows=None, SymInt[]? ranks=None, bool? power_of_two=None,"
    " Tensor? slot=None, float p=0., SymInt site=0, SymInt cols=0, SymInt row0=0, SymInt col0=0, SymInt[] chunks=[])"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "quantize_lora_down(Tensor x, Tensor? lora_A, Tensor(a2!)? state, SymInt column, bool delayed, Tensor? slot,"
    " float p, SymInt site, SymInt row0=0, SymInt col0=0, SymInt[] chunks=[], bool? power_of_two=None)"
    " -> (Tensor, Tensor, Tensor)",
    "rms_norm_backward(Tensor dnormed, Tensor x, Tensor weight, Tensor rstd, Tensor? dresidual, bool weight_grad)"
    " -> (Tensor, Tensor)",
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, Tensor(a3!)? state, SymInt column, bool delayed, bool keep,"
    " bool? power_of_two=None) -> (Tensor, Tensor, Tensor, Tensor)",
    "rope_qkv_(Tensor(a0!) qkv, Tensor cos, Tensor sin, SymInt num_heads, SymInt num_kv_heads) -> ()",
    "rope_qkv_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, Tensor multiplier) -> Tensor",
    "rope_qkv_backward_quantize(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, Tensor multiplier,"
    " ScalarType fp8_dtype, bool power_of_two) -> (Tensor, Tensor, Tensor)",
    "swiglu_quantize(Tensor gate_up, Tensor? gate_up_scale_inv, Tensor(a2!)? state, SymInt column, bool delayed,"
    " bool keep, ScalarType? out_dtype=None, bool? power_of_two=None) -> (Tensor, Tensor, Tensor)",
    "swiglu_quantize_and_pack(Tensor gate_up, Tensor(a1!)? state, SymInt column, bool delayed, bool keep,"
    " bool? power_of_two=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "swiglu_quantize_grad(Tensor dact, Tensor gate_up, Tensor? gate_up_scale_inv, Tensor multiplier,"
    " Tensor(a4!)? state_dy, SymInt column, bool delayed, ScalarType fp8_dtype, bool keep, bool? power_of_two=None)"
    " -> (Tensor, Tensor, Tensor)",
    "transpose_fp8(Tensor weight) -> Tensor",
)


def overload(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.lorakernels, name).default


@pytest.mark.parametrize("text", SCHEMAS, ids=lambda text: text.split("(")[0])
def test_schema(text):
    assert str(overload(text.split("(")[0])._schema) == f"lorakernels::{text}"


def test_every_op_has_its_schema_here():
    assert {text.split("(")[0] for text in SCHEMAS} == set(OPS)


def test_an_op_shows_its_values_in_its_signature_and_its_name_in_errors():
    assert list(inspect.signature(ops.rms_norm_backward).parameters)[:2] == ["dnormed", "x"]
    weight = inspect.Parameter("weight", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
    assert inspect.signature(ops.transpose_fp8) == inspect.Signature(
        [weight], return_annotation=Tensor
    )
    with pytest.raises(TypeError, match=r"quantize_lora_down\(\) missing .*'lora_A'"):
        ops.quantize_lora_down(torch.zeros(1, 1))  # type: ignore[call-arg]


@pytest.mark.parametrize("name", OPS)
def test_an_op_s_functions_take_its_arguments_as_one_tuple(name):
    """What an op is called with is written in one place: the fields of a NamedTuple with a docstring."""
    op: Any = OPS[name]
    functions = [op.reference, op.fake, op.check]
    for implementation in op.implementations:
        functions += [implementation.run, implementation.why_not]
    for function in functions:
        if function is not Implementation.why_not:
            [parameter] = inspect.signature(function).parameters
            hint = typing.get_type_hints(function)[parameter]
            assert op.arguments in (typing.get_args(hint) or (hint,)), function
    assert tuple(inspect.signature(op).parameters) == op.arguments._fields
    assert not op.arguments.__doc__.startswith(op.arguments.__name__)


def test_differentiating_a_kernel_op_directly_raises():
    x = torch.randn(4, 8, requires_grad=True)
    y = ops.fp8_linear_lora(Scaled(x), Weight(torch.randn(3, 8)), None, None, torch.float32)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        y.sum().backward()


def test_fp8_transpose_is_exact(device):
    bits = torch.arange(256, dtype=torch.uint8, device=device).repeat(3, 1)[:, :250]
    turned = ops.transpose_fp8(bits.contiguous())
    assert turned.is_contiguous() and torch.equal(turned, bits.t())


def test_gradients_are_asked_for_in_lists_and_of_what_is_written():
    block, factors = torch.randn(4, 2, requires_grad=True), torch.ones(2, 1)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        ops.block_diagonal([block], SideBySide([4], [2]), factors)[0].sum().backward()
    qkv = torch.randn(2, 12, requires_grad=True) * 1.0
    cos = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="writes to a tensor that requires grad"):
        ops.rope_qkv_(qkv, cos, cos, 1, 1)
    with torch.no_grad():
        ops.rope_qkv_(qkv, cos, cos, 1, 1)
