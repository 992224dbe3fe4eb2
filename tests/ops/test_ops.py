# SPDX-License-Identifier: Apache-2.0
"""Every op through torch.library.opcheck: schema, fake tensors, autograd registration, AOT dispatch."""

from __future__ import annotations

import pytest
import torch

from lorakernels import ops

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def arguments(device):
    """One argument tuple per case; odd sizes, with and without the optional tensors."""
    m, k, n, r = 7, 24, 10, 3
    x = torch.randn(m, k, device=device)
    dy = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    a, b = torch.randn(r, k, device=device), torch.randn(n, r, device=device)
    w = torch.randn(n, k, device=device)
    slot = torch.tensor([5, 9], device=device)
    one = torch.ones(1, device=device)
    state = torch.zeros(5, 2, device=device)
    forward, backward = (torch.rand(5, 2, device=device) for _ in range(2))
    s = torch.randn(m, r, device=device)
    ds = torch.randn(m, r, device=device, dtype=torch.bfloat16)
    x8, w8, dy8 = (t.view(torch.uint8) for t in (x.to(E4M3), w.to(E4M3), dy.to(E5M2)))
    bf16 = torch.bfloat16
    labels = torch.arange(m, device=device)
    two, three = torch.rand(2, device=device), torch.rand(3, device=device)
    scales = torch.rand(m, 1, device=device)
    heads = [torch.randn(1, 2, m, 4, device=device, dtype=bf16) for _ in range(3)]
    angles = torch.randn(2, m, 4, device=device)
    return {
        "quantize_lora_down-fp8": (x, a, state, 1, True, slot, 0.1, 3),
        "quantize_lora_down-base only": (x, None, state, 0, False, None, 0.0, 0),
        "quantize_lora_down-plain": (x, a, None, 0, False, None, 0.0, 0),
        "fp8_linear_lora-fp8": (x8, one, w8, one, torch.randn(n, device=device), s, b, 2.0, bf16),
        "fp8_linear_lora-scales, residual": (
            x8,
            one,
            w8,
            torch.rand(n, device=device),
            None,
            None,
            None,
            1.0,
            bf16,
            False,
            dy,
        ),
        "fp8_linear_lora-plain": (x, None, w, None, None, None, None, 1.0, torch.float32),
        "quantize_grad-fp8": (dy, b, ds, state, 0, True, 0.5, E5M2),
        "quantize_grad-base only": (dy, None, None, state, 0, True, 0.5, E5M2),
        "quantize_grad-frozen B": (dy, b, None, None, 0, False, 0.5, E5M2),
        "quantize_grad_and_mask": (dy, b, ds, state, 0, True, 0.5, E5M2, slot, 0.1, 3, x.shape[1]),
        "quantize_grad-side by side": (
            dy,
            b,
            torch.cat((ds, ds), 1),
            state,
            0,
            True,
            0.5,
            E5M2,
            [4, 1, 5],
            [r, 0, r],
        ),
        "fp8_grad_input-fp8": (
            dy8,
            one,
            E5M2,
            w8,
            one,
            w8.t().contiguous(),
            ds,
            a,
            slot,
            0.1,
            3,
            bf16,
        ),
        "fp8_grad_input-plain": (dy, None, E5M2, w, None, None, None, None, None, 0.0, 0, bf16),
        "lora_grad_a-fp8": (ds, x8, one, slot, 0.1, 3, torch.float32),
        "lora_grad_a-plain": (ds, x, None, None, 0.0, 0, bf16),
        "transpose_fp8": (w8,),
        "amax_and_scale_update-gated": (forward, backward, None, True, 448.0, 57344.0, 0, False),
        "amax_and_scale_update": (
            forward,
            backward,
            torch.rand(4, device=device),
            False,
            448.0,
            57344.0,
            1,
            True,
        ),
        "bias_dropout_add": (
            torch.randn(m, k, device=device),
            torch.randn(k, device=device),
            torch.randn(m, k, device=device),
            slot,
            0.3,
            1,
            2,
            3,
        ),
        "bias_dropout_add_": (x, None, torch.randn(m, k, device=device), slot, 0.3, 1),
        "bias_dropout_add-bare": (x, None, None, None, 0.0, 0),
        "bias_dropout_add_backward": (x, slot, 0.3, 1, bf16),
        "bias_dropout_add_backward-no mask": (x, None, 0.0, 1, torch.float32),
        "cross_entropy_": (torch.randn(m, k, device=device), labels, one, 3, True),
        "cross_entropy_-losses only": (dy, labels, None, 3, False),
        "block_diagonal": ([a, b], [r, n], [k, r], torch.rand(2, 2, device=device)),
        "block_diagonal_parts": (torch.randn(r + n, 4, device=device), [r, n], [4, 0], two),
        "rms_norm_quantize": (x, x[0], 1e-5, state, 1, True, True),
        "rms_norm_quantize-x8 only": (dy, dy[0], 1e-5, state, 1, False, False),
        "rms_norm_quantize-plain": (dy, dy[0], 1e-5, None, 0, False, True),
        "rms_norm_backward": (x, 2 * x, x[0], s.new_ones(m), x, True),
        "rms_norm_backward-frozen": (dy, 2 * dy, dy[0], s.new_ones(m), None, False),
        "rope_qkv_": (torch.randn(2 * m, 16, device=device), *angles, 2, 1),
        "rope_qkv_backward": (*heads, *angles, three),
        "swiglu_quantize": (x, None, state, 0, True, True),
        "swiglu_quantize-bytes": (x8, scales, state, 0, True, False, bf16),
        "swiglu_quantize_and_pack": (x, state, 0, True, True),
        "swiglu_quantize-plain": (dy, None, None, 0, False, True),
        "swiglu_quantize_grad": (dy, torch.cat((dy, dy), 1), None, two, state, 0, True, E5M2, True),
        "swiglu_quantize_grad-bytes": (
            x[:, :12].clone(),
            x8,
            scales,
            two,
            state,
            0,
            True,
            E5M2,
            False,
        ),
        "swiglu_quantize_grad-plain": (x[:, :12].clone(), x, None, two, None, 0, False, E5M2, True),
    }


CASES = list(arguments("cpu"))


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case, device):
    op = getattr(torch.ops.lorakernels, case.split("-")[0]).default
    torch.library.opcheck(op, arguments(device)[case])


def test_every_op_has_a_case():
    defined = {name for name in vars(ops) if isinstance(getattr(ops, name), torch._ops.OpOverload)}
    assert defined == {case.split("-")[0] for case in CASES}


def test_differentiating_a_kernel_op_directly_raises():
    x = torch.randn(4, 8, requires_grad=True)
    y = ops.fp8_linear_lora(x, None, torch.randn(3, 8), None, None, None, None, 1.0, torch.float32)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        y.sum().backward()


def test_fp8_transpose_is_exact(device):
    bits = torch.arange(256, dtype=torch.uint8, device=device).repeat(3, 1)[:, :250]
    turned = ops.transpose_fp8(bits.contiguous())
    assert turned.is_contiguous() and torch.equal(turned, bits.t())


def test_gradients_are_asked_for_in_lists_and_of_what_is_written():
    block, factors = torch.randn(4, 2, requires_grad=True), torch.ones(2, 1)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        ops.block_diagonal([block], [4], [2], factors)[0].sum().backward()
    qkv = torch.randn(2, 12, requires_grad=True) * 1.0
    cos = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="writes to a tensor that requires grad"):
        ops.rope_qkv_(qkv, cos, cos, 1, 1)
    with torch.no_grad():
        ops.rope_qkv_(qkv, cos, cos, 1, 1)
