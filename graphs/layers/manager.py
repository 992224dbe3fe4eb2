# SPDX-License-Identifier: Apache-2.0
"""GraphManager: record the order in which layers run, capture it, replay it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.captured_blocks import CapturedBlocks
from ..capture.managed_layers import ManagedLayers
from ..compare.attributes import plain_attributes
from ..device.backend import Backend
from ..interface.errors import explain
from ..interface.options import GraphOptions, check_choice
from ..interface.report import Report
from ..plan.order import OrderError, check_count, layer_names
from ..record.hooks import Hook
from ..record.order_recorder import OrderRecorder
from ..record.recorded_block import RecordedBlock
from ..record.tracer import Tracer
from ..replay.cursor import IterationProgress
from .block_runner import BlockRunner
from .layer_forward import LayerForward


class GraphManager:
    """Replays `layers`, forward and backward, as CUDA graphs in the order in which they were seen to run.

        manager = GraphManager(model.layers, num_microbatches=2)
        for step in range(steps):
            for batch in microbatches:
                model(batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.end_iteration()

    The first `warmup_steps` iterations run eagerly and are recorded; `end_iteration` of the last one captures.

    Args:
        layers: modules, none inside another, or {name: module}. Their forwards take and return tensors in any nesting
            of tuples, lists and dicts; everything else in a call is a constant that must stay equal.
        warmup_steps: eager iterations before the capture; at least 1.
        num_microbatches: forwards of each layer in one iteration.
        fp8_state: state of the layers' FP8 scales (lorakernels' `FP8State`); it must be updated explicitly, outside.
        rng_states: random states in device memory (`PhiloxState`, `PhiloxStates`); the last graph of each captured
            block advances them, so that every replay draws new numbers. One that has `place(layer)` says where each
            layer draws from torch's CPU generator.
        grads: "add" adds parameter gradients inside the backward graphs, so that hooks on parameters do not fire;
            "autograd" gives them to autograd, which costs a copy and an addition for each, and is what DDP needs;
            "auto" takes "autograd" if the recorded iterations ran inside a DDP forward, or a parameter has a hook.
        options: what new shapes do, and how graphs are captured. With `on_new_shape="capture"` the block of steps that
            begins with a new call runs eagerly, and `end_iteration` captures it. The first call of a block chooses its
            graphs, so that blocks that differ only later are refused.

    Raises:
        ValueError, TypeError: an argument is not one of the above, or the layers are not on a GPU.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module] | Mapping[str, nn.Module],
        warmup_steps: int = 3,
        num_microbatches: int = 1,
        fp8_state: Any = None,
        rng_states: Iterable[Any] = (),
        *,
        grads: str = "auto",
        options: GraphOptions = GraphOptions(),  # noqa: B008  (frozen)
    ) -> None:
        check_choice("grads", grads, ("auto", "add", "autograd"))
        named = dict(layers) if isinstance(layers, Mapping) else dict(_numbered(layers))
        self.names = layer_names(named)
        self.modules = list(named.values())
        self.warmup_steps = check_count("warmup_steps", warmup_steps)
        self.num_microbatches = check_count("num_microbatches", num_microbatches)
        self.fp8_state, self.rng_states = fp8_state, list(rng_states)
        self.options, self.device = options, _device_of(self.modules)
        options.check(self.device)
        self._managed = ManagedLayers(
            self.names,
            self.modules,
            fp8_state,
            self.rng_states,
            grads,
            self._make_backend,  # bound: layers that stay keep their manager by it
        )
        progress = IterationProgress(self.num_microbatches)
        self._blocks = CapturedBlocks(self._managed, progress, options.together)
        self.runner = BlockRunner(self._blocks, options, self.device.type)
        self._forwards: list[LayerForward] = []
        self._record()

    def _make_backend(self) -> Backend:
        return self.options.make_backend(self.device)

    @property
    def cpu_rng_at_capture(self) -> Tensor | None:
        """State of the CPU generator when the capture of the present graphs began."""
        states = (s.cpu_rng for s in self._blocks.captured if s.graphs is self.runner.current)
        return next(states, None)

    @property
    def graphs(self) -> Any:
        """The graphs that replay (`BlockGraphs`); None if nothing is captured."""
        return self.runner.graphs

    # recording

    def _record(self) -> None:
        self._tracer = Tracer(self.names, self.device.type)
        self._recorder = OrderRecorder(self.names, self.num_microbatches, self._tracer)
        self._recorder.attach(self.modules)
        self._attributes = [plain_attributes(m) for m in self.modules]
        self._ddp_hook = self.modules[0].register_forward_pre_hook(Hook(self._managed.look_for_ddp))
        self._managed.ddp = False
        self.phase = "recording"

    def _stop_recording(self) -> None:
        self._recorder.detach()
        self._ddp_hook.remove()

    # iterations

    def end_iteration(self) -> None:
        """Call after the last backward of each iteration, before or after the optimizer.

        Raises:
            OrderError: the iteration is incomplete, or has another order than the earlier ones.
            CaptureError: it was the last one to record, and the capture failed. Training goes on eagerly;
                `capture()` tries again. Or it had a new shape whose capture failed: that shape goes on eagerly.
        """
        if self.runner.suspended:
            return
        if self.phase == "replaying":
            self.runner.end_iteration()
        elif self.phase == "recording":
            try:
                order = self._recorder.end_iteration()
            except OrderError:
                self._tracer.discard()
                raise
            recorder = self._recorder
            trace = self._tracer.finish(recorder.microbatches)
            self.runner.recorded = [RecordedBlock(order, trace, self._attributes)]
            if recorder.num_iterations >= self.warmup_steps:
                self.capture()

    def discard_iteration(self) -> None:
        """Forget the iteration that is running, after an error or a skipped step; the next one starts afresh."""
        self.runner.discard_iteration()
        if self.phase == "recording":
            self._recorder.discard_iteration()
            self._tracer.discard()

    # where the loop stands: for code that drives the manager of a loop that is not its own

    @property
    def microbatches_seen(self) -> int:
        """How often the first layer has run forward in the iteration that is being recorded."""
        return self._recorder.forwards_seen(0)

    @property
    def replayed(self) -> int:
        """Microbatches that were replayed, by all graphs that exist now."""
        return sum(s.graphs.blocks * s.graphs.microbatches for s in self._blocks.captured)

    @property
    def between_blocks(self) -> bool:
        """Whether every microbatch that has begun has run its backward, so that one of any shape may come next."""
        if self.phase == "recording":
            return self._recorder.begins_anew(0)
        return self.graphs is None or self.runner.between_blocks

    def goes_on(self, layer: int) -> bool:
        """Whether a training forward of `layer`, coming now, is the next step; else a backward is missing before it."""
        return self.graphs is None or self.runner.goes_on(layer)

    def changed(self) -> str | None:
        """The first thing about the captured layers that has changed since the capture; None if nothing has."""
        current = self.runner.current
        for call in current.calls if current is not None else ():
            if (index := call.watch.check()) >= 0:
                return call.watch.describe(index)
        return None

    # capture

    def capture(self) -> None:
        """Capture what was recorded. `end_iteration` does it after the last recorded iteration.

        Raises:
            CaptureError: everything is as before and the layers run eagerly; `capture()` may be tried again.
            RuntimeError: nothing was recorded yet, or graphs are there already, and no shape failed.
        """
        if self.graphs is not None:
            if not self.runner.failed:
                raise RuntimeError("the layers are captured already: call recapture() or reset()")
            self.runner.retry()
            return
        if not self.runner.recorded:
            raise RuntimeError("nothing recorded yet: run an iteration and call end_iteration()")
        if self.phase == "recording":
            self._stop_recording()
            if self.options.on_new_shape == "capture":
                self.runner.recorded = self.runner.recorded[0].blocks()
            self._capture_blocks({})
        else:
            self._capture_anew({})

    def _capture_anew(self, replaced: Mapping[RecordedBlock, Any]) -> None:
        for block in self.runner.recorded:  # the user may have repaired what a capture refused
            block.attributes = [plain_attributes(m) for m in self.modules]
        self._capture_blocks(replaced)

    def _capture_blocks(self, replaced: Mapping[RecordedBlock, Any]) -> None:
        """Capture all recorded blocks, or none."""
        self.phase = "failed"
        try:
            for block in self.runner.recorded:
                self._blocks.capture(block, replaced.get(block))
        except BaseException:
            self._blocks.drop()
            for graph in [g for graphs in replaced.values() for g in graphs.values()]:
                graph.destroy()
            raise
        self.runner.begin()
        for index, layer in enumerate(self._blocks.layers):
            self._forwards.append(LayerForward(self.runner, index, layer))
            self._forwards[-1].install()
        self.phase = "replaying"

    def recapture(self) -> None:
        """Capture again, with parameters, buffers and attributes as they are now.

        Needed after what moves or replaces them: `load_state_dict(assign=True)`, `.to()`, another adapter. The recorded
        order and shapes stay. Executable graphs stay, too, and only take the new addresses (cudaGraphExecUpdate), where
        the new capture has the same nodes; `report()` says which. Call it between iterations.

        Raises:
            CaptureError: the layers run eagerly then.
        """
        if self.phase not in ("replaying", "failed"):
            raise RuntimeError(f"nothing was captured yet: the manager is {self.phase}")
        self._capture_anew(self._drop(keep_graphs=True))

    def _drop(self, keep_graphs: bool = False) -> dict[RecordedBlock, Any]:
        for forward in self._forwards:
            forward.remove()
        self._forwards.clear()
        self.runner.stop()
        return self._blocks.drop(keep_graphs)

    def reset(self) -> None:
        """Drop all graphs and their memory, and record again from the next iteration on."""
        if self.phase == "recording":
            self._stop_recording()
        self._drop()
        self.runner.recorded = []
        self._record()

    def close(self) -> None:
        """Drop everything for good: the layers are as before the manager."""
        self.reset()
        self._stop_recording()
        self.phase = "closed"

    # use

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the layers run eagerly; enter and leave it between iterations."""
        if self.graphs is not None and self.runner.between_iterations:
            self.graphs.end_iteration()
        before, self.runner.suspended = self.runner.suspended, True
        self._recorder.paused = True
        try:
            yield
        finally:
            self.runner.suspended = self._recorder.paused = before

    def report(self) -> Report:
        """The captured graphs, with their memory and time."""
        captured = self._blocks.captured
        if not captured:
            return Report(self.phase)
        settled = [one.graphs for one in captured if not one.graphs.trial]
        copied = [x.name for graphs in settled for _, x in graphs.exposed if x.copy]
        return Report.of_shapes(
            [s.report for s in captured],
            copied=tuple(copied),
            grad_bytes=self._blocks.grad_memory.bytes if self._blocks.grad_memory else 0,
        )

    def explain(self, error: BaseException) -> str:
        """An explanation of an error of this package here, and what to do about it."""
        return explain(error)

    def write_dot(self, folder: str) -> list[str]:
        """One DOT file per graph."""
        if self.graphs is None:
            raise RuntimeError("write_dot needs captured graphs")
        paths = []
        for index, one in enumerate(self._blocks.captured):
            for call in one.graphs.calls:
                for direction in ("forward", "backward"):
                    name = f"{call.name}.{call.forward_step.microbatch}.{direction}.dot"
                    path = f"{folder}/{f'shape{index}.' if index else ''}{name}"
                    getattr(call, f"{direction}_graph").write_dot(path)
                    paths.append(path)
        return paths


def _numbered(layers: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(layers, nn.Module) and not isinstance(layers, (nn.ModuleList, nn.Sequential)):
        raise TypeError(f"layers must be a sequence of modules, got one {type(layers).__name__}")
    if not isinstance(layers, Iterable):
        reason = f"layers must be a sequence of modules, got a {type(layers).__name__}"
        raise TypeError(f"{reason}; StepGraph captures a step function")
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {index} must be an nn.Module, got {type(layer).__name__}")
        yield str(index), layer


def _device_of(modules: Sequence[nn.Module]) -> torch.device:
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            return tensor.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
