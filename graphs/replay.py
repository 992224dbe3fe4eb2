# SPDX-License-Identifier: Apache-2.0
"""Replays captured calls in their order. Everything in a `launch_` method runs at every step: it is kept short.

A forward checks the call, copies what comes from outside, launches, and hands its outputs on as aliases of the graph's
memory, or as copies where they leave the layers. Autograd then calls the backward, which does the same for gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .backend import Backend
from .errors import ReplayError
from .grads import LayerGrads
from .order import Direction, Order, ReplayOrderError, Step
from .signature import TensorSpec, distinct
from .watch import LayerWatch

_uses = torch._C._storage_Use_Count


def _nothing() -> None:
    return None


class Handed:
    """A buffer that eager code gets to see: an output, or the gradient of an input.

    `chained`: the next layer's graph reads the same memory. Such a buffer is handed out as an alias, which must be gone
    when the memory is used again, or, if somebody was seen to keep it longer, as a copy.
    """

    def __init__(self, name: str, layer: str, alias: Tensor, chained: bool) -> None:
        self.name, self.layer, self.alias, self.chained = name, layer, alias, chained
        self.copy = True
        self.kept = False
        self.ref: Callable[[], Tensor | None] = _nothing
        self.version = -1  # of what the caller got; gradients may be changed in place
        self._storage: StorageWeakRef | None = None
        self._held = alias.untyped_storage()
        self.cdata = self._held._cdata
        self.base = _uses(self.cdata)

    def hand(self) -> Tensor:
        return self.alias.clone() if self.copy else self.alias.detach()

    def given(self, x: Tensor) -> None:
        """Note what the caller got, to know it again."""
        self.ref, self.version = weakref.ref(x), x._version
        if self.copy:
            self._storage = StorageWeakRef(x.untyped_storage())

    def probe(self) -> None:
        """In a trial, at the end of the buffer's life: does anybody still have it?"""
        if self._storage is not None and not self._storage.expired():
            self.kept = True


class Input:
    """How one tensor of a call reaches its buffer: copied by this call, copied by an earlier call of its group, or
    there already as the output of another call."""

    def __init__(self, path: str, spec: TensorSpec) -> None:
        self.path, self.spec = path, spec
        self.static: Tensor | None = None  # set: this call copies
        self.repeats = False  # it has expanded dimensions, which `static` lacks
        self.group: Group | None = None
        self.same_as = -1  # an earlier input of this call that is the same object
        self.origin: Handed | None = None
        self.given: Handed | Group | None = None  # whose object it has to be

    def like(self, x: Tensor) -> bool:
        spec = self.spec
        return (
            x.shape == spec.shape
            and x.stride() == spec.stride
            and x.dtype is spec.dtype
            and x.requires_grad is spec.requires_grad
            and x.device == spec.device
        )


class Group:
    """Inputs of several calls that are one object."""

    def __init__(self) -> None:
        self.ref: Callable[[], Tensor | None] = _nothing
        self.version = 0
        self.first = ""


class Call:
    """One captured (layer, microbatch): its two graphs and the ways in and out of them."""

    forward_graph: Any
    backward_graph: Any

    def __init__(self, graphs: GraphSet, name: str, forward: Step, backward: Step) -> None:
        self.graphs, self.name = graphs, name
        self.forward_step, self.backward_step = forward, backward
        self.forward_at = graphs.order.index(forward)
        self.backward_at = graphs.order.index(backward)
        self.spec: list[Any] = []
        self.autocast: tuple[bool, torch.dtype | None] = (False, None)
        self.inputs: list[Input] = []
        self.outputs: list[Handed] = []
        self.rebuild: Callable[[Sequence[Tensor]], Any] = tuple
        self.constants: list[int] = []  # outputs without gradient
        self.grad_outputs: list[tuple[int, Tensor]] = []  # output, buffer
        self.grad_inputs: list[Handed | None] = []  # of the inputs that require grad
        self.differentiable: list[int] = []
        self.parameters: list[nn.Parameter] = []  # whose gradients go back through autograd
        self.parameter_grads: list[Tensor] = []
        self.grads: LayerGrads | None = None
        self.watch: LayerWatch
        self.generation = 0
        self.pending: list[Tensor] = []

    # forward

    def known(self, tensors: Sequence[Tensor]) -> bool:
        """Whether each tensor is an object that was handed out or copied before, unmodified, or like the captured one
        where this call copies. In a training loop that goes on as it began this is all that is ever asked."""
        for x, expected in zip(tensors, self.inputs, strict=True):
            given = expected.given
            if given is not None:
                if given.ref() is not x or x._version != given.version:
                    return False
            elif expected.same_as >= 0:
                if tensors[expected.same_as] is not x:
                    return False
            elif not expected.like(x):
                return False
        return True

    def differing(self, tensors: Sequence[Tensor]) -> int:
        """The first tensor that is not like the captured one; -1 if all are."""
        for i, x in enumerate(tensors):
            if not self.inputs[i].like(x):
                return i
        return -1

    def refuse_stranger(self, tensors: Sequence[Tensor]) -> NoReturn:
        """All tensors are like the captured ones, but one is not the object it has to be."""
        for x, expected in zip(tensors, self.inputs, strict=True):
            if expected.origin is not None:
                origin = expected.origin
                if origin.ref() is not x or x._version != origin.version:
                    self._refuse_origin(expected, x)
            elif expected.static is None:
                group = expected.group
                assert group is not None
                first = tensors[expected.same_as] if expected.same_as >= 0 else group.ref()
                if first is not x or x._version != (
                    group.version if expected.same_as < 0 else x._version
                ):
                    self._refuse_group(expected, group)
        raise AssertionError("refuse_stranger without a stranger")

    def run(self, tensors: list[Tensor]) -> Any:
        """The layer's output for `tensors`, which are `known`."""
        if (changed := self.watch.check()) >= 0:
            self.watch.refuse(changed)
        self.pending = tensors
        differentiable = [tensors[i] for i in self.differentiable] or [self.graphs.anchor]
        outputs = _Replay.apply(self, *differentiable, *self.parameters)
        for handed, x in zip(self.outputs, outputs, strict=True):
            if handed.chained:
                handed.given(x)
        return self.rebuild(outputs)

    def launch_forward(self) -> tuple[Tensor, ...]:
        graphs = self.graphs
        graphs.check_dead(self.forward_at)
        tensors, self.pending = self.pending, []
        for x, expected in zip(tensors, self.inputs, strict=True):
            if expected.static is not None:
                expected.static.copy_(distinct(x) if expected.repeats else x)
                if expected.group is not None:
                    group = expected.group
                    group.ref, group.version = weakref.ref(x), x._version
        self.forward_graph.launch(graphs.stream())
        self.generation += 1
        graphs.advance()
        return tuple([handed.hand() for handed in self.outputs])

    # backward

    def launch_backward(
        self, generation: int, grads: tuple[Tensor | None, ...]
    ) -> list[Tensor | None]:
        graphs = self.graphs
        if graphs.position != self.backward_at or generation != self.generation:
            graphs.refuse_order(self.backward_step, generation != self.generation)
        graphs.check_dead(self.backward_at)
        for k, buffer in self.grad_outputs:
            grad = grads[k]
            if grad is None:
                buffer.zero_()
            elif not grad.is_set_to(buffer):  # by eager code, or a hook: perhaps a view of it
                shares = grad.untyped_storage()._cdata == buffer.untyped_storage()._cdata
                buffer.copy_(grad.clone() if shares else grad)
        if self.grads is not None:
            self.grads.before_launch()
        self.backward_graph.launch(graphs.stream())
        if self.grads is not None:
            self.grads.after_launch()
        graphs.advance()
        found: list[Tensor | None] = []
        for handed in self.grad_inputs:
            if handed is None:
                found.append(None)
                continue
            grad = handed.hand()
            if handed.copy and handed.chained:
                handed.given(grad)
            found.append(grad)
        found += [grad.clone() for grad in self.parameter_grads]
        return found

    # refusals

    def _refuse_origin(self, expected: Input, x: Tensor) -> NoReturn:
        origin = expected.origin
        assert origin is not None
        found = f"another tensor, at {x.data_ptr():#x}"
        if origin.ref() is x:
            found = "that tensor, modified in place since"
        raise ReplayError(
            self.name, f"input {expected.path}", f"the tensor handed out as {origin.name}", found
        )

    def _refuse_group(self, expected: Input, group: Group) -> NoReturn:
        raise ReplayError(
            self.name,
            f"input {expected.path}",
            f"the same tensor as {group.first}, unmodified",
            "another one, or a modified one",
        )


class _Replay(torch.autograd.Function):
    """A captured layer as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = call.launch_forward()
        ctx.call, ctx.generation = call, call.generation
        ctx.set_materialize_grads(False)
        if call.constants:
            ctx.mark_non_differentiable(*[outputs[k] for k in call.constants])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ReplayError(ctx.call.name, "create_graph", "False", "True: no second derivative")
        return None, *ctx.call.launch_backward(ctx.generation, grads)


class GraphSet:
    """The captured block of steps, and where in it the replay stands."""

    def __init__(self, order: Order, repeats: int, backend: Backend, anchor: Tensor) -> None:
        self.order, self.repeats, self.backend, self.anchor = order, repeats, backend, anchor
        self.position = self.blocks = 0
        self.eager_calls = False  # in this iteration, in place of a block
        self.calls: list[Call] = []
        self.forwards: list[Call | None] = [None] * len(order)
        self.handed: list[
            tuple[int, Handed]
        ] = []  # chained, with the step after which nobody may have them
        self.checks: list[list[Handed]] = [[] for _ in order]
        self.trial = True
        self._stream: int | None = None

    def start(self) -> None:
        """The first iteration hands out copies only, and finds out who keeps them."""
        for death, handed in self.handed:
            self.checks[(death + 1) % len(self.order)].append(handed)

    def stream(self) -> int:
        found = self.backend.stream()
        if found != self._stream:
            if self._stream is not None and (self.position or self.blocks % self.repeats):
                name = self.order.layers[self.order[self.position].layer]
                raise ReplayError(name, "stream", hex(self._stream), hex(found))
            self._stream = found
        return found

    def advance(self) -> None:
        self.position += 1
        if self.position == len(self.order):
            self.position = 0
            self.blocks += 1
            if self.trial and self.blocks > self.repeats:
                self.end_trial()

    def end_trial(self) -> None:
        """From now on, what nobody kept is handed out without a copy."""
        self.trial = False
        for _, handed in self.handed:
            handed.copy, handed.version = handed.kept, -1
        self.checks = [[h for h in handed if not h.copy] for handed in self.checks]

    def check_dead(self, position: int) -> None:
        """Refuse to launch while somebody has what this launch may overwrite."""
        for handed in self.checks[position]:
            if handed.copy:
                if self.trial:
                    handed.probe()
            elif _uses(handed.cdata) > handed.base:
                self._refuse_kept(handed)
            elif handed.version >= 0 and handed.alias._version != handed.version:
                raise ReplayError(
                    handed.layer,
                    handed.name,
                    "the values that its graph wrote, which a backward may need",
                    "modified in place since (README, rule 6): discard_iteration()",
                )

    def _refuse_kept(self, handed: Handed) -> NoReturn:
        handed.copy = True
        raise ReplayError(
            handed.layer,
            handed.name,
            "nobody to hold it once the next layer has read it, as in the iteration after capture",
            "something that does (a variable, a list, an autograd graph of eager code); it is handed out as a copy "
            "from now on: discard_iteration() and repeat this one",
        )

    def refuse_order(self, step: Step, stale: bool = False) -> NoReturn:
        if not self.calls:
            name = self.order.layers[step.layer]
            raise ReplayError(name, "graphs", "captured ones", "graphs that reset() has dropped")
        expected = self.order[self.position]
        reason = "replay of a forward that is over" if stale else "replay out of order"
        raise ReplayOrderError(reason, self.position, expected, step, self.order.layers)

    def refuse_forward(self, layer: int) -> NoReturn:
        done = sum(
            s.layer == layer and s.direction is Direction.FORWARD
            for s in self.order.steps[: self.position]
        )
        self.refuse_order(Step(layer, done, Direction.FORWARD))

    def end_iteration(self) -> None:
        if self.position or (self.blocks % self.repeats and not self.eager_calls):
            found, expected = None, self.order[self.position]
            reason = "replay ended early"
            raise ReplayOrderError(reason, self.position, expected, found, self.order.layers)
        self._align()

    def _align(self) -> None:
        """To the beginning of an iteration."""
        self.blocks -= self.blocks % self.repeats
        self.eager_calls = False

    def rewind(self) -> None:
        """Give up the iteration that is running."""
        self.position, self._stream = 0, None
        self._align()
        for call in self.calls:
            call.generation += 1

    def destroy(self) -> None:
        """Free everything, although the caller's autograd graphs may still hold these calls."""
        for call in self.calls:
            call.forward_graph.destroy()
            call.backward_graph.destroy()
            call.generation, call.grads = -1, None
            for held in (call.inputs, call.outputs, call.grad_outputs, call.grad_inputs):
                held.clear()
            call.parameters, call.parameter_grads = [], []
        self.calls.clear()
        self.forwards.clear()
        self.handed.clear()
        self.checks.clear()
        self.backend.release()
