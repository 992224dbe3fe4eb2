# SPDX-License-Identifier: Apache-2.0
"""An autograd Function by plans: the launches of its forward and of its backward, each by one call of csrc.

`NodePlan.record` runs the Function's forward with stand-ins. Its backward is recorded when it first comes, for the
strides that the gradients then have. `PlannedNode` is the Function that autograd sees instead.
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
from lorakernels.recorded.plan import Kept, Place, Plan, View, finish, pick
from lorakernels.recorded.routing import is_plain
from lorakernels.recorded.stand_in import NotPlanned, Recording, StandIn

P = TypeVar("P")
UNPLANNED = (NotPlanned, NotImplementedError)  # the latter: of a kernel that csrc cannot launch


MOST_STRIDES = (
    8  # of the gradients that a node's backward has plans for; others are made contiguous
)


class Misaligned(Exception):
    """An address is not aligned as a plan's kernels need it. Nothing was launched."""


class Context:
    """Stands in for autograd's context where a Function's own code runs outside of autograd."""

    saved_tensors: tuple[Any, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


class Operands(NamedTuple):
    """Stand-ins for one call of a Function.

    Attributes:
        given: one for each address that a run gets, in order: first the tensors that autograd sees, then the others.
        arguments: of the Function's forward, without ctx.
        tensors: the places among `arguments` of what autograd sees, tensors or None.
        columns: how many of the last `given` are columns of an FP8 state.
    """

    given: list[Any]
    arguments: tuple[Any, ...]
    tensors: tuple[int, ...]
    columns: int = 0


class NodePlan:
    """The plans of a Function for operands of certain shapes.

    Attributes:
        node: the Function.
        forward: the plan of its forward.
        saved: for each tensor that it saves: a number is its place among the given ones, a Place is in the kept block.
        by_reference: the given ones among them.
        given: how many addresses its forward gets.
        others: those given ones that are not saved, and that autograd does not see. Backward may read them.
        saved_of, others_of: give those of `by_reference` and of `others` among the given tensors.
        sources_of: gives all given tensors of (*by_reference, *others, 0): 0 for one that backward does not read.
        trains: for each of the tensors that autograd sees, or None in its place, whether it needs a gradient.
    """

    def __init__(
        self,
        node: type[torch.autograd.Function],
        device: torch.device,
        operands: Callable[[Recording], Operands],
        needs_input_grad: tuple[bool, ...],
    ) -> None:
        """Raises NotPlanned: the forward does something that cannot be recorded."""
        self.node, self.device = node, device
        self.context = Context(needs_input_grad)
        self._recording, self._lock = Recording(device), Lock()
        with torch.cuda.device(device), self._recording as recording, torch.no_grad():
            self._given, arguments, self.tensors, columns = operands(recording)
            returned = node.forward(self.context, *arguments)
        self.given = len(self._given)
        self.is_tuple = isinstance(returned, tuple)
        outputs = returned if self.is_tuple else (returned,)
        self._outputs = [(t.shape, t.dtype) for t in outputs]
        self._keep()
        self.trains = [needs_input_grad[i] for i in self.tensors]
        seen = sum(arguments[i] is not None for i in self.tensors)
        tensors = range(len(self._given) - columns)
        self.others = [i for i in tensors if i >= seen and i not in self.by_reference]
        self.saved_of, self.others_of = pick(self.by_reference), pick(self.others)
        where = {place: i for i, place in enumerate([*self.by_reference, *self.others])}
        self.sources_of = pick([where.get(i, -1) for i in tensors])
        self.forward = finish(recording, self._given, outputs, self._kept, is_new=True)
        if not self.is_tuple and self.forward.outputs != (View(0, None),):
            raise NotPlanned("a result that is a part of a tensor")
        self._backwards: dict[tuple[tuple[int, ...], ...], Plan | None] = {}

    def _keep(self) -> None:
        places = {t.memory.index: i for i, t in enumerate(self._given)}
        saved = self.context.saved_tensors
        self._kept = Kept.of([t for t in saved if t is not None and t.memory.index not in places])

        def place(tensor: StandIn | None) -> int | Place | None:
            if tensor is None:
                return None
            given = places.get(tensor.memory.index)
            return self._kept.place(tensor) if given is None else given

        self.saved = tuple(map(place, saved))
        self.by_reference = [*dict.fromkeys(p for p in self.saved if isinstance(p, int))]

    def returned(self, results: list[Tensor], seen: Sequence[Tensor | None]) -> Any:
        """What the Function returns, of what its forward's run has allocated and of what autograd sees."""
        if not self.is_tuple:
            return results[0]
        return tuple(self.forward.returned(results, [t for t in seen if t is not None]))

    def backward(self, grads: Sequence[Tensor]) -> Plan | None:
        """The plan of a backward for gradients of such strides; None where it cannot be recorded."""
        strides = (grads[0].stride(),) if len(grads) == 1 else tuple([g.stride() for g in grads])
        try:
            return self._backwards[strides]
        except KeyError:
            pass
        with self._lock:
            if strides not in self._backwards and len(self._backwards) < MOST_STRIDES:
                try:
                    self._backwards[strides] = self._record_backward(strides)
                except UNPLANNED:
                    self._backwards[strides] = None
            return self._backwards.get(strides)

    def _record_backward(self, strides: tuple[tuple[int, ...], ...]) -> Plan:
        with torch.cuda.device(self.device), self._recording.again() as recording, torch.no_grad():
            described = zip(self._outputs, strides, strict=True)
            grads = [recording.tensor(*output, stride) for output, stride in described]
            block = recording.tensor((self._kept.size,), torch.uint8)
            found = self.node.backward(self.context, *grads)
        returned = [found[i] for i in self.tensors]
        return finish(recording, [*self._given, *grads, block], returned, self._kept, is_new=False)

    def real_context(
        self, saved: Sequence[Tensor], kept: Tensor, attributes: dict[str, Any]
    ) -> Context:
        """A ctx with which the Function's own backward runs by the ops."""
        known = dict(zip(self.by_reference, saved, strict=True))
        context = Context(self.context.needs_input_grad)
        vars(context).update(vars(self.context) | attributes)

        def tensor(place: int | Place | None, saved: Any) -> Tensor | None:
            if place is None or isinstance(place, Place):
                return None if place is None else place.of(kept)
            return _as(saved, known[place])

        context.saved_tensors = tuple(map(tensor, self.saved, self.context.saved_tensors))
        return context


def _as(saved: StandIn, given: Tensor) -> Tensor:
    """What the forward saved of `given`: h [B, T, K] as rows [M, K], or an e4m3 weight as bytes."""
    found = given if given.dtype == saved.dtype else given.view(saved.dtype)
    at = found.storage_offset() + saved.offset // saved.element_size()
    return found.as_strided(saved.shape, saved.stride(), at)


class NodeRun(NamedTuple):
    """What backward needs of one call of a NodePlan, besides saved tensors.

    A context holds its elements as a plain tuple, which is made in a quarter of the time.

    Attributes:
        plan: of the Function.
        others: the tensors that `plan.others` names.
        columns: the last given addresses, parts of tensors that `attributes` hold.
        sites: dropout sites.
        attributes: what the Function's forward would set on its ctx, where that differs from call to call.
    """

    plan: NodePlan
    others: tuple[Tensor, ...]
    columns: tuple[int, ...]
    sites: tuple[int, ...]
    attributes: dict[str, Any]


def _in_forward_mode() -> bool:
    """Whether tangents may be computed; True where torch does not say, so that autograd is asked."""
    level: int = getattr(forward_ad, "_current_level", 0)
    return level >= 0


def run_node(
    plan: NodePlan,
    given: Sequence[Tensor],
    seen: Sequence[Tensor | None],
    columns: tuple[int, ...],
    sites: tuple[int, ...],
    attributes: dict[str, Any],
) -> Any:
    """What the plan's Function returns, or None where an address is not aligned, so that the ops have to run.

    Args:
        given: what the plan gets, but for `columns`.
        seen: what autograd sees, in the order of the Function's arguments. It may be None for a tensor that needs no
            gradient.
        columns, sites, attributes: as of NodeRun.
    """
    addresses: tuple[Tensor | int, ...] = (*given, *columns)
    if not torch.is_grad_enabled() and not _in_forward_mode():
        # autograd's own part takes as long as a small layer's launches
        results = plan.forward.run(addresses, sites)
        return None if results is None else plan.returned(results, seen)
    run = plan, plan.others_of(given), columns, sites, attributes
    try:
        return _apply((run, addresses, plan.saved_of(given)), *seen)
    except Misaligned:
        return None


class PlannedNode(torch.autograd.Function):
    """A plan's Function. `tensors` are its arguments that autograd sees."""

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[tuple[Any, ...], Sequence[Tensor | int], Sequence[Tensor]],
        *tensors: Tensor | None,
    ) -> Any:
        """`call`: a NodeRun's elements, all given tensors and columns, and those of them that backward reads.

        Raises:
            Misaligned: nothing was launched.
        """
        run, addresses, saved = call
        plan, sites = run[0], run[3]
        forward = plan.forward
        results = forward.run(addresses, sites)
        if results is None:
            raise Misaligned
        ctx.save_for_backward(*saved, None if forward.kept < 0 else results[forward.kept])
        ctx.run = run
        return plan.returned(results, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, others, columns, sites, _ = ctx.run
        if torch.is_grad_enabled() or not is_plain():
            return _by_ops(ctx, *grads)
        backward = plan.backward(grads)
        if backward is None:
            grads = tuple([grad.contiguous() for grad in grads])
            backward = plan.backward(grads)
        if backward is None:
            return _by_ops(ctx, *grads)
        *saved, kept = ctx.saved_tensors
        given = plan.sources_of((*saved, *others, 0))
        block = 0 if kept is None else kept
        results = backward.run((*given, *columns, *grads, block), sites)
        if results is None:
            return _by_ops(ctx, *grads)
        return None, *backward.returned(results, grads, plan.given)


# Function.apply asks whether functorch is active, which `is_plain` has done.
_apply = super(torch.autograd.Function, PlannedNode).apply
# What the engine calls. torch's own looks for `backward` at each call.
if (_ctx := getattr(PlannedNode, "_backward_cls", None)) is not None:
    _ctx.apply = PlannedNode.backward


@once_differentiable
def _by_ops(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """The Function's own backward, from what the plan's forward has kept."""
    run = NodeRun(*ctx.run)
    *saved, kept = ctx.saved_tensors
    context = run.plan.real_context(saved, kept, run.attributes)
    found = run.plan.node.backward(context, *grads)
    return None, *(found[i] for i in run.plan.tensors)


class Plans(Generic[P]):
    """The plans of the last calls, by all that they depend on. None stands for what runs by the ops."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._plans: OrderedDict[Hashable, P | None] = OrderedDict()
        self._refused: dict[Hashable, str] = {}

    def __getitem__(self, key: Hashable) -> P | None:
        """Raises KeyError: it has to be made."""
        found = self._plans[key]
        self._plans.move_to_end(key)
        return found

    def make(self, key: Hashable, record: Callable[[], P]) -> P | None:
        made: P | None = None
        why_not = ""
        try:
            made = record()
        except UNPLANNED as error:
            why_not = f"no plan holds {error}"
        with self._lock:
            self._plans[key] = made
            if made is None:
                self._refused[key] = why_not
            if len(self._plans) > self._most:
                self._refused.pop(self._plans.popitem(last=False)[0], None)
        return made

    def ways(self) -> list[tuple[Any, str]]:
        """For each key "" if there is a plan, or else why there is none."""
        with self._lock:
            return [(key, self._refused.get(key, "")) for key in self._plans]

    def __len__(self) -> int:
        return len(self._plans)

    def values(self) -> list[P | None]:
        return [*self._plans.values()]

    def cache_clear(self) -> None:
        self._plans.clear()
        self._refused.clear()


# Those of all nodes and functions. A key begins with what records its plan. A plan has some 10 KB.
PLANS: Plans[Any] = Plans(3072)
