# SPDX-License-Identifier: Apache-2.0
"""A block of steps as it was recorded, from which graphs are captured.

`BlockRecorder` records one block while the graphs of other blocks replay. A call that no captured block takes begins
the block. The first call after its last backward ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..compare.attributes import Attributes, plain_attributes
from ..plan.call_spec import FromOutput, FromOutside, same_groups
from ..plan.order import Order, Step
from .order_recorder import OrderRecorder
from .tracer import Trace, Tracer


@dataclass(eq=False)
class RecordedBlock:
    """Steps in their order, and the trace of their calls. `attributes`: the layers' attributes before the block ran."""

    order: Order
    trace: Trace
    attributes: Sequence[Attributes]

    def blocks(self) -> list[RecordedBlock]:
        """The blocks to capture for this one.

        If each microbatch runs forward and backward before the next, these are its microbatches, one of each shape:
        later they may come in any order. Otherwise it is the block itself.
        """
        count, size = self.order.num_microbatches, len(self.order) // self.order.num_microbatches
        parts = [self.order.steps[m * size : (m + 1) * size] for m in range(count)]
        if any(step.microbatch != m for m, part in enumerate(parts) for step in part):
            return [self]
        blocks: list[RecordedBlock] = []
        for m, part in enumerate(parts):
            one = self._alone(m, part)
            if one is None:
                return [self]
            if not any(one.like(other) for other in blocks):
                blocks.append(one)
        return blocks

    def _alone(self, m: int, steps: Sequence[Step]) -> RecordedBlock | None:
        """Microbatch `m` as a block of its own; None if it reads outputs of another microbatch."""
        specs = {}
        for layer in range(len(self.order.layers)):
            spec = self.trace.specs[layer, m]
            sources: list[FromOutput | FromOutside] = []
            for source in spec.sources:
                if isinstance(source, FromOutput):
                    if source.call[1] != m:
                        return None
                    source = FromOutput((source.call[0], 0), source.index)
                sources.append(source)
            specs[layer, 0] = replace(spec, sources=tuple(sources))
        order = Order([replace(s, microbatch=0) for s in steps], self.order.layers, 1)
        calls = {(layer, 0): self.trace.calls[layer, m] for layer, _ in specs}
        trace = Trace(specs, calls, self.trace.recomputed, self.trace.reentrant)
        return RecordedBlock(order, trace, self.attributes)

    def like(self, other: RecordedBlock) -> bool:
        """Whether both could replay the same graphs."""
        mine, theirs = self.trace.specs, other.trace.specs
        return (
            self.order == other.order
            and all(call.like(theirs[key], key[1], key[1]) for key, call in mine.items())
            and same_groups([(call, theirs[key]) for key, call in mine.items()])
        )


class BlockRecorder:
    """Records one block at a time. `LayerForward` tells it of every call, in place of hooks."""

    def __init__(self, names: Sequence[str], modules: Sequence[nn.Module], device: str) -> None:
        self._names, self._modules, self._device = tuple(names), list(modules), device
        self._recorder: OrderRecorder | None = None
        self._tracer: Tracer | None = None
        self._attributes: list[Attributes] = []
        self.microbatches = 0  # of the block that ended last

    @property
    def active(self) -> bool:
        return self._recorder is not None

    def begin(self, traced: bool = True) -> None:
        """Begin a block. Without `traced` it will not be captured, and only its end is looked for."""
        self._tracer = Tracer(self._names, self._device) if traced else None
        self._recorder = OrderRecorder(self._names, 1, self._tracer)
        self._attributes = [plain_attributes(m) for m in self._modules]

    def run(self, layer: int, eager: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The layer's eager output; the call is recorded."""
        recorder, module = self._recorder, self._modules[layer]
        assert recorder is not None
        recorder.before_forward(layer, module, args, kwargs)
        output = eager(*args, **kwargs)
        marked = recorder.after_forward(layer, module, args, output)
        return output if marked is None else marked

    def complete(self, layer: int) -> bool:
        """Whether the block is over: every backward has run, and a call of `layer` would begin another block."""
        recorder = self._recorder
        return recorder is not None and recorder.begins_anew(layer)

    def forwards_seen(self, layer: int) -> int:
        """How often `layer` has run forward in the block that is being recorded."""
        return 0 if self._recorder is None else self._recorder.forwards_seen(layer)

    def end(self) -> RecordedBlock | None:
        """The recorded block; None if it was not traced.

        Raises:
            OrderError: the block is incomplete; it is forgotten then.
            CaptureError: it cannot be captured.
        """
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        recorder.num_microbatches = max(1, recorder.forwards_seen(0))
        order = recorder.end_iteration()
        self.microbatches = order.num_microbatches
        if self._tracer is None:
            return None
        trace = self._tracer.finish(recorder.microbatches)
        return RecordedBlock(order, trace, self._attributes)

    def discard(self) -> None:
        """Forget the block that is being recorded."""
        if self._recorder is not None:
            self._recorder.discard_iteration()
        self._recorder = None
