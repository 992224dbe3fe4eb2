# SPDX-License-Identifier: Apache-2.0
"""`lora_linear` by recorded calls (recorded/node.py): ops are chosen once a shape, and each way is one call of csrc."""

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
from lorakernels.recorded.node import RECORDINGS, Operands, RecordedNode, run_node
from lorakernels.recorded.routing import NOT_PLAIN, PLAIN, WATCHED, are_plain, is_plain
from lorakernels.recorded.shared import shared
from lorakernels.recorded.stand_in import NotRecorded, Recorder, Site, column_offset
from lorakernels.values import Weight

P = TypeVar("P")
# bias, A, B, W, W's scale_inv, and the FP8 state of x and of dy
LinearTensors = tuple[Tensor | None, ...]
MOST_CALLS = 8  # that a layer remembers


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
        forms: shapes and dtypes of bias, A and B; None for an absent one.
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


class SharedKind:
    """A LinearKind, compared by identity (recorded/shared.py)."""

    def __init__(self, value: LinearKind) -> None:
        self.value = value

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.value.device)

    def fixed(self, recorder: Recorder) -> tuple[list[Any], Weight]:
        """Stand-ins for bias, A and B, and for W."""
        shape, forms, *_ = self.value
        return [None if form is None else recorder.tensor(*form) for form in forms], Weight(
            recorder.tensor(shape, torch.uint8),
            recorder.tensor(self.value.scales, torch.float32),
        )

    def operands(
        self, shape: tuple[int, ...], dtype: torch.dtype, drops: bool, recorder: Recorder
    ) -> Operands:
        """The operands of a forward for an x of this shape."""
        x = recorder.tensor(shape, dtype)
        tensors, weight = self.fixed(recorder)
        slot = recorder.tensor((2,), torch.int64) if drops else None
        state = self.value.state
        states = [None if state is None else recorder.column(state) for _ in range(2)]
        stand_ins = [t for t in (x, *tensors, *weight, slot, *states) if t is not None]
        call = Call(replace(self.value.numbers.spec, site=Site(0)), slot, *states)
        columns = 0 if state is None else 2
        return Operands(stand_ins, (x, *tensors, weight, call), (0, 1, 2, 3), columns)


class _LastCall(NamedTuple, Generic[P]):
    """A call that `recorded` took, a weak reference: its key, and `number` tensors of which `holds_for` is true."""

    key: Hashable
    number: int
    holds_for: Callable[..., bool]
    recorded: Callable[[], P | None]


class LastCalls(Generic[P]):
    """The recordings of a layer's last calls, found by the forms of the tensors that the calls had.

    It holds no tensor, and no address: FSDP2 gives a parameter new memory every time.

    Attributes:
        kind: of the tensors that `record` last had; None if the weight is plain, or a tensor is not torch's own.
        sites: the layer's dropout site.
    """

    def __init__(self, spec: LoRASpec) -> None:
        self.kind: SharedKind | None = None
        self.sites = (spec.site,)
        self._numbers, self._offset = spec.numbers, column_offset(spec.column)
        self._calls: tuple[_LastCall[P], ...] = ()

    def find(self, tensors: Sequence[Tensor], key: Hashable) -> P | None:
        """The recording of a last call with this key and tensors of these forms; None without such a call."""
        for key_then, number, holds_for, recorded in self._calls:
            if key_then == key and number == len(tensors) and holds_for(*tensors):
                return recorded()
        return None

    def record(
        self,
        record: Callable[..., P],
        layer: LinearTensors,
        tensors: Sequence[Tensor],
        key: Hashable,
        *more: Hashable,
    ) -> P | None:
        """What `record(kind, *more)` makes, once for all layers of one kind; None if the ops have to run.

        Args:
            record: makes the recording.
            layer: the layer's tensors, of which the kind is made.
            tensors, key: by these `find` has the recording from now on.
            more: arguments of `record` besides the kind.
        """
        kind = self.kind = _kind_of(layer, self._numbers)
        if kind is None:
            return None
        of_all = (record, kind, *more)
        recorded: P | None
        try:
            recorded = RECORDINGS[of_all]
        except KeyError:
            recorded = RECORDINGS.make(of_all, partial(record, kind, *more))
        if recorded is not None:
            call = _LastCall(key, len(tensors), forms_of(tensors), ref(recorded))
            self._calls = (call, *self._calls[: MOST_CALLS - 1])
        return recorded

    def columns(self, state_x: Tensor | None, state_dy: Tensor | None) -> tuple[int, ...]:
        """The addresses of the layer's columns in the FP8 states, as recordings take them."""
        if state_x is None or state_dy is None:
            return ()
        return state_x.data_ptr() + self._offset, state_dy.data_ptr() + self._offset


def _kind_of(layer: LinearTensors, numbers: SharedSpec) -> SharedKind | None:
    """None where no call can be recorded."""
    bias, lora_A, lora_B, data, scale_inv, state, _ = layer
    if scale_inv is None or data is None or not are_plain(*layer):
        return None
    if state is None and numbers.spec.power_of_two is None:
        return None
    parameters = (bias, lora_A, lora_B)
    forms = tuple([None if t is None else (t.shape, t.dtype) for t in parameters])
    of_state, device = None if state is None else state.shape, data.get_device()
    kind = LinearKind(data.shape, forms, scale_inv.shape, of_state, numbers, device)
    return shared(SharedKind, kind)


def last_calls(spec: LoRASpec, name: str) -> LastCalls[Any]:
    """A layer's last calls of one sort, which `spec` remembers by `name`."""
    calls: LastCalls[Any] | None = spec.memo.get(name)
    if calls is None:
        calls = spec.memo[name] = LastCalls(spec)
    return calls


_NONE: tuple[bool, ...] = (False,) * 4  # nothing needs a gradient


# A forward's recording, the layer's last calls, and of this call x and the layer's tensors but for the states.
LinearMatch = tuple[RecordedNode, LastCalls[RecordedNode], Sequence[Tensor]]


def find_linear(
    x: Tensor, layer: LinearTensors, spec: LoRASpec, draws: bool, records: bool = False
) -> LinearMatch | None:
    """The recording for an x [..., K], if a call with tensors of these forms came before; else None.

    Args:
        draws: whether the call has a slot.
        records: records the call if none like it came before. x has to be one that `check_input` takes, and contiguous.
            None then means that the ops have to run.
    """
    calls: LastCalls[RecordedNode] | None = spec.memo.get("linear")
    if (calls is None and not records) or not is_plain():
        return None
    calls = last_calls(spec, "linear") if calls is None else calls
    tensors = [t for t in (x, *layer) if t is not None]
    grad = torch.is_grad_enabled()
    recorded = calls.find(tensors, (draws, grad))
    if recorded is None:
        if not records or type(x) not in PLAIN:
            return None
        flags = _NONE
        if grad:
            flags = tuple([t is not None and t.requires_grad for t in (x, *layer[:3])])
        more = (x.shape, x.dtype, draws, flags)
        recorded = calls.record(_record, layer, tensors, (draws, grad), *more)
    if recorded is None:
        return None
    return recorded, calls, tensors if layer[-1] is None else tensors[:-2]


def run_linear(
    match: LinearMatch, layer: LinearTensors, spec: LoRASpec, slot: Tensor | None
) -> Tensor | None:
    """y [..., N] by the recording that `find_linear` found for these tensors.

    None where an address is not aligned: the ops have to run.
    """
    recorded, calls, tensors = match
    bias, lora_A, lora_B, *_, state_x, state_dy = layer
    # Autograd sees only what needs a gradient: each tensor more costs time.
    seen = (tensors[0], bias if recorded.trains[1] else None, lora_A, lora_B)
    columns = calls.columns(state_x, state_dy)
    addresses: tuple[Tensor | int, ...]
    addresses = (*tensors, *columns) if slot is None else (*tensors, slot, *columns)
    attributes = {"state_dy": state_dy, "spec": spec}
    y: Tensor | None = run_node(recorded, addresses, seen, columns, calls.sites, attributes)
    return y


def recorded_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, adapter: Adapter, call: Call
) -> Tensor | None:
    """y [..., N] of a contiguous x [..., K] on a GPU; None where the ops have to run."""
    lora_A, lora_B, _ = adapter
    spec, slot, state, state_dy, _ = call
    layer = (bias, lora_A, lora_B, *weight, state, state_dy)
    match = find_linear(x, layer, spec, slot is not None, records=True)
    return None if match is None else run_linear(match, layer, spec, slot)


def ways_of_kinds() -> dict[SharedKind, str]:
    """How each kind of layer ran eagerly on a GPU: "" if recorded, or else why by the ops."""
    ways: dict[SharedKind, str] = {}
    for (record, kind, *_), why_not in RECORDINGS.ways():
        if record is _record:
            ways[kind] = why_not and ways.get(kind, why_not)
    return ways


def way_of(spec: LoRASpec, kinds: Mapping[SharedKind, str]) -> str | None:
    """How a layer's calls with `spec` ran: "" if recorded, or else why by the ops. `kinds`: of `ways_of_kinds`.

    None if RECORDINGS has forgotten it.
    """
    calls: LastCalls[Any] | None = spec.memo.get("linear")
    if calls is None:
        return WATCHED
    return NOT_PLAIN if calls.kind is None else kinds.get(calls.kind)


def _record(
    kind: SharedKind, shape: torch.Size, dtype: torch.dtype, draws: bool, flags: tuple[bool, ...]
) -> RecordedNode:
    if shape.numel() == 0:
        raise NotRecorded("no rows")
    operands = partial(kind.operands, shape, dtype, draws)
    return RecordedNode(RowsNode, kind.device, operands, (*flags, False, False))
