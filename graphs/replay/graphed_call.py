# SPDX-License-Identifier: Apache-2.0
"""Replays captured calls. The `launch_` methods run at every step, so they are short.

A forward checks the call, copies inputs from outside, launches, and returns its outputs: aliases of the graph's memory
for the next layer, copies where they leave the layers. Autograd then calls the backward, which does the same with
gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ..compare.signature import distinct, extension, number_types
from ..interface.errors import ReplayError
from ..plan.order import Step
from .buffers import CallInput, ExposedBuffer, InputGroup
from .cursor import ReplayCursor
from .derived import DerivedVersions
from .grads import LayerGrads
from .watch import LayerWatch


def _no_match(args: Any, kwargs: Any) -> None:
    return None


class GraphedCall:
    """The two graphs of one layer for one microbatch, and how tensors get into them and out.

    `prepare` it before the first replay.
    """

    forward_graph: Any
    backward_graph: Any
    watch: LayerWatch
    derived: DerivedVersions

    def __init__(self, cursor: ReplayCursor, name: str, forward: Step, backward: Step) -> None:
        self.cursor, self.name, self.layer = cursor, name, forward.layer
        self.forward_step, self.backward_step = forward, backward
        self.forward_at = cursor.order.index(forward)
        self.backward_at = cursor.order.index(backward)
        self.spec: list[Any] = []
        self.autocast: tuple[bool, torch.dtype | None] = (False, None)
        self.inputs: list[CallInput] = []
        self.outputs: list[ExposedBuffer] = []
        self.rebuild: Callable[[Sequence[Tensor]], Any] = tuple
        self.constants: list[int] = []  # outputs without gradient
        self.grad_outputs: list[tuple[int, Tensor]] = []  # output, buffer
        self.grad_inputs: list[ExposedBuffer | None] = []  # of the inputs that require grad
        self.differentiable: list[int] = []
        self.parameters: list[nn.Parameter] = []  # whose gradients go back through autograd
        self.parameter_grads: list[Tensor] = []
        self.grads: LayerGrads | None = None
        self.generation = 0
        self.match: Callable[[Any, Any], list[Tensor] | None] = _no_match
        self._known: list[Any] = []
        self._same: list[Any] = []
        self._like: list[Any] = []
        self._copies: list[Any] = []
        self._chained: list[Any] = []

    def prepare(self, watch: LayerWatch, derived: DerivedVersions, device_type: str) -> None:
        """Sort, once, which check or copy each replay makes of which tensor."""
        self.watch, self.derived = watch, derived
        self._numbers = number_types(self.spec)
        places = list(enumerate(self.inputs))
        self._known = [(i, x.expected) for i, x in places if x.expected is not None]
        self._same = [(i, x.same_as) for i, x in places if x.expected is None and x.same_as >= 0]
        self._like = [(i, x.like) for i, x in places if x.expected is None and x.same_as < 0]
        self._copies = [
            (i, x.static, x.repeats, x.group) for i, x in places if x.static is not None
        ]
        self._chained = [(k, x) for k, x in enumerate(self.outputs) if x.chained]
        enabled, dtype = self.autocast
        cast = (torch.is_autocast_enabled, device_type, enabled, torch.get_autocast_dtype, dtype)
        self.match = extension().matcher(
            self.spec, Tensor, self._known, self._same, self._like, cast, watch.compared
        )

    # forward

    def takes(self, spec: list[Any], tensors: Sequence[Tensor]) -> bool:
        """Whether replaying the graphs is valid for this call.

        Constants must be equal in value and type. Where this call copies, a tensor must have the captured shape,
        strides and dtype. Elsewhere it must be the very object that was handed out or copied before, unmodified.
        `match` checks the same of (args, kwargs) in one call of the extension, and autocast and the fingerprint
        besides. A training loop that goes on as it began needs `match` alone.
        """
        if spec != self.spec:
            return False
        for i, kind in self._numbers:  # 1 == 1.0 == True
            if type(spec[i]) is not kind:
                return False
        for i, remember in self._known:
            x = tensors[i]
            if remember.ref() is not x or x._version != remember.version:
                return False
        for i, j in self._same:
            if tensors[i] is not tensors[j]:
                return False
        return all([like(tensors[i]) for i, like in self._like])

    def first_unlike(self, tensors: Sequence[Tensor]) -> int:
        """Index of the first tensor of another shape, strides or dtype than the captured one; -1 if none."""
        for i, x in enumerate(tensors):
            if not self.inputs[i].like(x):
                return i
        return -1

    def refuse_other_object(self, tensors: Sequence[Tensor]) -> NoReturn:
        """ReplayError for a tensor that is of the captured shape, but not the object that it has to be."""
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
        raise AssertionError("every tensor is the object it has to be")

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """The layer's output for `tensors`, which `takes` has accepted; ReplayError if the layer has changed."""
        if (changed := self.watch.check()) >= 0:
            self.watch.refuse(changed)
        return self.replay(tensors)

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """The layer's output for tensors that `match` has found."""
        self.derived.renew_if_written()
        edges = [tensors[i] for i in self.differentiable] or [self.cursor.anchor]
        outputs = _apply(self, tensors, *edges, *self.parameters)
        for k, exposed in self._chained:
            exposed.remember(outputs[k])
        return self.rebuild(outputs)

    def launch_forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        cursor, position = self.cursor, self.forward_at
        if checks := cursor.checks[position]:
            cursor.check_released(checks)
        for i, static, repeats, group in self._copies:
            x = tensors[i]
            static.copy_(distinct(x) if repeats else x)
            if group is not None:
                group.ref, group.version = weakref.ref(x), x._version
        self.forward_graph.launch(cursor.stream())
        self.generation += 1
        cursor.advance(position)
        return tuple([x.alias.clone() if x.copy else x.alias.detach() for x in self.outputs])

    # backward

    def launch_backward(
        self, generation: int, grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        cursor, position = self.cursor, self.backward_at
        if cursor.position != position or generation != self.generation:
            cursor.refuse_order(self.backward_step, generation != self.generation)
        if checks := cursor.checks[position]:
            cursor.check_released(checks)
        for k, buffer in self.grad_outputs:
            grad = grads[k]
            if grad is None:
                buffer.zero_()
            elif not grad.is_set_to(
                buffer
            ):  # from eager code or a hook; it may be a view of the buffer
                shares = grad.untyped_storage()._cdata == buffer.untyped_storage()._cdata
                buffer.copy_(grad.clone() if shares else grad)
        if self.grads is not None:
            self.grads.before_launch()
        self.backward_graph.launch(cursor.stream())
        if self.grads is not None:
            self.grads.after_launch()
        cursor.advance(position)
        results: list[Tensor | None] = [None, None]  # for the call itself, and its tensors
        for exposed in self.grad_inputs:
            if exposed is None:
                results.append(None)
                continue
            grad = exposed.expose()
            if exposed.copy and exposed.chained:
                exposed.remember(grad)
            results.append(grad)
        if self.parameter_grads:
            results += torch._foreach_mul(self.parameter_grads, 1)  # in one launch, unlike clones
        return tuple(results)

    def drop(self, graphs: bool) -> None:
        """Free everything, although the caller's autograd graphs may still hold this call."""
        if graphs:
            self.forward_graph.destroy()
            self.backward_graph.destroy()
        self.forward_graph = self.backward_graph = None
        self.generation, self.grads, self.match = -1, None, _no_match
        for held in (self.inputs, self.outputs, self.grad_outputs, self.grad_inputs):
            held.clear()
        for sealed in (self._known, self._same, self._like, self._copies, self._chained):
            sealed.clear()
        self.parameters, self.parameter_grads = [], []

    # refusals

    def _refuse_origin(self, expected: CallInput, x: Tensor) -> NoReturn:
        origin = expected.origin
        assert origin is not None
        actual = f"another tensor, at {x.data_ptr():#x}"
        if origin.ref() is x:
            actual = "that tensor, modified in place since"
        raise ReplayError(
            self.name, f"input {expected.path}", f"the tensor handed out as {origin.name}", actual
        )

    def _refuse_group(self, expected: CallInput, group: InputGroup) -> NoReturn:
        raise ReplayError(
            self.name,
            f"input {expected.path}",
            f"the same tensor as {group.first}, unmodified",
            "another one, or a modified one",
        )


class _Replay(Function):
    """A captured layer as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any, call: GraphedCall, tensors: Sequence[Tensor], *edges: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = call.launch_forward(tensors)
        ctx.call, ctx.generation = call, call.generation
        ctx.set_materialize_grads(False)
        if call.constants:
            ctx.mark_non_differentiable(*[outputs[k] for k in call.constants])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call = ctx.call
        if torch.is_grad_enabled():
            raise ReplayError(call.name, "create_graph", "False", "True: no second derivative")
        return call.launch_backward(ctx.generation, grads)


# `Function.apply` and `BackwardCFunction.apply` first ask in Python whether functorch transforms the function. Calling
# the underlying methods saves 5 µs a replay; `_apply` still asks about functorch.
_bare_apply = super(Function, _Replay).apply
_Replay._backward_cls.apply = _Replay.backward  # type: ignore[attr-defined]


def _apply(*args: Any) -> tuple[Tensor, ...]:
    if torch._C._are_functorch_transforms_active():
        return _Replay.apply(*args)  # raises the error that says so
    return _bare_apply(*args)
