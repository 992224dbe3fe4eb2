# SPDX-License-Identifier: Apache-2.0
"""Watches a training loop and writes down the order in which its layers really run.

A forward is seen by a forward hook, when the layer returns. A backward is seen by a node without effect on the
layer's outputs. Autograd reaches that node when it starts the layer's backward, so the order is the engine's own,
whatever pipeline schedule drives it.

A recomputation is not a forward. A non-reentrant checkpoint recomputes while a backward runs, and is recognized by
that. A reentrant checkpoint runs its first forward without grad, inside an autograd Function; only its recomputation
carries the autograd graph. Both find the Function's context on the Python stack, which joins the two. A forward
without grad that is never recomputed was no training step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from ..plan.order import Direction, Order, OrderError, Step, check_count, layer_names
from .backward_marks import enclosing_contexts, in_backward, mark_outputs
from .hooks import Hook


@dataclass(eq=False)
class _Run:
    """One run of a layer. `trains` is False until a run with grad is seen, which a recomputation may be."""

    layer: int
    iteration: _Iteration
    trains: bool


class Observer(Protocol):
    """Told of every training forward. `call` is one object for a forward and its backward."""

    def before(self, layer: int, args: Any, kwargs: Any) -> None:
        """A forward of `layer` in training mode begins; it may turn out not to be recorded."""

    def forward(self, layer: int, call: object, output: Any) -> None:
        """The forward that began last was recorded as `call` and returns `output`."""

    def recomputation(self, layer: int) -> None:
        """A forward of `layer` begins inside a backward: something checkpoints the layer from outside."""

    def reentrant(self, layer: int) -> None:
        """A reentrant checkpoint runs the layer without grad, and recomputes it later."""


@dataclass(eq=False)
class _Iteration:
    events: list[tuple[_Run, Direction]] = field(default_factory=list)
    regions: dict[BackwardCFunction, list[_Run]] = field(default_factory=dict)
    ended: bool = False

    def numbered(self) -> tuple[list[Step], dict[_Run, int]]:
        """The steps, and which microbatch each call is."""
        microbatches: dict[_Run, int] = {}
        forwards: dict[int, int] = {}
        steps = []
        for call, direction in self.events:
            if not call.trains:
                continue
            if direction is Direction.FORWARD:
                microbatches[call] = forwards.get(call.layer, 0)
                forwards[call.layer] = microbatches[call] + 1
            steps.append(Step(call.layer, microbatches[call], direction))
        return steps, microbatches

    def close(self, ended: bool) -> None:
        """Drop the contexts, which hold the autograd graph, whose nodes hold this iteration: a cycle."""
        self.ended = ended
        self.regions.clear()


class OrderRecorder:
    """Records the order of (layer, microbatch, direction) over eager warm-up iterations.

    The microbatch of a forward is how often its layer has run forward in this iteration. A backward
    has its forward's microbatch. Forwards in eval mode or without grad are not recorded.

        with OrderRecorder(len(blocks), num_microbatches=2).attach(blocks) as recorder:
            for step in range(3):
                train_step()
                recorder.end_iteration()
        print(recorder.order.steps)
    """

    def __init__(
        self,
        layers: int | Iterable[str],
        num_microbatches: int = 1,
        observer: Observer | None = None,
    ) -> None:
        self._observer = observer
        self.layers = layer_names(layers)
        self.num_microbatches = check_count("num_microbatches", num_microbatches)
        self.num_iterations = 0
        self.paused = False  # nothing is seen meanwhile
        self.microbatches: Mapping[Any, int] = {}  # of the last iteration's calls
        self._order: Order | None = None
        self._iteration = _Iteration()
        self._handles: list[RemovableHandle] = []

    @property
    def order(self) -> Order:
        if self._order is None:
            raise RuntimeError("no iteration recorded yet: call end_iteration() after the first")
        return self._order

    def attach(self, modules: Sequence[nn.Module]) -> OrderRecorder:
        """Hook `modules`, one per layer and in the layers' order, until `detach()`."""
        modules = list(modules)
        if self._handles:
            raise RuntimeError("the recorder is already attached: call detach() first")
        self._check_modules(modules)
        for layer, module in enumerate(modules):
            hook = Hook(partial(self.after_forward, layer))
            self._handles.append(module.register_forward_hook(hook))
            if self._observer is not None:
                before = Hook(partial(self.before_forward, layer))
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
                self._handles.append(handle)
        return self

    def detach(self) -> None:
        """Remove every hook and forget the unfinished iteration; what was recorded stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.discard_iteration()

    def __enter__(self) -> OrderRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def end_iteration(self) -> Order:
        """Check that the iteration is complete and runs as the earlier ones did.

        An iteration that is refused is dropped; the ones before it stay recorded.
        """
        steps, self.microbatches = self._iteration.numbered()
        self._next_iteration(ended=True)
        order = Order(steps, self.layers, self.num_microbatches)
        if self._order is None:
            self._order = order
        for position, (expected, actual) in enumerate(zip(self._order, order, strict=True)):
            if expected != actual:
                reason = "the order differs from the earlier iterations'"
                raise OrderError(reason, position, expected, actual, self.layers)
        self.num_iterations += 1
        return self._order

    def discard_iteration(self) -> None:
        """Forget what this iteration has recorded so far, e.g. after a step that was skipped."""
        self._next_iteration(ended=False)

    def forwards_seen(self, layer: int) -> int:
        """How often the layer has run forward in this iteration."""
        return sum(
            call.layer == layer and call.trains and direction is Direction.FORWARD
            for call, direction in self._iteration.events
        )

    def begins_anew(self, layer: int) -> bool:
        """Whether a forward of `layer`, coming now, would begin a microbatch as the iteration began.

        True if `layer` ran first in this iteration, all layers have run equally often, and every backward has run.
        """
        events = self._iteration.events
        if not events or events[0][0].layer != layer or in_backward():
            return False
        counts = {self.forwards_seen(index) for index in range(len(self.layers))}
        return len(counts) == 1 and len(events) == 2 * len(self.layers) * counts.pop()

    def _next_iteration(self, ended: bool) -> None:
        self._iteration.close(ended)
        self._iteration = _Iteration()

    def _check_modules(self, modules: Sequence[nn.Module]) -> None:
        if len(modules) != len(self.layers):
            raise ValueError(f"modules has {len(modules)} entries, expected {len(self.layers)}")
        seen: dict[nn.Module, str] = {}
        for name, module in zip(self.layers, modules, strict=True):
            if not isinstance(module, nn.Module):
                raise TypeError(f"layer {name!r} must be an nn.Module, got {type(module).__name__}")
            if module in seen:
                raise ValueError(f"layers {seen[module]!r} and {name!r} are the same module")
            seen[module] = name
        for module, name in seen.items():
            for inner in module.modules():
                if inner is not module and inner in seen:
                    raise ValueError(f"layer {seen[inner]!r} lies inside layer {name!r}")

    def before_forward(self, layer: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and self._observer is not None and not self.paused:
            # asked here, because a recomputation may stop before the layer returns
            if in_backward():
                self._observer.recomputation(layer)
            self._observer.before(layer, args, kwargs)

    def after_forward(self, layer: int, module: nn.Module, args: Any, output: Any) -> Any:
        if not module.training or self.paused:
            return None
        call = self._identify(layer)
        if call is not None and self._observer is not None and not torch.is_grad_enabled():
            self._observer.reentrant(layer)
        if call is None or not torch.is_grad_enabled():
            return None
        marked = mark_outputs(output, partial(self._on_backward, call))
        if marked is None:
            raise RuntimeError(
                f"layer {self.layers[layer]!r} returned no tensor that requires grad, so it has no "
                "backward to record (tensors are looked for in tuples, lists and dicts)"
            )
        if self._observer is not None:
            self._observer.forward(layer, call, marked)
        return marked

    def _identify(self, layer: int) -> _Run | None:
        """The run that this forward is, or recomputes; None if it is not recorded."""
        regions, grad = self._iteration.regions, torch.is_grad_enabled()
        if not in_backward():
            contexts = [] if grad else enclosing_contexts()
            return self._begin(layer, contexts) if grad or contexts else None
        contexts = enclosing_contexts()
        depth = next((i for i, context in enumerate(contexts) if context in regions), None)
        if depth is None:
            return None
        calls = regions[contexts[depth]]
        call = next((call for call in calls if call.layer == layer), None)
        if call is not None:
            calls.remove(call)
            call.trains = call.trains or grad
            for context in contexts[:depth]:
                regions.setdefault(context, []).append(call)
        return call

    def _begin(self, layer: int, contexts: list[BackwardCFunction]) -> _Run:
        call = _Run(layer, self._iteration, trains=not contexts)
        self._iteration.events.append((call, Direction.FORWARD))
        for context in contexts:
            self._iteration.regions.setdefault(context, []).append(call)
        return call

    def _on_backward(self, call: _Run) -> None:
        if call.iteration.ended and self._handles:
            raise RuntimeError(
                f"backward of layer {self.layers[call.layer]!r} belongs to an iteration that has "
                "ended: call end_iteration() after the last backward"
            )
        call.iteration.events.append((call, Direction.BACKWARD))
