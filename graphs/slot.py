# SPDX-License-Identifier: Apache-2.0
"""What stands in for a captured layer's `forward`: it replays, runs the eager one, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .capture import Layer
from .errors import ReplayError
from .signature import TensorSpec, difference, flatten
from .tracer import autocast_state

if TYPE_CHECKING:
    from .manager import GraphManager


class Slot:
    """A layer's forward while graphs exist."""

    def __init__(self, manager: GraphManager, index: int, layer: Layer) -> None:
        self.manager, self.index, self.layer, self.module = manager, index, layer, layer.module
        self.eager = self.__wrapped__ = layer.forward
        self._autocast = partial(autocast_state, manager.device.type)
        assert manager.graphs is not None
        self.graphs = manager.graphs
        self.call = next(c for c in self.graphs.calls if c.forward_step.layer == index)
        self._had = vars(self.module).get("forward")

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or unpickled layer is an eager one: it has other parameters than the graphs."""
        return Eager, (self.module, self._had)

    def install(self) -> None:
        self.module.__dict__["forward"] = self

    def remove(self) -> None:
        if self._had is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self._had

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.manager._suspended:
            return self.eager(*args, **kwargs)
        if not (self.module.training and torch.is_grad_enabled()):
            return self._without_grad(args, kwargs)
        tensors, spec = flatten((args, kwargs))
        graphs = self.graphs
        call = graphs.forwards[graphs.position]
        if (
            call is not None
            and call.forward_step.layer == self.index
            and spec == call.spec
            and self._autocast() == call.autocast
            and call.known(tensors)
        ):
            return call.run(tensors)
        return self._unlike(call, tensors, spec, args, kwargs)

    def _unlike(self, call: Any, tensors: Any, spec: Any, args: Any, kwargs: Any) -> Any:
        """Refuse the call, or run it eagerly where only its shapes, constants or types are new."""
        out_of_turn = call is None or call.forward_step.layer != self.index
        call = self.call if out_of_turn else call
        error = self._mismatch(call, tensors, spec)
        if self.manager.on_new_shape == "error" or error is None:
            if out_of_turn:
                self.graphs.refuse_forward(self.index)
            if error is not None:
                raise error
            call.refuse_stranger(tensors)
        self.graphs.eager_calls = True
        self.manager.warn_once(f"shape of {self.layer.name}", f"{error}: this call runs eagerly")
        return self.eager(*args, **kwargs)

    def _mismatch(self, call: Any, tensors: Any, spec: Any) -> ReplayError | None:
        name = self.layer.name
        if found := difference(call.spec, spec):
            return ReplayError(name, "arguments", *found)
        if (index := call.differing(tensors)) >= 0:
            path, expected = call.inputs[index].path, call.inputs[index].spec
            return ReplayError(name, f"input {path}", expected, TensorSpec.of(tensors[index]))
        if self._autocast() != call.autocast:
            return ReplayError(name, "autocast", call.autocast, self._autocast())
        return None

    def _without_grad(self, args: Any, kwargs: Any) -> Any:
        if (
            self.manager.eval == "capture"
            and not self.module.training
            and not torch.is_grad_enabled()
        ):
            return self.manager.evaluate(self, args, kwargs)
        return self.eager(*args, **kwargs)


class Eager:
    """What a copy of a captured layer runs."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any] | None) -> None:
        self.module, self.forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.forward is not None:  # the instance's own, as it was before the graphs
            return self.forward(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)
