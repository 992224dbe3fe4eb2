# SPDX-License-Identifier: Apache-2.0
"""The ops of a compiled layer (linear.py) by recorded calls, where these can be recorded."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.autograd.linear.linear import Run
from lorakernels.autograd.linear.node import Needs, Saved, forward, gradients
from lorakernels.autograd.linear.recorded import LastCalls, SharedKind, last_calls
from lorakernels.autograd.linear.values import Adapter, Call
from lorakernels.ops.register import Op
from lorakernels.recorded.function import RecordedFunction
from lorakernels.recorded.node import Operands
from lorakernels.recorded.routing import are_allowed
from lorakernels.recorded.stand_in import NotRecorded, Recorder
from lorakernels.values import Weight

Four = tuple[Tensor, Tensor, Tensor, Tensor]
Dtypes = tuple[torch.dtype | None, torch.dtype | None]
Recorded = tuple[RecordedFunction, LastCalls[RecordedFunction]]


class LayerCall(NamedTuple):
    """A layer and its call, without x. Recorded calls also take a W in e4m3."""

    weight: Weight
    bias: Tensor | None
    adapter: Adapter
    call: Call


def run_forward(run: Run, x: Tensor, layer: LayerCall) -> Four:
    """(y, x8, x's scale_inv, s); empty tensors for absent ones, as the second and third over a plain W.

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
    """(dx, dA, dB, dbias) of a contiguous dy; empty where not needed. `dtypes`: of A and of the bias."""
    grads = gradients(saved, call, dtypes, needs, dy, run)
    return tuple([dy.new_empty((0,)) if t is None else t for t in grads])  # type: ignore[return-value]


def _run(op: Op[..., Any, Any], *arguments: Any) -> Any:
    return op.run(*arguments)


def forward_recording(x: Tensor, layer: LayerCall) -> Recorded | None:
    """The recording of `run_forward` and the layer's last calls; None where the ops have to run."""
    if not _can_be_recorded(x):
        return None
    weight, bias, adapter, (spec, slot, *states, _) = layer
    tensors = (bias, adapter.A, adapter.B, *weight, *states)
    calls: LastCalls[RecordedFunction] = last_calls(spec, "compiled forward")
    present = [t for t in (x, *tensors, slot) if t is not None]
    key = slot is not None
    recorded = calls.find(present, key)
    if recorded is None:
        recorded = calls.record(_record_forward, tensors, present, key, x.shape, x.dtype, key)
    return None if recorded is None else (recorded, calls)


def recorded_forward(x: Tensor, layer: LayerCall) -> Four | None:
    """`run_forward` on a GPU by one call of csrc; None where it cannot."""
    match = forward_recording(x, layer)
    if match is None:
        return None
    recorded, calls = match
    weight, bias, adapter, call = layer
    tensors = (x, bias, adapter.A, adapter.B, *weight, call.slot)
    present = [t for t in tensors if t is not None]
    columns = calls.columns(call.state_x, call.state_dy)
    return recorded.run((*present, *columns), calls.sites)  # type: ignore[return-value]


def backward_recording(dy: Tensor, saved: Saved, call: Call, needs: Needs) -> Recorded | None:
    """The recording of `run_backward` and the layer's last calls; None where the ops have to run."""
    if saved.weight is None or needs.bias or not _can_be_recorded(dy):
        return None
    fixed = (saved.lora_A, saved.lora_B, saved.weight, saved.w_scale_inv)
    tensors = (None, *fixed, call.state_x, call.state_dy)
    calls: LastCalls[RecordedFunction] = last_calls(call.spec, "compiled backward")
    others = (saved.s, saved.x, saved.x_scale_inv, saved.slot)
    present = [t for t in (dy, *tensors, *others) if t is not None]
    key = (needs, saved.slot is not None)  # they say which of `others` there are
    recorded = calls.find(present, key)
    if recorded is None:
        forms = tuple([None if t is None else (t.shape, t.dtype) for t in others])
        more = (dy.shape, dy.dtype, forms, needs)
        recorded = calls.record(_record_backward, tensors, present, key, *more)
    return None if recorded is None else (recorded, calls)


def recorded_backward(dy: Tensor, saved: Saved, call: Call, needs: Needs) -> Four | None:
    """`run_backward` on a GPU by one call of csrc; None where it cannot. W may be e4m3."""
    match = backward_recording(dy, saved, call, needs)
    if match is None:
        return None
    recorded, calls = match
    fixed = (saved.lora_A, saved.lora_B, saved.weight, saved.w_scale_inv)
    tensors = (dy, *fixed, saved.s, saved.x, saved.x_scale_inv, saved.slot)
    present = [t for t in tensors if t is not None]
    columns = calls.columns(call.state_x, call.state_dy)
    return recorded.run((*present, *columns), calls.sites)  # type: ignore[return-value]


def _can_be_recorded(x: Tensor) -> bool:
    return x.is_cuda and are_allowed() and x.is_contiguous()


def _record_forward(
    kind: SharedKind, shape: torch.Size, dtype: torch.dtype, draws: bool
) -> RecordedFunction:
    def run(x: Any, bias: Any, A: Any, B: Any, weight: Weight, call: Call) -> Four:
        return run_forward(_run, x, LayerCall(weight, bias, Adapter(A, B), call))

    if shape.numel() == 0:
        raise NotRecorded("no rows")
    return RecordedFunction(run, kind.device, partial(kind.operands, shape, dtype, draws))


def _record_backward(
    kind: SharedKind, shape: torch.Size, dtype: torch.dtype, forms: tuple[Any, ...], needs: Needs
) -> RecordedFunction:
    """`forms` are shape and dtype of s, x8, its scale_inv and the slot."""

    def operands(recorder: Recorder) -> Operands:
        dy = recorder.tensor(shape, dtype)
        (_, A, B), weight = kind.fixed(recorder)
        others: list[Any] = [None if form is None else recorder.tensor(*form) for form in forms]
        s, x8, scale_inv, slot = others
        state = kind.value.state
        states = [None if state is None else recorder.column(state) for _ in range(2)]
        saved = Saved(*weight, A, B, slot, x8, scale_inv, s)
        call = Call(kind.value.numbers.spec, None, None, states[1])
        stand_ins = [t for t in (dy, A, B, *weight, *others, *states) if t is not None]
        return Operands(stand_ins, (dy, saved, call), ())

    def run(dy: Any, saved: Saved, call: Call) -> Four:
        lora_A = kind.value.forms[1]
        return run_backward(_run, dy, saved, call, needs, (lora_A and lora_A[1], None))

    if shape.numel() == 0:
        raise NotRecorded("no rows")
    return RecordedFunction(run, kind.device, operands)
