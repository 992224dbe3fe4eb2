# SPDX-License-Identifier: Apache-2.0
"""The captured blocks of a training loop, one for each shape that was recorded, and how a block is captured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..compare.attributes import plain_attributes, unchanged_attributes
from ..device.backend import Graph
from ..interface.errors import CaptureError
from ..interface.report import GraphReport, Report
from ..plan.order import Step
from ..plan.plan import CapturePlan, make_plan
from ..record.recorded_block import RecordedBlock
from ..replay.block_graphs import BlockGraphs
from ..replay.cursor import IterationProgress
from ..replay.derived import DerivedVersions
from ..replay.grads import GradMemory
from ..replay.watch import LayerWatch
from .capturer import Capturer
from .layer import Layer
from .managed_layers import ManagedLayers
from .states import Pins, Snapshot, advance_all, named_states


@dataclass(eq=False)
class CapturedBlock:
    """A recorded block and its graphs. `cpu_rng`: the CPU generator's state when the capture began."""

    block: RecordedBlock
    graphs: BlockGraphs
    plan: CapturePlan
    report: Report
    cpu_rng: Tensor


class CapturedBlocks:
    """All blocks that are captured of a loop.

    Each block has a pool of its own. The memory for the parameters' gradients is common to all of them.
    `together` is GraphOptions'.
    """

    def __init__(
        self,
        managed: ManagedLayers,
        progress: IterationProgress,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.managed, self.progress, self._together = managed, progress, together
        self.captured: list[CapturedBlock] = []
        self.forwards: list[Callable[..., Any]] = []
        self.layers: list[Layer] = []
        self.grad_memory: GradMemory | None = None
        self._pins: list[Pins] = []
        self._grads = managed.grads

    def capture(
        self, block: RecordedBlock, replaced: Mapping[Step, Graph] | None = None
    ) -> CapturedBlock:
        """Capture one more block.

        Args:
            block: what was recorded.
            replaced: executable graphs of an earlier capture of this block, to be updated where CUDA can do that.

        Raises:
            CaptureError: the block cannot be captured, here or on another rank; everything is as before.
        """
        started, managed, trace = time.perf_counter(), self.managed, block.trace
        if not self.captured:
            self.forwards = [module.forward for module in managed.modules]
        layers = self._layers(trace.recomputed)
        with self._on_all_ranks("check"):
            adds = managed.check(layers, trace.reentrant, self._grads)
            plan = make_plan(block.order, trace.specs)
        trace.keep(plan.calls)
        states = named_states(managed.fp8_state, managed.rng_states)
        snapshot = Snapshot(managed.modules, managed.fp8_state, states.values())
        pins, graphs = Pins(managed.fp8_state), None
        grad_memory = (self.grad_memory or GradMemory()) if adds else None
        try:
            if grad_memory is not None:
                grad_memory.prepare([named for layer in layers for named in layer.trained])
            backend = managed.make_backend()
            free = backend.free_bytes()
            attempt = BlockGraphs(plan.order, self.progress, backend)
            drawn = list(states.values())
            capturer = Capturer(layers, trace, plan, attempt, grad_memory, drawn, replaced)
            with self._on_all_ranks("capture"):
                graphs = capturer.run(snapshot.restore, advance_all(states.values()))
                snapshot.restore()
                self._prepare_calls(graphs, layers, block, states)
            pins.add()
            report = _report(capturer, len(self.captured), free, time.perf_counter() - started)
        except BaseException as error:
            self._roll_back(graphs, pins, snapshot)
            if (
                graphs is None
                or isinstance(error, CaptureError)
                or not isinstance(error, Exception)
            ):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise CaptureError(managed.names[0], "install", reason) from error
        if grad_memory is not None:
            grad_memory.adopt()
        self.grad_memory, self._grads = grad_memory, "add" if adds else "autograd"
        self.layers = self.layers or layers
        self._pins.append(pins)
        graphs.start()
        captured = CapturedBlock(block, graphs, plan, report, snapshot.cpu_rng)
        self.captured.append(captured)
        return captured

    @contextmanager
    def _on_all_ranks(self, phase: str) -> Iterator[None]:
        """Inside, an exception on one rank is raised on all ranks, as a CaptureError on the other ranks."""
        raised: Exception | None = None
        try:
            with self._together():
                try:
                    yield
                except Exception as error:  # to tell it from another rank's
                    raised = error
                    raise
        except Exception as error:
            if error is raised:
                raise
            raise CaptureError(self.managed.names[0], phase, str(error)) from error

    def _layers(self, recomputed: set[int]) -> list[Layer]:
        named = zip(self.managed.names, self.managed.modules, self.forwards, strict=True)
        return [
            Layer(name, module, forward, index in recomputed)
            for index, (name, module, forward) in enumerate(named)
        ]

    def _prepare_calls(
        self,
        graphs: BlockGraphs,
        layers: Sequence[Layer],
        block: RecordedBlock,
        states: Mapping[str, Any],
    ) -> None:
        for index, layer in enumerate(layers):
            now = plain_attributes(layer.module)
            attributes = unchanged_attributes(block.attributes[index], now)
            derived = DerivedVersions(
                [layer.module]
            )  # first: the watch has the addresses that it leaves
            watch = LayerWatch(layer.name, layer.module, attributes, states)
            for call in graphs.calls:
                if call.layer == index:
                    call.prepare(watch, derived, graphs.backend.device.type)

    def _roll_back(self, graphs: BlockGraphs | None, pins: Pins, snapshot: Snapshot) -> None:
        if graphs is not None:
            graphs.destroy()
        pins.remove()
        snapshot.restore()

    def choose(
        self, layer: int, spec: list[Any], tensors: Sequence[Tensor], autocast: Any
    ) -> BlockGraphs | None:
        """The captured block that begins with this call, and that the rest of the iteration has room for."""
        left = self.progress.num_microbatches - self.progress.done % self.progress.num_microbatches
        for one in self.captured:
            call = one.graphs.forwards[0]
            assert call is not None
            if (
                call.layer == layer
                and call.autocast == autocast
                and one.graphs.microbatches <= left
                and call.takes(spec, tensors)
            ):
                return one.graphs
        return None

    def rewind(self) -> None:
        """Give up the iteration that is running."""
        for one in self.captured:
            one.graphs.rewind()

    def drop(self, keep_graphs: bool = False) -> dict[RecordedBlock, dict[Step, Graph]]:
        """Free everything. With `keep_graphs` the executable graphs stay, and are returned by block and step."""
        graphs = {}
        for one in self.captured:
            if keep_graphs:
                graphs[one.block] = one.graphs.take_graphs()
            else:
                one.graphs.destroy()
        for pins in reversed(self._pins):
            pins.remove()
        if self.grad_memory is not None:
            self.grad_memory.release()
        self.captured, self.layers, self._pins = [], [], []
        self.grad_memory, self._grads = None, self.managed.grads
        return graphs


def _report(capturer: Capturer, shape: int, free: int, seconds: float) -> Report:
    graphs = []
    for step in capturer.plan.order:
        call = capturer.calls[step.layer, step.microbatch]
        graph = getattr(call, f"{step.direction.value}_graph")
        graphs.append(
            GraphReport(
                call.name,
                step.microbatch,
                step.direction.value,
                graph.nodes,
                graph.kernels,
                capturer.seconds[step],
                capturer.made[step],
                shape,
            )
        )
    plan, backend = capturer.plan, capturer.backend
    pool, first = backend.reserved_bytes(), capturer.graphs.forwards[0]
    assert first is not None
    return Report(
        "replaying",
        tuple(graphs),
        plan.order.num_microbatches,
        len(plan.buffers),
        plan.bytes,
        plan.unshared_buffers,
        plan.unshared_bytes,
        pool_bytes=pool,
        driver_bytes=max(0, free - backend.free_bytes() - pool),
        capture_s=seconds,
        shapes=(", ".join(str(x.spec) for x in first.inputs),),
    )
