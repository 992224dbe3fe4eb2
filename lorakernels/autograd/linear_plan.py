# SPDX-License-Identifier: Apache-2.0
"""`lora_linear` by plans (plans/node.py): its ops are asked once a shape, and each way is one call of csrc."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor

from lorakernels.autograd.linear_node import LinearNode
from lorakernels.autograd.linear_values import Adapter, Call, LoRASpec, SharedNumbers
from lorakernels.plans.node import Misaligned, NodePlan, NodeRun, Operands, Plans, apply_planned
from lorakernels.plans.routing import NOT_PLAIN, PLAIN, WATCHED, are_plain, is_plain
from lorakernels.plans.stand_in import NotPlanned, Recording, Site, column_address
from lorakernels.values import Weight

P = TypeVar("P")
# bias, A, B, W, W's scale_inv, Wᵀ, and the FP8 state of x and of dy
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
        layout: whether the layer keeps Wᵀ.
        scales: shape of W's scale_inv.
        state: shape of the FP8 state's tensors; None under BlockScaling.
        numbers: of the call, as `LoRASpec.numbers` has them.
        device: index of the GPU.
    """

    weight: torch.Size
    forms: tuple[tuple[torch.Size, torch.dtype] | None, ...]
    layout: bool
    scales: torch.Size
    state: torch.Size | None
    numbers: SharedNumbers
    device: int


class Kind:
    """A LinearKind, compared by identity, which is quicker. A second object for an equal one costs a second plan."""

    def __init__(self, value: LinearKind) -> None:
        self.value = value

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.value.device)

    def fixed(self, recording: Recording) -> tuple[list[Any], Weight]:
        """Stand-ins for bias, A and B, and for W."""
        (n, k), forms, layout, *_ = self.value
        return [None if form is None else recording.tensor(*form) for form in forms], Weight(
            recording.tensor((n, k), torch.uint8),
            recording.tensor(self.value.scales, torch.float32),
            recording.tensor((k, n), torch.uint8) if layout else None,
        )

    def operands(
        self, shape: tuple[int, ...], dtype: torch.dtype, drops: bool, recording: Recording
    ) -> Operands:
        """Of a forward for an x of this shape."""
        x = recording.tensor(shape, dtype)
        tensors, weight = self.fixed(recording)
        slot = recording.tensor((2,), torch.int64) if drops else None
        state = self.value.state
        states = [None if state is None else recording.column(state) for _ in range(2)]
        given = [t for t in (x, *tensors, *weight, slot, *states) if t is not None]
        call = Call(replace(self.value.numbers.spec, site=Site(0)), slot, *states)
        return Operands(given, (x, *tensors, weight, call), (0, 1, 2, 3))


_kind = lru_cache(4096)(Kind)


class Known(Generic[P]):
    """What a layer's tensors were when its kind was asked for. That holds as long as they are the same.

    References are weak: a weight that is replaced is freed, whether or not the layer runs again.

    Attributes:
        kind: None if the weight is plain, or a tensor that is not torch's own.
        fixed: the addresses of its tensors, but for the states.
        columns: the addresses of its columns in the states.
        sites: its dropout site.
    """

    def __init__(self, tensors: LinearTensors, spec: LoRASpec) -> None:
        self._references = [_nothing if t is None else ref(t) for t in tensors]
        self._forms, self._devices, self._column = _forms(tensors), _devices(tensors), spec.column
        self._plans: dict[Hashable, Callable[[], P | None]] = {}
        self.kind = _ask(tensors, spec.numbers)
        self._move(tensors, _addresses(tensors))
        self.sites = (spec.site,)

    def holds_for(self, tensors: LinearTensors) -> bool:
        """Whether they are the same tensors. An address alone may be another: FSDP2 gives new memory every time."""
        for reference, tensor in zip(self._references, tensors, strict=True):
            if reference is not _nothing if tensor is None else reference() is not tensor:
                return False
        if _forms(tensors) != self._forms:
            return False
        addresses = _addresses(tensors)
        if addresses != self._addresses:
            if _devices(tensors) != self._devices:
                return False
            self._move(tensors, addresses)
        return True

    def _move(self, tensors: LinearTensors, addresses: list[int | None]) -> None:
        self.fixed = [address for address in addresses[:-2] if address is not None]
        states = [t for t in tensors[-2:] if t is not None]
        self.columns = tuple([column_address(state, self._column) for state in states])
        self._addresses = addresses  # last, so that a thread that comes meanwhile sees no mixture

    def plan(self, plans: Plans[P], record: Callable[..., P], *key: Hashable) -> P | None:
        """`plans`' plan of this kind for `key`, which `record(kind, *key)` makes. None if the ops have to run."""
        known = self._plans.get(key)
        plan = None if known is None else known()
        if plan is not None or self.kind is None:
            return plan
        whole = (self.kind, *key)
        try:
            plan = plans[whole]
        except KeyError:
            plan = plans.make(whole, partial(record, *whole))
        if plan is not None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = ref(plan)
        return plan


def _nothing() -> None:
    return None


def _addresses(tensors: LinearTensors) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in tensors]


def _devices(tensors: LinearTensors) -> list[int]:
    return [t.get_device() for t in tensors if t is not None]


def _forms(tensors: LinearTensors) -> list[Any]:
    """What changes where a tensor's `data` is set to what needs another plan."""
    forms: list[Any] = []
    for tensor in tensors[:4]:
        if tensor is not None:
            forms += (tensor.dtype, tensor.shape, tensor.is_contiguous())
    return forms


def _ask(tensors: LinearTensors, numbers: SharedNumbers) -> Kind | None:
    bias, lora_A, lora_B, data, scale_inv, weight_t, state, _ = tensors
    if scale_inv is None or data is None or not are_plain(*tensors):
        return None
    if state is None and numbers.spec.blocks is None:
        return None
    parameters = (bias, lora_A, lora_B)
    forms = tuple([None if t is None else (t.shape, t.dtype) for t in parameters])
    layout, device = weight_t is not None, data.get_device()
    of_state = None if state is None else state.shape
    return _kind(LinearKind(data.shape, forms, layout, scale_inv.shape, of_state, numbers, device))


def known_of(tensors: LinearTensors, spec: LoRASpec, by: str) -> Known[Any]:
    """What is known of a layer, remembered by `spec` for those that ask `by` one name."""
    known: Known[Any] | None = spec.memo.get(by)
    if known is None or not known.holds_for(tensors):
        known = spec.memo[by] = Known(tensors, spec)
    return known


_NONE: tuple[bool, ...] = (False,) * 4  # of what needs a gradient
PLANS: Plans[NodePlan] = Plans(1024)  # a plan has some 10 KB


def planned_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, adapter: Adapter, call: Call
) -> Tensor | None:
    """y [..., N] of a contiguous x [..., K] on a GPU; None where the ops have to run."""
    if not is_plain() or type(x) not in PLAIN:
        return None
    lora_A, lora_B, _ = adapter
    spec, slot, state, state_dy = call
    known = known_of((bias, lora_A, lora_B, *weight, state, state_dy), spec, "linear")
    seen = (x, bias, lora_A, lora_B)
    flags = _NONE
    if torch.is_grad_enabled():
        flags = tuple([t is not None and t.requires_grad for t in seen])
    plan = known.plan(PLANS, _record, x.shape, x.dtype, slot is None, flags)
    if plan is None:
        return None
    others = [t for t in (*weight, slot) if t is not None]
    slots = () if slot is None else (slot.data_ptr(),)
    given = [x.data_ptr(), *known.fixed, *slots, *known.columns]
    attributes = {"state_dy": state_dy, "spec": spec}
    run = NodeRun(plan, others, known.columns, known.sites, attributes, given)
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
    known: Known[Any] | None = spec.memo.get("linear")
    if known is None:
        return WATCHED
    return NOT_PLAIN if known.kind is None else kinds.get(known.kind)


def _record(
    kind: Kind, shape: torch.Size, dtype: torch.dtype, draws_none: bool, flags: tuple[bool, ...]
) -> NodePlan:
    if shape.numel() == 0:
        raise NotPlanned("no rows")
    operands = partial(kind.operands, shape, dtype, not draws_none)
    return NodePlan(RowsNode, kind.device, operands, (*flags, False, False))
