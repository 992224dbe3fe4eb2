# SPDX-License-Identifier: Apache-2.0
"""Which captured block replays, and what becomes of blocks that none of them takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..capture.captured_blocks import CapturedBlocks
from ..compare.signature import CONSTANT_TYPES, TensorSpec, autocast_state
from ..interface.errors import CaptureError
from ..interface.options import GraphOptions, WarnOnce
from ..record.recorded_block import BlockRecorder, RecordedBlock
from ..replay.block_graphs import BlockGraphs, NoGraphs
from ..replay.graphed_call import GraphedCall


class BlockRunner:
    """Replays the captured block that a call begins, and records a block that no graphs are for.

    Args:
        blocks: the captured blocks.
        options: what new shapes do, and how many are captured.
        device: the layers' device type.
    """

    def __init__(self, blocks: CapturedBlocks, options: GraphOptions, device: str) -> None:
        self.blocks, self.options, self.device = blocks, options, device
        self.suspended = False  # the layers run eagerly meanwhile
        self.warn_once = WarnOnce()
        self.graphs: Any = None  # of the block that replays; `NoGraphs` while a block is recorded
        self._before: BlockGraphs | None = None  # the graphs before the block that is recorded
        self._recorder = BlockRecorder(blocks.managed.names, blocks.managed.modules, device)
        # Recorded blocks: captured, or to be captured first; to be captured next; those whose capture failed
        self.recorded: list[RecordedBlock] = []
        self._waiting: list[RecordedBlock] = []
        self.failed: list[RecordedBlock] = []
        self._first: Any = None  # the call that the block began with
        self._refused: list[Any] = []  # first calls of blocks that cannot be captured
        self._error: CaptureError | None = None  # why; `end_iteration` raises it once

    @property
    def current(self) -> BlockGraphs | None:
        """The graphs that replay, or that did before the block that is being recorded."""
        return self._before or self.graphs

    # called by LayerForward

    def switch(self, layer: int, spec: list[Any], tensors: Sequence[Tensor]) -> GraphedCall | None:
        """Between blocks: turn to the captured block that begins with this call. Its first call, or None."""
        graphs = self.blocks.choose(layer, spec, tensors, autocast_state(self.device))
        if graphs is None:
            return None
        self.graphs = graphs
        return graphs.forwards[0]

    def begin_block(self, layer: int, spec: list[Any], tensors: Sequence[Tensor]) -> None:
        """Begin a block with this call. It is recorded, unless it is known that it cannot be captured."""
        self._before, self.graphs = self.graphs, NoGraphs
        specs, autocast = tuple(map(TensorSpec.of, tensors)), autocast_state(self.device)
        self._first = layer, _kinds(spec), specs, autocast
        self._recorder.begin(traced=self._first not in self._refused)

    def recording_goes_on(self, layer: int) -> bool:
        """Whether a call of `layer`, coming now, belongs to the block that is being recorded, if there is one.

        A block that is over ends here.
        """
        if self._recorder.active and self._recorder.complete(layer):
            self._end_block()
        return self._recorder.active

    def record(self, layer: int, eager: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call of the block that is being recorded; its eager output."""
        self.blocks.managed.look_for_ddp()
        try:
            return self._recorder.run(layer, eager, args, kwargs)
        except CaptureError:
            self._refused.append(self._first)
            raise

    # called by GraphManager

    @property
    def between_iterations(self) -> bool:
        """Whether no block is being recorded."""
        return not self._recorder.active

    @property
    def between_blocks(self) -> bool:
        """Whether all that has begun has run its backward."""
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
        ended = None
        try:
            ended = self._recorder.end()
        except CaptureError as error:
            self._refused.append(self._first)
            self._error = self._error or error
        self.blocks.progress.done += self._recorder.microbatches
        for block in ended.blocks() if ended else ():
            if any(block.like(o) for o in (*self.recorded, *self._waiting, *self.failed)):
                continue
            if len(self.recorded) + len(self._waiting) >= (limit := self.options.max_shapes):
                text = f"max_shapes={limit} shapes are captured: further shapes run eagerly"
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
            block = self._waiting.pop(0)
            try:
                self.blocks.capture(block)
            except Exception:
                self.failed.append(block)
                raise
            self.recorded.append(block)

    def retry(self) -> None:
        """Try again to capture the blocks whose capture failed."""
        self._waiting, self.failed = self.failed + self._waiting, []
        self._capture_waiting()

    def discard_iteration(self) -> None:
        """Forget the iteration that is running."""
        self._error = None
        self._recorder.discard()
        if self._before is not None:
            self.graphs, self._before = self._before, None
        self.blocks.rewind()

    def begin(self) -> None:
        """Captures are complete: the first block's graphs are the ones to replay."""
        self.graphs = self.blocks.captured[0].graphs
        self.blocks.progress.restart()

    def stop(self) -> None:
        """All graphs are dropped."""
        self._recorder.discard()
        self._waiting, self.failed, self._refused = [], [], []
        self.graphs = self._before = None


def _kinds(spec: Sequence[Any]) -> list[tuple[type, Any]]:
    """As `typed`, but objects that cannot be constants count by their type alone: each call may have another one."""
    return [(type(x), x if x is None or isinstance(x, CONSTANT_TYPES) else None) for x in spec]
