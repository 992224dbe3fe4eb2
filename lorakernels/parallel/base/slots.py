# SPDX-License-Identifier: Apache-2.0
"""Memory slots: memory at fixed addresses that holds the blocks of a few layers at a time.

Layer i uses memory slot i mod k. The host tracks which layer a memory slot holds, or is being filled with. Call
`ensure` before any use of a layer's weights: it fills that layer's memory slot. It also starts the gather of the next
layer, in the direction in which the layers run. A layer that is still in its memory slot is not gathered again, which
saves gathers where forward turns into backward and back.

A gather runs on a stream of its own, after all work that was enqueued before it. So it does not wait for the layer that
runs now, and never overwrites weights that an earlier layer reads. `ensure` waits for the gather of its own layer only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lorakernels.graphs import follow
from lorakernels.parallel.ranks.comm import Transport

POISON = 0xFF  # NaN in e4m3


class Lane(Protocol):
    """Where gathers run while layers compute."""

    def enter(self) -> None:
        """Called before a layer's use: work that is enqueued from now on runs after the uses before it."""

    def run(self, gather: Callable[[], Any]) -> Any:
        """Start `gather` after all work that was enqueued so far. Returns the argument for `wait`."""

    def wait(self, pending: Any) -> None:
        """Let all work that is enqueued from now on run after that gather."""


class HostLane:
    """On a CPU, the transport runs gathers on a thread of its own."""

    def enter(self) -> None:
        pass

    def run(self, gather: Callable[[], Any]) -> Any:
        return gather()

    def wait(self, pending: Any) -> None:
        pending.wait()


class StreamLane:
    """On a GPU, gathers run on one stream of `device`. Layers run on the current stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._used: torch.cuda.Stream | None = None  # the last stream of the layers, captures aside

    def enter(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        now = torch.cuda.current_stream(self._device)
        if self._used is not None and self._used != now:
            now.wait_stream(self._used)
        self._used = now

    def run(self, gather: Callable[[], Any]) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            gather()
        return self._stream.record_event()

    def wait(self, pending: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(pending)


@dataclass(eq=False)
class Slot:
    """One memory slot.

    Attributes:
        layer: the index of the layer that it holds or is being filled with; None if unknown.
        pending: the gather that fills it.
    """

    memory: Tensor
    layer: int | None = None
    pending: Any = None


class Slots:
    """`count` memory slots for blocks of `sizes` bytes.

    Args:
        sizes: bytes of each layer's block.
        count: the number of memory slots.
        prefetch: how many layers ahead gathers start; less than `count`.
        transport: gathers a block into a memory slot.
        device: of the memory slots.

    Attributes:
        gathers: how many gathers were started so far.
        poison: overwrite a memory slot once its layer is left, and gather again for every use. This finds code that
            reads a memory slot without `ensure`.
    """

    def __init__(
        self, sizes: Sequence[int], count: int, prefetch: int, transport: Transport, device: torch.device
    ) -> None:  # fmt: skip
        self._sizes, self._ahead, self._transport = tuple(sizes), prefetch, transport
        shape = (count, max(sizes))
        self.memory = torch.empty(shape, dtype=torch.uint8, device=device)
        # `.data` has a version counter of its own: gathers do not count as changes of a weight
        self._slots = [Slot(memory) for memory in self.memory.data]
        self._lane: Lane = StreamLane(device) if device.type == "cuda" else HostLane()
        self.gathers, self.poison = 0, False
        self._on_gpu, self._captured = device.type == "cuda", False

    def of(self, layer: int) -> Tensor:
        """uint8 [size]: the memory of the block of `layer`, always the same."""
        return self.memory[layer % len(self._slots)][: self._sizes[layer]]

    def ensure(self, layer: int, ahead: int) -> None:
        """Make the memory slot of `layer` hold it, and start the gathers of the next layers.

        Args:
            layer: its index.
            ahead: 1 if the layers run forward, -1 if backward, 0 to gather no other layer.
        """
        self._enter()
        slot = self._slot(layer)
        if slot.layer != layer:
            self._start(layer)
        self._wait(slot)
        following = [layer + ahead * step for step in range(1, self._ahead + 1)] if ahead else []
        coming = [i for i in following if 0 <= i < len(self._sizes)]
        for i in coming:
            if self._slot(i).layer != i:
                self._start(i)
        if self.poison:
            self._poison({layer, *coming})

    def forget(self) -> None:
        """Wait for running gathers, and treat all memory slots as empty."""
        self._lane.enter()
        for slot in self._slots:
            self._wait(slot)
            slot.layer = None

    # a step that is captured as a whole contains all of its gathers; graphs/whole/followers.py

    def end_capture(self, failed: bool) -> None:
        """Join the gathers to the captured step."""
        for slot in self._slots:
            if failed:
                slot.pending = None
            self._wait(slot)
            slot.layer = None
        self._captured = False

    def before_replay(self) -> None:
        """The replay fills the memory slots, and the host cannot track with which layers."""
        self.forget()

    def _enter(self) -> None:
        captured = follow(self)
        if captured and not self._captured:
            for slot in self._slots:  # the device is idle when a capture begins
                slot.layer = slot.pending = None
            self._captured = True
        elif not captured and self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a sharded base cannot be captured by torch.cuda.graph: capture the step with "
                "lorakernels.graphs.StepGraph, which notifies the base of its replays"
            )
        self._lane.enter()

    def _slot(self, layer: int) -> Slot:
        return self._slots[layer % len(self._slots)]

    def _start(self, layer: int) -> None:
        slot = self._slot(layer)
        self._wait(slot)
        slot.layer = None  # in case the gather raises
        out = slot.memory[: self._sizes[layer]]
        slot.pending = self._lane.run(partial(self._transport.gather, layer, out))
        slot.layer = layer
        self.gathers += 1

    def _wait(self, slot: Slot) -> None:
        if slot.pending is not None:
            self._lane.wait(slot.pending)
            slot.pending = None

    def _poison(self, in_use: set[int]) -> None:
        for slot in self._slots:
            if slot.layer not in in_use:
                self._wait(slot)
                slot.memory.fill_(POISON)
                slot.layer = None
