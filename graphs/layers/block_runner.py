# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is among the sets of graphs, and the blocks that none of them has: recorded, then captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..capture.captured_blocks import CapturedBlocks
from ..errors import CaptureError
from ..options import GraphOptions, WarnOnce
from ..record.recorded_block import BlockRecorder, RecordedBlock
from ..replay.block_graphs import BlockGraphs, NoGraphs
from ..replay.graphed_call import GraphedCall
from ..signature import PLAIN, TensorSpec, autocast_state


class BlockRunner:
    """Replays the captured block that a call begins, and records a block that no graphs are for.

    Args:
        blocks: what is captured.
        options: what new shapes do, and how many are captured.
        device: the layers' device type.
    """

    def __init__(self, blocks: CapturedBlocks, options: GraphOptions, device: str) -> None:
        self.blocks, self.options, self.device = blocks, options, device
        self.suspended = False  # the layers run eagerly meanwhile
        self.warn_once = WarnOnce()
        self.graphs: Any = None  # the set whose turn it is; `NoGraphs` while a block is recorded
        self._before: BlockGraphs | None = None  # whose turn it was then
        self._recorder = BlockRecorder(blocks.managed.names, blocks.managed.modules, device)
        self.recordings: list[
            RecordedBlock
        ] = []  # of the captured sets, or of those to capture first
        self._waiting: list[RecordedBlock] = []  # recorded among replays, to be captured
        self.failed: list[RecordedBlock] = []  # of those, the ones that could not be
        self._first: Any = None  # the call that the block began with
        self._refused: list[Any] = []  # such calls, of blocks that cannot be recorded
        self._error: CaptureError | None = None  # why, to be said once

    @property
    def current(self) -> BlockGraphs | None:
        """The set whose turn it is, or was before the block that is recorded."""
        return self._before or self.graphs

    # the layers' slots call these

    def switch(self, layer: int, spec: list[Any], tensors: Sequence[Tensor]) -> GraphedCall | None:
        """Between blocks: the first call of a set that takes this one; it is that set's turn then."""
        found = self.blocks.choose(layer, spec, tensors, autocast_state(self.device))
        if found is None:
            return None
        self.graphs = found
        return found.forwards[0]

    def begin_block(self, layer: int, spec: list[Any], tensors: Sequence[Tensor]) -> None:
        """Record the block that begins with this call, unless it is known that it cannot be captured."""
        self._before, self.graphs = self.graphs, NoGraphs
        specs, autocast = tuple(map(TensorSpec.of, tensors)), autocast_state(self.device)
        self._first = layer, _kinds(spec), specs, autocast
        self._recorder.begin(traced=self._first not in self._refused)

    def recording_goes_on(self, layer: int) -> bool:
        """Whether a call of `layer` that comes now belongs to a block that is being recorded; one that is over ends."""
        if self._recorder.active and self._recorder.complete(layer):
            self._end_block()
        return self._recorder.active

    def record(self, layer: int, eager: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The eager output of a call in a block that is being recorded."""
        self.blocks.managed.look_for_ddp()
        try:
            return self._recorder.run(layer, eager, args, kwargs)
        except CaptureError:
            self._refused.append(self._first)
            raise

    # and the manager these

    @property
    def between_iterations(self) -> bool:
        return not self._recorder.active

    @property
    def between_blocks(self) -> bool:
        if self._recorder.active:
            return self._recorder.complete(0)
        return bool(self.graphs.position == 0)

    def goes_on(self, layer: int) -> bool:
        """Whether a forward of `layer` belongs to the block that is running, or begins one."""
        if self.between_blocks:
            return True
        if self._recorder.active:
            return self._recorder.forwards_seen(layer) < self.blocks.progress.num_microbatches
        call = self.graphs.forwards[self.graphs.position]
        return call is not None and call.layer == layer

    def _end_block(self) -> None:
        self.graphs, self._before = self._before, None
        recording = None
        try:
            recording = self._recorder.end()
        except CaptureError as error:
            self._refused.append(self._first)
            self._error = self._error or error
        self.blocks.progress.done += self._recorder.microbatches
        for block in recording.blocks() if recording else ():
            if any(block.like(o) for o in (*self.recordings, *self._waiting, *self.failed)):
                continue
            if len(self.recordings) + len(self._waiting) >= (limit := self.options.max_shapes):
                text = f"max_shapes={limit} sets of graphs are captured: further shapes run eagerly"
                self.warn_once("max_shapes", text)
                continue
            self._waiting.append(block)

    def end_iteration(self) -> None:
        """Check that the iteration is complete, and capture what it recorded."""
        if self._recorder.active:
            self._end_block()
        self.graphs.end_iteration()
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._capture_waiting()

    def _capture_waiting(self) -> None:
        while self._waiting:
            recording = self._waiting.pop(0)
            try:
                self.blocks.capture(recording)
            except Exception:
                self.failed.append(recording)
                raise
            self.recordings.append(recording)

    def retry(self) -> None:
        """Capture what failed."""
        self._waiting, self.failed = self.failed + self._waiting, []
        self._capture_waiting()

    def discard_iteration(self) -> None:
        self._error = None
        self._recorder.discard()
        if self._before is not None:
            self.graphs, self._before = self._before, None
        self.blocks.rewind()

    def begin(self) -> None:
        """The sets are captured: it is the first one's turn."""
        self.graphs = self.blocks.captured[0].graphs
        self.blocks.progress.restart()

    def stop(self) -> None:
        """The sets are dropped."""
        self._recorder.discard()
        self._waiting, self.failed, self._refused = [], [], []
        self.graphs = self._before = None


def _kinds(spec: Sequence[Any]) -> list[tuple[type, Any]]:
    """`typed`, but an object that cannot be a constant counts by its type alone: each call has its own."""
    return [(type(x), x if x is None or isinstance(x, PLAIN) else None) for x in spec]
