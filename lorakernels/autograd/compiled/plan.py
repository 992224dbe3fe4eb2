# SPDX-License-Identifier: Apache-2.0
"""What the ops of a compiled layer run (linear.py), by a plan where one fits."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.autograd.linear.linear import Run
from lorakernels.autograd.linear.node import Needs, Saved, forward, gradients
from lorakernels.autograd.linear.plan import Kind, Known, known_of
from lorakernels.autograd.linear.values import Adapter, Call
from lorakernels.ops.register import Op
from lorakernels.recorded.function import FunctionPlan
from lorakernels.recorded.node import Operands
from lorakernels.recorded.routing import are_allowed
from lorakernels.recorded.stand_in import NotPlanned, Recording
from lorakernels.values import Weight

Four = tuple[Tensor, Tensor, Tensor, Tensor]
Dtypes = tuple[torch.dtype | None, torch.dtype | None]
Planned = tuple[FunctionPlan, Known[FunctionPlan]]


class Layer(NamedTuple):
    """A layer and its call, without x. W may be e4m3 where a plan is asked for."""

    weight: Weight
    bias: Tensor | None
    adapter: Adapter
    call: Call


def run_forward(run: Run, x: Tensor, layer: Layer) -> Four:
    """(y, x8, x's scale_inv, s); empty for what there is not, as the second and third over a plain W.

    `run(op, *arguments)` calls an op.
    """
    weight, bias, adapter, call = layer
    y, operand, s = forward(x, bias, adapter, weight, call, run=run)
    if s is None:
        s = x.new_empty((0,))
    x8, scale_inv = operand
    if scale_inv is None:
        x8, scale_inv = (x.new_empty((0,), dtype=t) for t in (torch.uint8, torch.float32))
    return y, x8, scale_inv, s


def run_backward(
    run: Run, dy: Tensor, saved: Saved, call: Call, needs: Needs, dtypes: Dtypes
) -> Four:
    """(dx, dA, dB, dbias) of a contiguous dy; empty where not needed. `dtypes` are those of A and the bias."""
    grads = gradients(saved, call, dtypes, needs, dy, run)
    return tuple([dy.new_empty((0,)) if t is None else t for t in grads])  # type: ignore[return-value]


def _run(op: Op[..., Any, Any], *arguments: Any) -> Any:
    return op.run(*arguments)


def forward_plan(x: Tensor, layer: Layer) -> Planned | None:
    """The plan of `run_forward` and what is known of the layer; None where the ops have to run."""
    if not _is_planned(x):
        return None
    weight, bias, adapter, (spec, slot, *states, _) = layer
    tensors = (bias, adapter.A, adapter.B, *weight, *states)
    known: Known[FunctionPlan] = known_of(spec, "compiled forward")
    given = [t for t in (x, *tensors, slot) if t is not None]
    key = slot is not None
    plan = known.plan(given, key)
    if plan is None:
        plan = known.ask(_record_forward, tensors, given, key, x.shape, x.dtype, key)
    return None if plan is None else (plan, known)


def planned_forward(x: Tensor, layer: Layer) -> Four | None:
    """`run_forward` on a GPU by one call of csrc; None where it cannot."""
    planned = forward_plan(x, layer)
    if planned is None:
        return None
    plan, known = planned
    weight, bias, adapter, call = layer
    tensors = (x, bias, adapter.A, adapter.B, *weight, call.slot)
    given = [t for t in tensors if t is not None]
    columns = known.columns(call.state_x, call.state_dy)
    return plan.run((*given, *columns), known.sites)  # type: ignore[return-value]


def backward_plan(dy: Tensor, saved: Saved, call: Call, needs: Needs) -> Planned | None:
    """The plan of `run_backward` and what is known of the layer; None where the ops have to run."""
    if saved.weight is None or needs.bias or not _is_planned(dy):
        return None
    fixed = (saved.lora_A, saved.lora_B, saved.weight, saved.w_scale_inv)
    tensors = (None, *fixed, call.state_x, call.state_dy)
    known: Known[FunctionPlan] = known_of(call.spec, "compiled backward")
    others = (saved.s, saved.x, saved.x_scale_inv, saved.slot)
    given = [t for t in (dy, *tensors, *others) if t is not None]
    key = (needs, saved.slot is not None)  # they say which of `others` there are
    plan = known.plan(given, key)
    if plan is None:
        forms = tuple([None if t is None else (t.shape, t.dtype) for t in others])
        more = (dy.shape, dy.dtype, forms, needs)
        plan = known.ask(_record_backward, tensors, given, key, *more)
    return None if plan is None else (plan, known)


def planned_backward(dy: Tensor, saved: Saved, call: Call, needs: Needs) -> Four | None:
    """`run_backward` on a GPU by one call of csrc; None where it cannot. W may be e4m3."""
    planned = backward_plan(dy, saved, call, needs)
    if planned is None:
        return None
    plan, known = planned
    fixed = (saved.lora_A, saved.lora_B, saved.weight, saved.w_scale_inv)
    tensors = (dy, *fixed, saved.s, saved.x, saved.x_scale_inv, saved.slot)
    given = [t for t in tensors if t is not None]
    columns = known.columns(call.state_x, call.state_dy)
    return plan.run((*given, *columns), known.sites)  # type: ignore[return-value]


def _is_planned(x: Tensor) -> bool:
    return x.is_cuda and are_allowed() and x.is_contiguous()


def _record_forward(kind: Kind, shape: torch.Size, dtype: torch.dtype, draws: bool) -> FunctionPlan:
    def run(x: Any, bias: Any, A: Any, B: Any, weight: Weight, call: Call) -> Four:
        return run_forward(_run, x, Layer(weight, bias, Adapter(A, B), call))

    if shape.numel() == 0:
        raise NotPlanned("no rows")
    return FunctionPlan(run, kind.device, partial(kind.operands, shape, dtype, draws))


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
        saved = Saved(*weight, A, B, slot, x8, scale_inv, s)
        call = Call(kind.value.numbers.spec, None, None, states[1])
        given = [t for t in (dy, A, B, *weight, *others, *states) if t is not None]
        return Operands(given, (dy, saved, call), ())

    def run(dy: Any, saved: Saved, call: Call) -> Four:
        lora_A = kind.value.forms[1]
        return run_backward(_run, dy, saved, call, needs, (lora_A and lora_A[1], None))

    if shape.numel() == 0:
        raise NotPlanned("no rows")
    return FunctionPlan(run, kind.device, operands)
