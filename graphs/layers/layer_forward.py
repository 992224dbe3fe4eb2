# SPDX-License-Identifier: Apache-2.0
"""The replacement of a captured layer's `forward`: it replays, runs the eager one, or refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.layer import Layer
from ..compare.signature import TensorSpec, autocast_state, difference, flatten
from ..interface.errors import ReplayError
from ..replay.block_graphs import BlockGraphs
from ..replay.graphed_call import GraphedCall
from .block_runner import BlockRunner


class LayerForward:
    """A layer's forward while graphs exist; `eager` is the layer's own."""

    def __init__(self, runner: BlockRunner, index: int, layer: Layer) -> None:
        self.runner, self.index, self.layer, self.module = runner, index, layer, layer.module
        self.eager = self.__wrapped__ = layer.forward
        self._device = runner.device
        self._had = vars(self.module).get("forward")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of the layer run eagerly, as the graphs do not know their parameters."""
        return EagerForward, (self.module, self._had)

    def install(self) -> None:
        self.module.__dict__["forward"] = self

    def remove(self) -> None:
        if self._had is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self._had

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.runner.suspended:
            return self.eager(*args, **kwargs)
        if not (self.module.training and torch.is_grad_enabled()):
            return self.eager(*args, **kwargs)
        graphs = self.runner.graphs
        call = graphs.forwards[graphs.position]
        in_turn = call is not None and call.layer == self.index
        if in_turn and (tensors := call.match(args, kwargs)) is not None:
            return call.replay(tensors)
        tensors, spec = flatten((args, kwargs))
        if in_turn and call.takes(spec, tensors) and autocast_state(self._device) == call.autocast:
            return call.run(tensors)  # raises an error if the layer has changed
        return self._unlike(tensors, spec, args, kwargs)

    def _unlike(self, tensors: Sequence[Tensor], spec: list[Any], args: Any, kwargs: Any) -> Any:
        """Find another block whose graphs take the call, refuse it, or run it eagerly if it is new."""
        runner = self.runner
        if runner.recording_goes_on(self.index):
            return runner.record(self.index, self.eager, args, kwargs)
        graphs: BlockGraphs = runner.graphs
        between = graphs.position == 0
        if between and (other := runner.switch(self.index, spec, tensors)) is not None:
            return other.run(tensors)
        due = graphs.forwards[graphs.position]
        in_turn = due is not None and due.layer == self.index
        call = due if due is not None and in_turn else _first_call(graphs, self.index)
        error = self._mismatch(call, tensors, spec)
        if runner.options.on_new_shape == "eager" and error is not None:
            runner.warn_once(f"shape of {self.layer.name}", f"{error}: this call runs eagerly")
            graphs.progress.eager = True
            return self.eager(*args, **kwargs)
        if runner.options.on_new_shape == "capture" and between and in_turn:
            what = error or f"replay of layer {self.layer.name!r}: other arguments are one object"
            text = f"{what}: its block runs eagerly, and end_iteration() captures graphs for it"
            runner.warn_once("new shape", text)
            runner.begin_block(self.index, spec, tensors)
            return runner.record(self.index, self.eager, args, kwargs)
        if not in_turn:
            graphs.refuse_forward(self.index)
        if error is not None:
            raise error
        call.refuse_other_object(tensors)

    def _mismatch(
        self, call: GraphedCall, tensors: Sequence[Tensor], spec: list[Any]
    ) -> ReplayError | None:
        """How a call of this layer differs from the captured one; None if only the objects differ."""
        name, autocast = self.layer.name, autocast_state(self._device)
        if mismatch := difference(call.spec, spec):
            return ReplayError(name, "arguments", *mismatch)
        if (index := call.first_unlike(tensors)) >= 0:
            path, expected = call.inputs[index].path, call.inputs[index].spec
            return ReplayError(name, f"input {path}", expected, TensorSpec.of(tensors[index]))
        if autocast != call.autocast:
            return ReplayError(name, "autocast", call.autocast, autocast)
        return None


def _first_call(graphs: BlockGraphs, layer: int) -> GraphedCall:
    return next(call for call in graphs.calls if call.layer == layer)


class EagerForward:
    """The forward of a copy of a captured layer."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any] | None) -> None:
        self.module, self.forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.forward is not None:  # the instance's own, as it was before the graphs
            return self.forward(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)
