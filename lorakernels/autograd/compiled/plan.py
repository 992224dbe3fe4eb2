# SPDX-License-Identifier: Apache-2.0
"""What the ops of a compiled layer run (linear.py), by a plan where one fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.autograd.linear.node import Needs, gradients
from lorakernels.autograd.linear.plan import Kind, Known, known_of
from lorakernels.autograd.linear.values import Adapter, Call
from lorakernels.ops.register import Op
from lorakernels.recorded.function import FunctionPlan
from lorakernels.recorded.node import Operands, Plans
from lorakernels.recorded.routing import are_allowed
from lorakernels.recorded.stand_in import NotPlanned, Recording
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
        weight, operand = saved.weight or (None, None), saved.operand or (None, None)
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
    power = None if given is not None else spec.power_of_two
    x8, scale_inv, s = run(ops.quantize_lora_down, x, lora_A, scaling, call.dropout, power)
    up = None if lora_A is None or lora_B is None else Up(lora_B, s, spec.scaling)
    plain = scaling is None and spec.power_of_two is None
    operand = given or (Scaled(x) if plain else Scaled(x8, scale_inv))
    y = run(ops.fp8_linear_lora, operand, weight, bias, up, x.dtype, spec.split_fprop)
    return y, x8, scale_inv, s


def run_backward(
    run: Run, dy: Tensor, saved: Saved, needs: Needs, dtypes: tuple[torch.dtype | None, ...]
) -> Four:
    """(dx, dA, dB, dbias) of a contiguous dy; empty where not needed. `dtypes` are those of A and the bias."""
    found = gradients(_Context(saved, dtypes), needs, dy, run)[:4]
    dx, dA, dB, dbias = (dy.new_empty(0) if t is None else t for t in found)
    return dx, dA, dB, dbias


def _run(op: Op[..., Any, Any], *arguments: Any) -> Any:
    return op.run(*arguments)


Planned = tuple[FunctionPlan, Known[FunctionPlan]]


def forward_plan(
    x: Tensor, bias: Tensor | None, adapter: Adapter, weight: Weight, call: Call
) -> Planned | None:
    """The plan of `run_forward` and what is known of the layer; None where the ops have to run."""
    if not _is_planned(x):
        return None
    spec, slot, *states = call
    tensors = (bias, adapter.A, adapter.B, *weight, *states)
    known: Known[FunctionPlan] = known_of(spec, "compiled forward")
    given = [t for t in (x, *tensors, slot) if t is not None]
    key = slot is not None
    plan = known.plan(given, key)
    if plan is None:
        plan = known.ask(PLANS, _record_forward, tensors, given, key, x.shape, x.dtype, key)
    return None if plan is None else (plan, known)


def planned_forward(
    x: Tensor, bias: Tensor | None, adapter: Adapter, weight: Weight, call: Call
) -> Four | None:
    """`run_forward` on a GPU by one call of csrc; None where it cannot. `weight` may be e4m3."""
    found = forward_plan(x, bias, adapter, weight, call)
    if found is None:
        return None
    plan, known = found
    tensors = (x, bias, adapter.A, adapter.B, *weight, call.slot)
    given = [t for t in tensors if t is not None]
    columns = known.columns(call.state_x, call.state_dy)
    return plan.run((*given, *columns), known.sites)  # type: ignore[return-value]


def backward_plan(dy: Tensor, saved: Saved, needs: Needs, state_x: Tensor | None) -> Planned | None:
    """The plan of `run_backward` and what is known of the layer; None where the ops have to run."""
    weight, (lora_A, lora_B, s), operand, call = saved
    if weight is None or needs.bias or not _is_planned(dy):
        return None
    tensors = (None, lora_A, lora_B, *weight, state_x, call.state_dy)
    known: Known[FunctionPlan] = known_of(call.spec, "compiled backward")
    others = (s, *(operand or (None, None)), call.slot)
    given = [t for t in (dy, *tensors, *others) if t is not None]
    key = (needs, call.slot is not None)  # they say which of `others` there are
    plan = known.plan(given, key)
    if plan is None:
        forms = tuple([None if t is None else (t.shape, t.dtype) for t in others])
        more = (dy.shape, dy.dtype, forms, needs)
        plan = known.ask(PLANS, _record_backward, tensors, given, key, *more)
    return None if plan is None else (plan, known)


def planned_backward(dy: Tensor, saved: Saved, needs: Needs, state_x: Tensor | None) -> Four | None:
    """`run_backward` on a GPU by one call of csrc; None where it cannot. W may be e4m3."""
    found = backward_plan(dy, saved, needs, state_x)
    if found is None or saved.weight is None:
        return None
    plan, known = found
    lora_A, lora_B, s = saved.adapter
    tensors = (dy, lora_A, lora_B, *saved.weight, s, *(saved.operand or ()), saved.call.slot)
    given = [t for t in tensors if t is not None]
    columns = known.columns(state_x, saved.call.state_dy)
    return plan.run((*given, *columns), known.sites)  # type: ignore[return-value]


def _is_planned(x: Tensor) -> bool:
    return x.is_cuda and are_allowed() and x.is_contiguous()


def _record_forward(kind: Kind, shape: torch.Size, dtype: torch.dtype, draws: bool) -> FunctionPlan:
    def forward(x: Any, bias: Any, A: Any, B: Any, weight: Weight, call: Call) -> Four:
        return run_forward(_run, x, bias, Adapter(A, B), weight, call)

    if shape.numel() == 0:
        raise NotPlanned("no rows")
    return FunctionPlan(forward, kind.device, partial(kind.operands, shape, dtype, draws))


def _record_backward(
    kind: Kind, shape: torch.Size, dtype: torch.dtype, forms: tuple[Any, ...], needs: Needs
) -> FunctionPlan:
    """`forms` are shape and dtype of s, x8, its scale_inv and the slot."""

    def operands(recording: Recording) -> Operands:
        dy = recording.tensor(shape, dtype)
        (_, A, B), weight = kind.fixed(recording)
        others: list[Any] = [None if form is None else recording.tensor(*form) for form in forms]
        s, x8, scale_inv, slot = others
        state = kind.value.state
        states = [None if state is None else recording.column(state) for _ in range(2)]
        saved = Saved(
            weight,
            Adapter(A, B, s),
            None if x8 is None else Scaled(x8, scale_inv),
            Call(kind.value.numbers.spec, slot, None, states[1]),
        )
        given = [t for t in (dy, A, B, *weight, *others, *states) if t is not None]
        return Operands(given, (dy, saved), ())

    def backward(dy: Any, saved: Saved) -> Four:
        lora_A = kind.value.forms[1]
        return run_backward(_run, dy, saved, needs, (lora_A and lora_A[1], None))

    if shape.numel() == 0:
        raise NotPlanned("no rows")
    return FunctionPlan(backward, kind.device, operands)
