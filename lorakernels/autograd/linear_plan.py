# SPDX-License-Identifier: Apache-2.0
"""`lora_linear` by plans (plans/node.py): its ops are asked once a shape, and each way is one call of csrc."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lorakernels.autograd.linear_node import LinearNode
from lorakernels.autograd.linear_values import Adapter, Call, LoRASpec, SharedNumbers
from lorakernels.plans.node import Misaligned, NodePlan, NodeRun, Operands, Plans, apply_planned
from lorakernels.plans.routing import NOT_PLAIN, PLAIN, WATCHED, are_plain, is_plain
from lorakernels.plans.stand_in import NotPlanned, Recording, Site, column_address
from lorakernels.values import Weight


class LinearKind(NamedTuple):
    """All that a linear layer's launches depend on, but for the addresses, the FP8 column, the dropout site and x.

    Attributes:
        weight: (N, K).
        forms: shapes and dtypes of bias, A and B; None for what is not there.
        layout: whether the layer keeps Wᵀ.
        state: shape of the FP8 state's tensors.
        numbers: of the call, as `LoRASpec.numbers` has them.
        device: index of the GPU.
    """

    weight: torch.Size
    forms: tuple[tuple[torch.Size, torch.dtype] | None, ...]
    layout: bool
    state: torch.Size
    numbers: SharedNumbers
    device: int


class Kind:
    """A LinearKind, compared by identity, which is quicker. A second object for an equal one costs a second plan."""

    def __init__(self, value: LinearKind) -> None:
        self.value = value

    def operands(
        self, rows: int, dtype: torch.dtype, drops: bool, recording: Recording
    ) -> Operands:
        (n, k), forms, layout, state, numbers, _ = self.value
        others = [None if form is None else recording.tensor(*form) for form in forms]
        tensors = [recording.tensor((rows, k), dtype), *others]
        weight = Weight(
            recording.tensor((n, k), torch.uint8),
            recording.tensor((1,), torch.float32),
            recording.tensor((k, n), torch.uint8) if layout else None,
        )
        slot = recording.tensor((2,), torch.int64) if drops else None
        states = [recording.column(state) for _ in range(2)]
        given = [t for t in (*tensors, *weight, slot, *states) if t is not None]
        call = Call(replace(numbers.spec, site=Site(0)), slot, *states)
        return Operands(given, (*tensors, weight, call), (0, 1, 2, 3))


_kind = lru_cache(4096)(Kind)


class _Known(NamedTuple):
    """What a layer's tensors were when its kind was asked for. The kind holds as long as they are the same.

    References are weak: a weight that is replaced is freed, whether or not the layer runs again.
    """

    references: tuple[Callable[[], Tensor | None], ...]
    forms: tuple[Any, ...]
    kind: Kind | None

    def holds_for(self, tensors: tuple[Tensor | None, ...]) -> bool:
        pairs = zip(self.references, tensors, strict=True)
        same = all([r is _nothing if t is None else r() is t for r, t in pairs])
        return same and _forms(tensors) == self.forms


def _nothing() -> None:
    return None


def _forms(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Changes where a tensor's `data` is set to what needs another plan.

    An address does not: FSDP2 gives a parameter other memory at every forward.
    """
    return tuple(
        [
            None if t is None else (t.get_device(), t.dtype, t.shape, t.is_contiguous())
            for t in tensors[:4]
        ]
    )


def _ask(tensors: tuple[Tensor | None, ...], numbers: SharedNumbers) -> _Known:
    data, bias, lora_A, lora_B, scale_inv, weight_t, state, _ = tensors
    kind = None
    if state is not None and scale_inv is not None and are_plain(*tensors) and data is not None:
        parameters = (bias, lora_A, lora_B)
        forms = tuple([None if t is None else (t.shape, t.dtype) for t in parameters])
        layout, device = weight_t is not None, data.get_device()
        kind = _kind(LinearKind(data.shape, forms, layout, state.shape, numbers, device))
    references = tuple([_nothing if t is None else ref(t) for t in tensors])
    return _Known(references, _forms(tensors), kind)


def kind_of(tensors: tuple[Tensor | None, ...], spec: LoRASpec) -> Kind | None:
    """The kind of a layer, remembered by `spec`. None if it has no FP8 state, or a tensor that is not torch's own.

    `tensors` are W, bias, A, B, W's scale_inv, Wᵀ, and the FP8 state of x and of dy.
    """
    known: _Known | None = spec.memo.get("linear")
    if known is None or not known.holds_for(tensors):
        known = spec.memo["linear"] = _ask(tensors, spec.numbers)
    return known.kind


PLANS: Plans[NodePlan] = Plans(1024)  # a plan has some 10 KB


def planned_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, adapter: Adapter, call: Call
) -> Tensor | None:
    """y [M, N] of a contiguous x [M, K] on a GPU; None where the ops have to run."""
    if not is_plain():
        return None
    data, scale_inv, weight_t = weight
    lora_A, lora_B, _ = adapter
    spec, slot, state, state_dy = call
    kind = kind_of((data, bias, lora_A, lora_B, scale_inv, weight_t, state, state_dy), spec)
    if kind is None or type(x) not in PLAIN:
        return None
    seen = (x, bias, lora_A, lora_B)
    grad = torch.is_grad_enabled()
    flags = tuple([grad and t is not None and t.requires_grad for t in seen])
    key = (kind, x.shape[0], x.dtype, slot is None, flags)
    try:
        plan = PLANS[key]
    except KeyError:
        plan = PLANS.make(key, partial(_plan, *key))
    if plan is None:
        return None
    others = [t for t in (data, scale_inv, weight_t, slot) if t is not None]
    column = spec.column
    addresses = (column_address(state, column), column_address(state_dy, column))  # type: ignore[arg-type]
    run = NodeRun(plan, others, addresses, (spec.site,), {"state_dy": state_dy, "spec": spec})
    try:
        y: Tensor = apply_planned(run, *seen)
    except Misaligned:
        return None
    return y


def ways_of_kinds() -> dict[Kind, str]:
    """For each kind of layer that ran eagerly on a GPU "" if there is a plan, or else why there is none."""
    found: dict[Kind, str] = {}
    for (kind, *_), why_not in PLANS.ways():
        found[kind] = why_not and found.get(kind, why_not)
    return found


def way_of(spec: LoRASpec, kinds: Mapping[Kind, str]) -> str | None:
    """How a layer's calls with `spec` ran: "" by plans, or else why by the ops. `kinds`: of `ways_of_kinds`.

    None if that is not known any more.
    """
    known: _Known | None = spec.memo.get("linear")
    if known is None:
        return WATCHED
    return NOT_PLAIN if known.kind is None else kinds.get(known.kind)


def _plan(
    kind: Kind, rows: int, dtype: torch.dtype, draws_none: bool, flags: tuple[bool, ...]
) -> NodePlan:
    if rows == 0:
        raise NotPlanned("no rows")
    operands = partial(kind.operands, rows, dtype, not draws_none)
    device = torch.device("cuda", kind.value.device)
    return NodePlan(LinearNode, device, operands, (*flags, False, False))
