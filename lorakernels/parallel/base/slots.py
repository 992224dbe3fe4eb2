# SPDX-License-Identifier: Apache-2.0
"""Slots: memory at fixed addresses, into which the blocks of the layers come by turns.

Layer i uses slot i mod k. The host knows which layer a slot holds, or is being filled with. `ensure` comes before any
use of a layer's weights, and makes that layer's slot hold it. It also starts the gather of the next layer, in the
direction in which the layers run. Where a layer is in its slot still, at both turns, nothing is gathered.

A gather begins when everything that the device was given so far is done, on a stream of its own. So it does not wait
for the layer that runs now, and never overwrites what an earlier layer reads. The layer that is ensured waits for its
own gather only.
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
    """Where gathers run, beside the layers."""

    def enter(self) -> None:
        """Called before a use: what is enqueued now comes after the uses before."""

    def run(self, gather: Callable[[], Any]) -> Any:
        """Start `gather` after all that was enqueued so far; what `wait` waits for."""

    def wait(self, pending: Any) -> None:
        """What is enqueued from now on comes after that gather."""


class HostLane:
    """On a CPU: the gather's own thread."""

    def enter(self) -> None:
        pass

    def run(self, gather: Callable[[], Any]) -> Any:
        return gather()

    def wait(self, pending: Any) -> None:
        pending.wait()


class StreamLane:
    """On a GPU: one stream. The layers run on that GPU's current stream, whichever GPU is the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._used: torch.cuda.Stream | None = None  # by the layers; a capture's does not count

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
    """`layer`: what it holds or is being filled with, None if unknown. `pending`: the gather that fills it."""

    memory: Tensor
    layer: int | None = None
    pending: Any = None


class Slots:
    """`count` slots for the blocks of `sizes` bytes.

    Args:
        sizes: of the layers' blocks.
        count: how many slots.
        prefetch: how many layers ahead gathers start; less than `count`.
        transport: fills a slot.
        device: of the slots.

    Attributes:
        gathers: how many gathers were started so far.
        poison: overwrite a slot once its layer is left, and gather it anew for every use. To find what reads a slot
            without `ensure`.
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
        """uint8 [size]: where the block of `layer` comes, always."""
        return self.memory[layer % len(self._slots)][: self._sizes[layer]]

    def ensure(self, layer: int, ahead: int) -> None:
        """Make the slot of `layer` hold it, and start the gathers of the layers that come next.

        Args:
            layer: its index.
            ahead: 1 if the layers run forward, -1 if backward, 0 if no other layer is to be gathered.
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
        """Take it that no slot holds a layer, once the gathers that run have ended."""
        self._lane.enter()
        for slot in self._slots:
            self._wait(slot)
            slot.layer = None

    # a step that is captured as a whole gathers all that it uses; graphs/whole/followers.py

    def end_capture(self, failed: bool) -> None:
        """Join the gathers to the captured step."""
        for slot in self._slots:
            if failed:
                slot.pending = None
            self._wait(slot)
            slot.layer = None
        self._captured = False

    def before_replay(self) -> None:
        """The replay fills the slots, and the host does not see with what."""
        self.forget()

    def _enter(self) -> None:
        captured = follow(self)
        if captured and not self._captured:
            for slot in self._slots:  # the device is idle when a capture begins
                slot.layer = slot.pending = None
            self._captured = True
        elif not captured and self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a sharded base in a graph of torch.cuda: capture the step with lorakernels.graphs.StepGraph, which "
                "tells the base of its replays"
            )
        self._lane.enter()

    def _slot(self, layer: int) -> Slot:
        return self._slots[layer % len(self._slots)]

    def _start(self, layer: int) -> None:
        slot = self._slot(layer)
        self._wait(slot)
        slot.layer = None  # should the gather raise
        out = slot.memory[: self._sizes[layer]]
        slot.pending = self._lane.run(partial(self._transport.gather, layer, out))
        slot.layer = layer
        self.gathers += 1

    def _wait(self, slot: Slot) -> None:
        if slot.pending is not None:
            self._lane.wait(slot.pending)
            slot.pending = None

    def _poison(self, kept: set[int]) -> None:
        for slot in self._slots:
            if slot.layer not in kept:
                self._wait(slot)
                slot.memory.fill_(POISON)
                slot.layer = None
