# SPDX-License-Identifier: Apache-2.0
"""`lora_linear` by plans (recorded/node.py): its ops are asked once a shape, and each way is one call of csrc."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor

from lorakernels.autograd.linear.node import LinearNode
from lorakernels.autograd.linear.values import Adapter, Call, LoRASpec, SharedSpec
from lorakernels.recorded.forms import forms_of
from lorakernels.recorded.node import PLANS, NodePlan, Operands, run_node
from lorakernels.recorded.routing import NOT_PLAIN, PLAIN, WATCHED, are_plain, is_plain
from lorakernels.recorded.shared import shared
from lorakernels.recorded.stand_in import NotPlanned, Recording, Site, column_offset
from lorakernels.values import Weight

P = TypeVar("P")
# bias, A, B, W, W's scale_inv, and the FP8 state of x and of dy
LinearTensors = tuple[Tensor | None, ...]
MOST_PLANS = 8  # that a layer remembers


class RowsNode(torch.autograd.Function):
    """LinearNode for an x [..., K]. Autograd sees no view of x or of y, which would be two more nodes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        y = LinearNode.forward(ctx, x.view(-1, x.shape[-1]), *others)
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, *others = LinearNode.backward(ctx, dy.reshape(-1, dy.shape[-1]))
        return (None if dx is None else dx.view(*dy.shape[:-1], dx.shape[1]), *others)


class LinearKind(NamedTuple):
    """All that a linear layer's launches depend on, but for the addresses, the FP8 column, the dropout site and x.

    Attributes:
        weight: (N, K).
        forms: shapes and dtypes of bias, A and B; None for what is not there.
        scales: shape of W's scale_inv.
        state: shape of the FP8 state's tensors; None under BlockScaling.
        numbers: of the call, as `LoRASpec.numbers` has them.
        device: index of the GPU.
    """

    weight: torch.Size
    forms: tuple[tuple[torch.Size, torch.dtype] | None, ...]
    scales: torch.Size
    state: torch.Size | None
    numbers: SharedSpec
    device: int


class Kind:
    """A LinearKind, compared by identity (recorded/shared.py)."""

    def __init__(self, value: LinearKind) -> None:
        self.value = value

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.value.device)

    def fixed(self, recording: Recording) -> tuple[list[Any], Weight]:
        """Stand-ins for bias, A and B, and for W."""
        shape, forms, *_ = self.value
        return [None if form is None else recording.tensor(*form) for form in forms], Weight(
            recording.tensor(shape, torch.uint8),
            recording.tensor(self.value.scales, torch.float32),
        )

    def operands(
        self, shape: tuple[int, ...], dtype: torch.dtype, drops: bool, recording: Recording
    ) -> Operands:
        """The operands of a forward for an x of this shape."""
        x = recording.tensor(shape, dtype)
        tensors, weight = self.fixed(recording)
        slot = recording.tensor((2,), torch.int64) if drops else None
        state = self.value.state
        states = [None if state is None else recording.column(state) for _ in range(2)]
        given = [t for t in (x, *tensors, *weight, slot, *states) if t is not None]
        call = Call(replace(self.value.numbers.spec, site=Site(0)), slot, *states)
        columns = 0 if state is None else 2
        return Operands(given, (x, *tensors, weight, call), (0, 1, 2, 3), columns)


class _Taken(NamedTuple, Generic[P]):
    """A call that `plan` took: a key, and `number` tensors for which `holds_for` is true."""

    key: Hashable
    number: int
    holds_for: Callable[..., bool]
    plan: Callable[[], P | None]


class Known(Generic[P]):
    """The plans of a layer's last calls, found by the forms of the tensors that they took.

    It holds no tensor, and no address: FSDP2 gives a parameter new memory every time.

    Attributes:
        kind: of the last tensors that were asked about; None if the weight is plain, or a tensor is not torch's own.
        sites: the layer's dropout site.
    """

    def __init__(self, spec: LoRASpec) -> None:
        self.kind: Kind | None = None
        self.sites = (spec.site,)
        self._numbers, self._offset = spec.numbers, column_offset(spec.column)
        self._taken: tuple[_Taken[P], ...] = ()

    def plan(self, given: Sequence[Tensor], key: Hashable) -> P | None:
        """The plan that took tensors of these forms with this key; None if it has to be asked for."""
        for known, number, holds_for, plan in self._taken:
            if known == key and number == len(given) and holds_for(*given):
                return plan()
        return None

    def ask(
        self,
        record: Callable[..., P],
        tensors: LinearTensors,
        given: Sequence[Tensor],
        key: Hashable,
        *more: Hashable,
    ) -> P | None:
        """The plan of `tensors`' kind, which `record(kind, *more)` makes; None if the ops have to run.

        `given` and `key` are what `plan` finds it by.
        """
        kind = self.kind = _ask(tensors, self._numbers)
        if kind is None:
            return None
        whole = (record, kind, *more)
        plan: P | None
        try:
            plan = PLANS[whole]
        except KeyError:
            plan = PLANS.make(whole, partial(record, kind, *more))
        if plan is not None:
            taken = _Taken(key, len(given), forms_of(given), ref(plan))
            self._taken = (taken, *self._taken[: MOST_PLANS - 1])
        return plan

    def columns(self, state_x: Tensor | None, state_dy: Tensor | None) -> tuple[int, ...]:
        """The addresses of the layer's columns in the FP8 states, as plans take them."""
        if state_x is None or state_dy is None:
            return ()
        return state_x.data_ptr() + self._offset, state_dy.data_ptr() + self._offset


def _ask(tensors: LinearTensors, numbers: SharedSpec) -> Kind | None:
    bias, lora_A, lora_B, data, scale_inv, state, _ = tensors
    if scale_inv is None or data is None or not are_plain(*tensors):
        return None
    if state is None and numbers.spec.power_of_two is None:
        return None
    parameters = (bias, lora_A, lora_B)
    forms = tuple([None if t is None else (t.shape, t.dtype) for t in parameters])
    of_state, device = None if state is None else state.shape, data.get_device()
    kind = LinearKind(data.shape, forms, scale_inv.shape, of_state, numbers, device)
    return shared(Kind, kind)


def known_of(spec: LoRASpec, by: str) -> Known[Any]:
    """What is known of a layer, remembered by `spec` for those that ask `by` one name."""
    known: Known[Any] | None = spec.memo.get(by)
    if known is None:
        known = spec.memo[by] = Known(spec)
    return known


_NONE: tuple[bool, ...] = (False,) * 4  # of what needs a gradient


# A plan, what is known of the layer, and x with those tensors that are there, but for the states
FoundLinear = tuple[NodePlan, Known[NodePlan], list[Tensor]]


def found_linear(
    x: Tensor, tensors: LinearTensors, spec: LoRASpec, draws: bool, asks: bool = False
) -> FoundLinear | None:
    """The plan for an x [..., K], if a call with tensors of these forms came before; else None.

    With `asks`, it need not have come before: x has to be one that `check_input` takes, and contiguous. None then says
    that the ops have to run. `draws` is whether there will be a slot.
    """
    known: Known[NodePlan] | None = spec.memo.get("linear")
    if (known is None and not asks) or not is_plain():
        return None
    known = known_of(spec, "linear") if known is None else known
    given = [t for t in (x, *tensors) if t is not None]
    grad = torch.is_grad_enabled()
    plan = known.plan(given, (draws, grad))
    if plan is None:
        if not asks or type(x) not in PLAIN:
            return None
        flags = _NONE
        if grad:
            flags = tuple([t is not None and t.requires_grad for t in (x, *tensors[:3])])
        more = (x.shape, x.dtype, draws, flags)
        plan = known.ask(_record, tensors, given, (draws, grad), *more)
    if plan is None:
        return None
    if tensors[-1] is not None:
        del given[-2:]
    return plan, known, given


def run_linear(
    found: FoundLinear, tensors: LinearTensors, spec: LoRASpec, slot: Tensor | None
) -> Tensor | None:
    """y [..., N] by the plan that `found_linear` gave for these tensors; None where an address is not aligned, so that
    the ops have to run."""
    plan, known, given = found
    bias, lora_A, lora_B, *_, state_x, state_dy = tensors
    if slot is not None:
        given.append(slot)
    # Only what needs a gradient is autograd's business: each tensor more costs time.
    seen = (given[0], bias if plan.trains[1] else None, lora_A, lora_B)
    columns = known.columns(state_x, state_dy)
    attributes = {"state_dy": state_dy, "spec": spec}
    y: Tensor | None = run_node(plan, given, seen, columns, known.sites, attributes)
    return y


def planned_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, adapter: Adapter, call: Call
) -> Tensor | None:
    """y [..., N] of a contiguous x [..., K] on a GPU; None where the ops have to run."""
    lora_A, lora_B, _ = adapter
    spec, slot, state, state_dy, _ = call
    tensors = (bias, lora_A, lora_B, *weight, state, state_dy)
    found = found_linear(x, tensors, spec, slot is not None, asks=True)
    return None if found is None else run_linear(found, tensors, spec, slot)


def ways_of_kinds() -> dict[Kind, str]:
    """For each kind of layer that ran eagerly on a GPU "" if there is a plan, or else why there is none."""
    ways: dict[Kind, str] = {}
    for (record, kind, *_), why_not in PLANS.ways():
        if record is _record:
            ways[kind] = why_not and ways.get(kind, why_not)
    return ways


def way_of(spec: LoRASpec, kinds: Mapping[Kind, str]) -> str | None:
    """How a layer's calls with `spec` ran: "" by plans, or else why by the ops. `kinds`: of `ways_of_kinds`.

    None if that is not known any more.
    """
    known: Known[Any] | None = spec.memo.get("linear")
    if known is None:
        return WATCHED
    return NOT_PLAIN if known.kind is None else kinds.get(known.kind)


def _record(
    kind: Kind, shape: torch.Size, dtype: torch.dtype, draws: bool, flags: tuple[bool, ...]
) -> NodePlan:
    if shape.numel() == 0:
        raise NotPlanned("no rows")
    operands = partial(kind.operands, shape, dtype, draws)
    return NodePlan(RowsNode, kind.device, operands, (*flags, False, False))
