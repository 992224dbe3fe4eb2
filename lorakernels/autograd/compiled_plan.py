# SPDX-License-Identifier: Apache-2.0
"""What the ops of a compiled layer run (compiled_linear.py), by a plan where one fits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.autograd.linear_node import Needs, gradients
from lorakernels.autograd.linear_plan import Kind, kind_of
from lorakernels.autograd.linear_values import Adapter, Call, LoRASpec
from lorakernels.ops.register import Op
from lorakernels.plans.function import FunctionPlan
from lorakernels.plans.node import Operands, Plans
from lorakernels.plans.routing import are_allowed
from lorakernels.plans.stand_in import Recording, column_address
from lorakernels.values import Scaled, Up, Weight

Run = Callable[..., Any]
Four = tuple[Tensor, Tensor, Tensor, Tensor]
PLANS: Plans[FunctionPlan] = Plans(1024)


class Saved(NamedTuple):
    """What backward reads; None for what no gradient needs.

    Attributes:
        weight: W.
        adapter: A, B and s.
        operand: x8 and its scale_inv, or x over a plain W.
        call: with the FP8 state of dy, and that of x unused.
    """

    weight: Weight | None
    adapter: Adapter
    operand: Scaled | None
    call: Call


class _Context:
    """Stands in for an autograd context in `gradients`."""

    def __init__(self, saved: Saved, dtypes: tuple[torch.dtype | None, ...]) -> None:
        lora_A, lora_B, s = saved.adapter
        weight, operand = saved.weight or (None,) * 3, saved.operand or (None, None)
        self.saved_tensors = (*weight, lora_A, lora_B, saved.call.slot, *operand, s)
        self.state_dy, self.spec, self.dtypes = saved.call.state_dy, saved.call.spec, dtypes


def run_forward(
    run: Run,
    x: Tensor,
    bias: Tensor | None,
    adapter: Adapter,
    weight: Weight,
    call: Call,
    given: Scaled | None = None,
) -> Four:
    """(y, x8, x's scale_inv, s). With x8 `given`, or over a plain W, the second and third are empty.

    `run(op, *arguments)` calls an op.
    """
    lora_A, lora_B, _ = adapter
    spec, scaling = call.spec, call.scaling_x
    x8, scale_inv, s = run(ops.quantize_lora_down, x, lora_A, scaling, call.dropout)
    operand = given or (Scaled(x) if scaling is None else Scaled(x8, scale_inv))
    up = None if lora_A is None or lora_B is None else Up(lora_B, s, spec.scaling)
    y = run(ops.fp8_linear_lora, operand, weight, bias, up, x.dtype, spec.split_fprop)
    return y, x8, scale_inv, s


def run_backward(
    run: Run, dy: Tensor, saved: Saved, needs: Needs, dtypes: tuple[torch.dtype | None, ...]
) -> Four:
    """(dx, dA, dB, dbias) of a contiguous dy; empty where not needed. `dtypes` are those of A and the bias."""
    found = gradients(_Context(saved, dtypes), needs, dy, run)[:4]
    dx, dA, dB, dbias = (dy.new_empty(0) if t is None else t for t in found)
    return dx, dA, dB, dbias


def _run(op: Op[..., Any], *arguments: Any) -> Any:
    return op.run(*arguments)


def planned_forward(
    x: Tensor, bias: Tensor | None, adapter: Adapter, weight: Weight, call: Call
) -> Four | None:
    """`run_forward` on a GPU by one call of csrc; None where it cannot."""
    lora_A, lora_B, _ = adapter
    spec, slot, state, state_dy = call
    tensors = (weight.data, bias, lora_A, lora_B, weight.scale_inv, weight.t, state, state_dy)
    kind = _kind(x, tensors, spec)
    if kind is None:
        return None
    key = (kind, x.shape[0], x.dtype, slot is None)
    make = partial(kind.operands, x.shape[0], x.dtype, slot is not None)

    def forward(x: Any, bias: Any, A: Any, B: Any, weight: Weight, call: Call) -> Four:
        return run_forward(_run, x, bias, Adapter(A, B), weight, call)

    given = [t for t in (x, bias, lora_A, lora_B, *weight, slot) if t is not None]
    return _by_plan(key, partial(FunctionPlan, forward, x.device, make), given, call)


def planned_backward(dy: Tensor, saved: Saved, needs: Needs, state_x: Tensor) -> Four | None:
    """`run_backward` on a GPU by one call of csrc; None where it cannot."""
    weight, adapter, operand, call = saved
    if weight is None or weight.scale_inv is None or needs.bias:
        return None
    lora_A, lora_B, _ = adapter
    tensors = (
        weight.data,
        None,
        lora_A,
        lora_B,
        weight.scale_inv,
        weight.t,
        state_x,
        call.state_dy,
    )
    kind = _kind(dy, tensors, call.spec)
    if kind is None:
        return None
    flat = [*weight, *adapter, *(operand or (None, None)), call.slot]
    forms = tuple([None if t is None else (t.shape, t.dtype) for t in flat])
    key = (kind, dy.shape, dy.dtype, forms, needs)

    def operands(recording: Recording) -> Operands:
        stand_ins: list[Any] = [None if form is None else recording.tensor(*form) for form in forms]
        grad = recording.tensor(dy.shape, dy.dtype)
        states = [recording.column(state_x.shape) for _ in range(2)]
        w, w_scale_inv, w_t, A, B, s, x8, scale_inv, slot = stand_ins
        spec = call.spec.numbers.spec
        again = Saved(
            Weight(w, w_scale_inv, w_t),
            Adapter(A, B, s),
            None if operand is None else Scaled(x8, scale_inv),
            Call(spec, slot, None, states[1]),
        )
        return Operands(
            [t for t in (grad, *stand_ins, *states) if t is not None], (grad, again), ()
        )

    dtypes = (None if lora_A is None else lora_A.dtype, None)

    def backward(dy: Any, saved: Saved) -> Four:
        return run_backward(_run, dy, saved, needs, dtypes)

    given = [t for t in (dy, *flat) if t is not None]
    with_states = call._replace(state_x=state_x)
    return _by_plan(key, partial(FunctionPlan, backward, dy.device, operands), given, with_states)


def _kind(x: Tensor, tensors: tuple[Tensor | None, ...], spec: LoRASpec) -> Kind | None:
    return (
        kind_of(tensors, spec)
        if x.is_cuda and len(x.shape) and x.shape[0] and are_allowed()
        else None
    )


def _by_plan(
    key: Hashable, make: Callable[[], FunctionPlan], given: Sequence[Tensor], call: Call
) -> Any:
    try:
        plan = PLANS[key]
    except KeyError:
        plan = PLANS.make(key, make)
    if plan is None:
        return None
    states = (call.state_x, call.state_dy)
    addresses = tuple(column_address(s, call.spec.column) for s in states if s is not None)
    return plan.run(given, addresses, (call.spec.site,))
