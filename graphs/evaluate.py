# SPDX-License-Identifier: Apache-2.0
"""Graphs for eval(): forward only, captured at first use, one for each kind of call.

Nothing is shared between them: inputs are copied in, outputs copied out, so that they replay in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .backend import Backend
from .errors import CaptureError, hint_for
from .layer import Layer
from .signature import Signature, TensorSpec, distinct, typed
from .states import Snapshot, no_device_rng_in_checkpoints
from .tracer import autocast_state
from .watch import LayerWatch, check_hooks, plain_attributes, steady


@dataclass
class _EvalGraph:
    graph: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    rebuild: Callable[[Sequence[Tensor]], Any]
    watch: LayerWatch


class EvalGraphs:
    """All eval graphs of a manager, in one pool. Their inputs and outputs stay allocated. `states`: as for layers."""

    def __init__(self, backend: Backend, fp8_state: Any, states: Mapping[str, Any]) -> None:
        self.backend, self._fp8_state, self._states = backend, fp8_state, states
        self._graphs: dict[Any, _EvalGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, layer: Layer, args: Any, kwargs: Any) -> Any:
        """The layer's output; new tensors.

        Raises:
            CaptureError: a first call could not be captured.
            ReplayError: the layer has changed since.
        """
        signature = Signature((args, kwargs))
        specs = tuple(map(TensorSpec.of, signature.tensors))
        if (argument := signature.unsupported()) is not None:
            raise CaptureError(
                layer.name, "eval", f"argument {argument}, a constant nobody can watch"
            )
        key = (layer.name, specs, typed(signature.spec), autocast_state(self.backend.device.type))
        found = self._graphs.get(key)
        if found is None:
            found = self._graphs[key] = self._capture(layer, signature, specs)
        if (changed := found.watch.check()) >= 0:
            found.watch.refuse(changed)
        for static, x in zip(found.inputs, signature.tensors, strict=True):
            distinct(static).copy_(distinct(x))
        found.graph.launch(self.backend.stream())
        return found.rebuild([x.clone() for x in found.outputs])

    def _capture(
        self, layer: Layer, signature: Signature, specs: tuple[TensorSpec, ...]
    ) -> _EvalGraph:
        check_hooks(layer.name, layer.module)
        before = plain_attributes(layer.module)
        snapshot = Snapshot([layer.module], self._fp8_state, self._states.values())
        try:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                self.backend.session(),
                no_device_rng_in_checkpoints(),
            ):
                inputs = [self.backend.allocate(spec) for spec in specs]
                for static, x in zip(inputs, signature.tensors, strict=True):
                    distinct(static).copy_(distinct(x))
                args, kwargs = signature.rebuild(inputs)
                layer.forward(*args, **kwargs)
                with self.backend.capture() as captured:
                    output = layer.forward(*args, **kwargs)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise CaptureError(layer.name, "eval", reason, hint_for(reason)) from error
        finally:
            snapshot.restore()
        outputs = Signature(output)
        if (found := outputs.unsupported()) is not None:
            captured.graph.destroy()
            raise CaptureError(
                layer.name, "eval", f"its output {found}, which a replay cannot renew"
            )
        attributes = steady(before, plain_attributes(layer.module))
        watch = LayerWatch(layer.name, layer.module, attributes, self._states)
        return _EvalGraph(captured.graph, inputs, outputs.tensors, outputs.rebuild, watch)

    def destroy(self) -> None:
        for graph in self._graphs.values():
            graph.graph.destroy()
        self._graphs.clear()
        self.backend.release()
