# SPDX-License-Identifier: Apache-2.0
"""A recorded autograd Function: the launches of its forward and of its backward, each by one call of csrc.

`RecordedNode` runs the Function's forward with stand-ins. Its backward is recorded when it first comes, for the
strides that the gradients then have. `ReplayNode` is the Function that autograd sees instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lorakernels.recorded.once import once_differentiable
from lorakernels.recorded.recording import BlockTensor, KeptBlock, Recording, View, finish, pick
from lorakernels.recorded.routing import is_plain
from lorakernels.recorded.stand_in import NotRecorded, Recorder, StandIn

P = TypeVar("P")
UNRECORDED = (
    NotRecorded,
    NotImplementedError,
)  # the latter is for a kernel that csrc cannot launch
# For so many strides of the gradients a node's backward has recordings. It makes other gradients contiguous.
MOST_STRIDES = 8


class Misaligned(Exception):
    """An address is not aligned as a recording's kernels need it. Nothing was launched."""


class PlainContext:
    """The ctx of a Function's own code outside of autograd."""

    saved_tensors: tuple[Any, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


class Operands(NamedTuple):
    """Stand-ins for one call of a Function.

    Attributes:
        stand_ins: one for each address of a run, in order: first the tensors that autograd sees, then the rest.
        arguments: of the Function's forward, without ctx.
        tensors: the positions among `arguments` of those that autograd sees, tensors or None.
        columns: how many stand-ins, the last ones, are columns of an FP8 state.
    """

    stand_ins: list[Any]
    arguments: tuple[Any, ...]
    tensors: tuple[int, ...]
    columns: int = 0


class RecordedNode:
    """The recordings of a Function for operands of certain shapes.

    Attributes:
        node: the Function.
        forward: the recording of its forward.
        saved: where each saved tensor is: an index into a run's addresses, or a part of the kept block.
        by_reference: the indices among them.
        count: how many addresses its forward gets.
        others: indices of tensors that are not saved, and that autograd does not see. Backward may read them.
        saved_of, others_of: give the tensors of `by_reference` and of `others`, from a run's addresses.
        sources_of: gives a run's tensors, from (*by_reference, *others, 0): 0 for one that backward does not read.
        trains: whether a gradient is needed, for each of the tensors that autograd sees.
    """

    def __init__(
        self,
        node: type[torch.autograd.Function],
        device: torch.device,
        operands: Callable[[Recorder], Operands],
        needs_input_grad: tuple[bool, ...],
    ) -> None:
        """Raises NotRecorded: the forward does something that cannot be recorded."""
        self.node, self.device = node, device
        self.context = PlainContext(needs_input_grad)
        self._recorder, self._lock = Recorder(device), Lock()
        with torch.cuda.device(device), self._recorder as recorder, torch.no_grad():
            self._stand_ins, arguments, self.tensors, columns = operands(recorder)
            returned = node.forward(self.context, *arguments)
        self.count = len(self._stand_ins)
        self.is_tuple = isinstance(returned, tuple)
        outputs = returned if self.is_tuple else (returned,)
        self._outputs = [(t.shape, t.dtype) for t in outputs]
        self._keep()
        self.trains = [needs_input_grad[i] for i in self.tensors]
        seen = sum(arguments[i] is not None for i in self.tensors)
        tensors = range(len(self._stand_ins) - columns)
        self.others = [i for i in tensors if i >= seen and i not in self.by_reference]
        self.saved_of, self.others_of = pick(self.by_reference), pick(self.others)
        source = {place: i for i, place in enumerate([*self.by_reference, *self.others])}
        self.sources_of = pick([source.get(i, -1) for i in tensors])
        self.forward = finish(recorder, self._stand_ins, outputs, self._kept, is_new=True)
        if not self.is_tuple and self.forward.outputs != (View(0, None),):
            raise NotRecorded("a result that is a part of a tensor")
        self._backwards: dict[tuple[tuple[int, ...], ...], Recording | None] = {}

    def _keep(self) -> None:
        places = {t.memory.index: i for i, t in enumerate(self._stand_ins)}
        saved = self.context.saved_tensors
        self._kept = KeptBlock.of(
            [t for t in saved if t is not None and t.memory.index not in places]
        )

        def place(tensor: StandIn | None) -> int | BlockTensor | None:
            if tensor is None:
                return None
            index = places.get(tensor.memory.index)
            return self._kept.place(tensor) if index is None else index

        self.saved = tuple(map(place, saved))
        self.by_reference = [*dict.fromkeys(p for p in self.saved if isinstance(p, int))]

    def returned(self, results: list[Tensor], seen: Sequence[Tensor | None]) -> Any:
        """What the Function returns, from the results of its forward's run and the tensors that autograd sees."""
        if not self.is_tuple:
            return results[0]
        return tuple(self.forward.returned(results, [t for t in seen if t is not None]))

    def backward(self, grads: Sequence[Tensor]) -> Recording | None:
        """The recording of a backward for gradients of such strides; None where it cannot be recorded."""
        strides = (grads[0].stride(),) if len(grads) == 1 else tuple([g.stride() for g in grads])
        try:
            return self._backwards[strides]
        except KeyError:
            pass
        with self._lock:
            if strides not in self._backwards and len(self._backwards) < MOST_STRIDES:
                try:
                    self._backwards[strides] = self._record_backward(strides)
                except UNRECORDED:
                    self._backwards[strides] = None
            return self._backwards.get(strides)

    def _record_backward(self, strides: tuple[tuple[int, ...], ...]) -> Recording:
        with torch.cuda.device(self.device), self._recorder.again() as recorder, torch.no_grad():
            described = zip(self._outputs, strides, strict=True)
            grads = [recorder.tensor(*output, stride) for output, stride in described]
            block = recorder.tensor((self._kept.size,), torch.uint8)
            of_inputs = self.node.backward(self.context, *grads)
        returned = [of_inputs[i] for i in self.tensors]
        return finish(
            recorder, [*self._stand_ins, *grads, block], returned, self._kept, is_new=False
        )

    def real_context(
        self, saved: Sequence[Tensor], kept: Tensor, attributes: dict[str, Any]
    ) -> PlainContext:
        """A ctx with which the Function's own backward runs by the ops."""
        sources = dict(zip(self.by_reference, saved, strict=True))
        context = PlainContext(self.context.needs_input_grad)
        vars(context).update(vars(self.context) | attributes)

        def tensor(place: int | BlockTensor | None, saved: Any) -> Tensor | None:
            if place is None or isinstance(place, BlockTensor):
                return None if place is None else place.of(kept)
            return _as(saved, sources[place])

        context.saved_tensors = tuple(map(tensor, self.saved, self.context.saved_tensors))
        return context


def _as(saved: StandIn, source: Tensor) -> Tensor:
    """The view of `source` that the forward saved: h [B, T, K] as rows [M, K], or an e4m3 weight as bytes."""
    tensor = source if source.dtype == saved.dtype else source.view(saved.dtype)
    offset = tensor.storage_offset() + saved.offset // saved.element_size()
    return tensor.as_strided(saved.shape, saved.stride(), offset)


class NodeRun(NamedTuple):
    """What the backward of one call of a RecordedNode needs besides saved tensors.

    A ctx holds its elements as a plain tuple, which is made in a quarter of the time.

    Attributes:
        recorded: the node that ran.
        others: the tensors at `recorded.others`.
        columns: the last addresses, parts of tensors that `attributes` hold.
        sites: dropout sites.
        attributes: those that the Function's forward would set on its ctx and that differ from call to call.
    """

    recorded: RecordedNode
    others: tuple[Tensor, ...]
    columns: tuple[int, ...]
    sites: tuple[int, ...]
    attributes: dict[str, Any]


def _in_forward_mode() -> bool:
    """Whether tangents may be computed; True where torch does not say, so that autograd decides."""
    level: int = getattr(forward_ad, "_current_level", 0)
    return level >= 0


def run_node(
    recorded: RecordedNode,
    addresses: tuple[Tensor | int, ...],
    seen: Sequence[Tensor | None],
    columns: tuple[int, ...],
    sites: tuple[int, ...],
    attributes: dict[str, Any],
) -> Any:
    """What the recorded Function returns; None where an address is not aligned, so that the ops have to run.

    Args:
        addresses: all tensors of the call, and then `columns`.
        seen: the tensors that autograd sees, in the order of the Function's arguments. One that needs no gradient may
            be None.
        columns, sites, attributes: as of NodeRun.
    """
    if not torch.is_grad_enabled() and not _in_forward_mode():
        # autograd's own part takes as long as a small layer's launches
        results = recorded.forward.run(addresses, sites)
        return None if results is None else recorded.returned(results, seen)
    run = recorded, recorded.others_of(addresses), columns, sites, attributes
    try:
        return _apply((run, addresses, recorded.saved_of(addresses)), *seen)
    except Misaligned:
        return None


class ReplayNode(torch.autograd.Function):
    """Runs a RecordedNode. `tensors` are the arguments of its Function that autograd sees."""

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[tuple[Any, ...], Sequence[Tensor | int], Sequence[Tensor]],
        *tensors: Tensor | None,
    ) -> Any:
        """`call`: a NodeRun's elements, all addresses, and those that backward reads.

        Raises:
            Misaligned: nothing was launched.
        """
        run, addresses, saved = call
        recorded, sites = run[0], run[3]
        forward = recorded.forward
        results = forward.run(addresses, sites)
        if results is None:
            raise Misaligned
        ctx.save_for_backward(*saved, None if forward.kept < 0 else results[forward.kept])
        ctx.run = run
        return recorded.returned(results, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        recorded, others, columns, sites, _ = ctx.run
        if torch.is_grad_enabled() or not is_plain():
            return _by_ops(ctx, *grads)
        backward = recorded.backward(grads)
        if backward is None:
            grads = tuple([grad.contiguous() for grad in grads])
            backward = recorded.backward(grads)
        if backward is None:
            return _by_ops(ctx, *grads)
        *saved, kept = ctx.saved_tensors
        sources = recorded.sources_of((*saved, *others, 0))
        block = 0 if kept is None else kept
        results = backward.run((*sources, *columns, *grads, block), sites)
        if results is None:
            return _by_ops(ctx, *grads)
        return None, *backward.returned(results, grads, recorded.count)


# Function.apply asks whether functorch is active, which `is_plain` has done.
_apply = super(torch.autograd.Function, ReplayNode).apply
# What the engine calls. torch's own looks for `backward` at each call.
if (_ctx := getattr(ReplayNode, "_backward_cls", None)) is not None:
    _ctx.apply = ReplayNode.backward


@once_differentiable
def _by_ops(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """The Function's own backward, from the tensors that the recorded forward has kept."""
    run = NodeRun(*ctx.run)
    *saved, kept = ctx.saved_tensors
    context = run.recorded.real_context(saved, kept, run.attributes)
    of_inputs = run.recorded.node.backward(context, *grads)
    return None, *(of_inputs[i] for i in run.recorded.tensors)


class Recordings(Generic[P]):
    """The recordings of the last calls, by all that they depend on. None stands for a call that runs by the ops."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._recordings: OrderedDict[Hashable, P | None] = OrderedDict()
        self._refused: dict[Hashable, str] = {}

    def __getitem__(self, key: Hashable) -> P | None:
        """Raises KeyError: it has to be made."""
        recorded = self._recordings[key]
        self._recordings.move_to_end(key)
        return recorded

    def make(self, key: Hashable, record: Callable[[], P]) -> P | None:
        made: P | None = None
        why_not = ""
        try:
            made = record()
        except UNRECORDED as error:
            why_not = f"no recording holds {error}"
        with self._lock:
            self._recordings[key] = made
            if made is None:
                self._refused[key] = why_not
            if len(self._recordings) > self._most:
                self._refused.pop(self._recordings.popitem(last=False)[0], None)
        return made

    def ways(self) -> list[tuple[Any, str]]:
        """Each key, with "" if it has a recording, or else why not."""
        with self._lock:
            return [(key, self._refused.get(key, "")) for key in self._recordings]

    def __len__(self) -> int:
        return len(self._recordings)

    def values(self) -> list[P | None]:
        return [*self._recordings.values()]

    def cache_clear(self) -> None:
        self._recordings.clear()
        self._refused.clear()


# Of all nodes and functions. A key begins with the function that makes its recording, of some 10 KB.
RECORDINGS: Recordings[Any] = Recordings(3072)
