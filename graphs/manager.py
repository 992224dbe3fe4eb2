# SPDX-License-Identifier: Apache-2.0
"""GraphManager: record the order in which layers run, capture it, replay it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import grads as grads_module
from . import watch as watch_module
from .backend import Backend, CudaBackend
from .capture import Capturer, Layer
from .errors import CaptureError, explain
from .evaluate import EvalGraphs
from .grads import GradTargets
from .order import OrderError, check_count, layer_names
from .plan import Plan, make_plan
from .recorder import Hook, OrderRecorder
from .replay import GraphSet
from .report import GraphReport, Report
from .slot import Slot
from .states import Pins, Snapshot, advance_all, named_states
from .tracer import Recorded, Tracer

_CHOICES = {
    "on_new_shape": ("error", "eager"),
    "eval": ("eager", "capture"),
    "grads": ("auto", "add", "autograd"),
    "mode": ("relaxed", "thread_local"),
}


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
        scope: "layer", two graphs per layer; for "iteration", which takes a step function, see `IterationGraph`.
        warmup_steps: eager iterations before the capture; at least 1.
        num_microbatches: forwards of each layer in one iteration.
        fp8_state: state of the layers' FP8 scales (lorakernels' `FP8State`); it must be updated explicitly, outside.
        rng_states: random states in device memory (`PhiloxState`, `PhiloxStates`); the last graph of each captured
            block advances them, so that every replay draws new numbers.
        grads: "add" adds parameter gradients inside the backward graphs, so that hooks on parameters do not fire;
            "autograd" gives them to autograd, which costs a copy and an addition for each, and is what DDP needs;
            "auto" takes "autograd" if the recorded iterations ran inside a DDP forward, or a parameter has a hook.
        on_new_shape: what a training call does that is not like the captured one: "error", or run "eager", saying so
            once.
        eval: whether calls without grad or in eval mode run "eager" or on graphs of their own ("capture").
        mode: capture mode on CUDA, see `CudaBackend`.
        debug: keep the captured graphs for `write_dot`.
        backend: makes the backend for a capture; CUDA graphs on the device of the parameters when None.

    Raises:
        ValueError, TypeError: an argument is not one of the above.
    """

    def __new__(cls, layers: Any, scope: str = "layer", *args: Any, **kwargs: Any) -> Any:
        if scope == "iteration":
            from .iteration import IterationGraph

            return IterationGraph(layers, *args, **kwargs)
        if scope != "layer":
            raise ValueError(f'scope must be "layer" or "iteration", got {scope!r}')
        return super().__new__(cls)

    def __init__(
        self,
        layers: Sequence[nn.Module] | Mapping[str, nn.Module],
        scope: str = "layer",
        warmup_steps: int = 3,
        num_microbatches: int = 1,
        fp8_state: Any = None,
        rng_states: Iterable[Any] = (),
        *,
        grads: str = "auto",
        on_new_shape: str = "error",
        eval: str = "eager",
        mode: str = "relaxed",
        debug: bool = False,
        backend: Callable[[], Backend] | None = None,
    ) -> None:
        chosen = {"on_new_shape": on_new_shape, "eval": eval, "grads": grads, "mode": mode}
        for name, value in chosen.items():
            if value not in _CHOICES[name]:
                raise ValueError(f"{name} must be one of {_CHOICES[name]}, got {value!r}")
        named = dict(layers) if isinstance(layers, Mapping) else dict(_numbered(layers))
        self.names = layer_names(named)
        self.modules = list(named.values())
        self.warmup_steps = check_count("warmup_steps", warmup_steps)
        self.num_microbatches = check_count("num_microbatches", num_microbatches)
        self.fp8_state, self.rng_states = fp8_state, list(rng_states)
        self.on_new_shape, self.eval, self._grads_choice = on_new_shape, eval, grads
        self._mode, self._debug = mode, debug
        self.device = _device_of(self.modules)
        self._make_backend = backend or self._cuda_backend
        self.phase = "recording"
        self.cpu_rng_at_capture: Tensor | None = None
        self.graphs: GraphSet | None = None
        self._plan: Plan | None = None
        self._targets: GradTargets | None = None
        self._pins: Pins | None = None
        self._evals: EvalGraphs | None = None
        self._suspended = False
        self._warned: set[str] = set()
        self._report = Report("recording")
        self._slots: list[Slot] = []
        self._ddp = False
        self._record()

    def _cuda_backend(self) -> Backend:
        if self.device.type != "cuda":
            raise ValueError(f"the layers must be on a CUDA device, found {self.device}")
        return CudaBackend(self.device, self._mode, self._debug)

    # recording

    def _record(self) -> None:
        self._tracer = Tracer(self.names, self.device.type)
        self._recorder = OrderRecorder(self.names, self.num_microbatches, self._tracer)
        self._recorder.attach(self.modules)
        self._attributes = [watch_module.plain_attributes(m) for m in self.modules]
        self._ddp_hook = self.modules[0].register_forward_pre_hook(Hook(self._look_for_ddp))
        self.phase = "recording"

    def _look_for_ddp(self, *_: Any) -> None:
        self._ddp = self._ddp or DistributedDataParallel._active_ddp_module is not None

    def _stop_recording(self) -> None:
        self._recorder.detach()
        self._ddp_hook.remove()

    # iterations

    def end_iteration(self) -> None:
        """Call after the last backward of each iteration, before or after the optimizer.

        Raises:
            OrderError: the iteration is incomplete, or has another order than the earlier ones.
            CaptureError: it was the last one to record, and the capture failed. Training goes on eagerly;
                `capture()` tries again.
        """
        if self.phase == "replaying" and not self._suspended:
            assert self.graphs is not None
            self.graphs.end_iteration()
        elif self.phase == "recording" and not self._suspended:
            try:
                self._recorder.end_iteration()
            except OrderError:
                self._tracer.discard()
                raise
            recorder = self._recorder
            layers = {call: call.layer for call in recorder.microbatches}
            self._recorded = self._tracer.finish(recorder.microbatches, layers)
            if recorder.num_iterations >= self.warmup_steps:
                self.capture()

    def discard_iteration(self) -> None:
        """Forget the iteration that is running, after an error or a skipped step; the next one starts anew."""
        if self.graphs is not None:
            self.graphs.rewind()
        if self.phase == "recording":
            self._recorder.discard_iteration()
            self._tracer.discard()

    # capture

    def capture(self) -> None:
        """Capture what was recorded. `end_iteration` does it after the last recorded iteration.

        Raises:
            CaptureError: everything is as before and the layers run eagerly; `capture()` may be tried again.
            RuntimeError: nothing was recorded yet, or graphs are there already.
        """
        if self.graphs is not None:
            raise RuntimeError("the layers are captured already: call recapture() or reset()")
        recorded: Recorded | None = getattr(self, "_recorded", None)
        if recorded is None or self._recorder.num_iterations == 0:
            raise RuntimeError("nothing recorded yet: run an iteration and call end_iteration()")
        self._stop_recording()
        if self.phase == "failed":  # what was repaired since then counts as it is now
            self._attributes = [watch_module.plain_attributes(m) for m in self.modules]
        self.phase = "failed"
        self._report = Report("failed")
        self._capture(recorded)
        self.phase = "replaying"

    def _capture(self, recorded: Recorded) -> None:
        started = time.perf_counter()
        layers = self._make_layers(recorded)
        adds = self._check_layers(layers, recorded)
        plan = make_plan(self._recorder.order, recorded.calls)
        for key, seen in recorded.seen.items():
            if key not in plan.calls:  # its block is another one's replay
                seen.samples = []
        states = named_states(self.fp8_state, self.rng_states)
        snapshot = Snapshot(self.modules, self.fp8_state, states.values())
        pins = Pins(self.fp8_state)
        targets = GradTargets() if adds else None
        backend: Backend | None = None
        try:
            if targets is not None:
                for layer in layers:
                    targets.prepare(layer.trained)
            backend = self._make_backend()
            free = backend.free_bytes()
            capturer = Capturer(layers, recorded, plan, backend, targets, list(states.values()))
            graphs = capturer.run(snapshot.restore, advance_all(states.values()))
        except BaseException:
            pins.remove()
            snapshot.restore()
            raise
        snapshot.restore()
        self.cpu_rng_at_capture = snapshot.cpu_rng
        pins.add()
        if targets is not None:
            targets.adopt()
        self._plan, self._targets, self._pins, self.graphs = plan, targets, pins, graphs
        self._install(layers, graphs, states)
        graphs.start()
        self._make_report(capturer, backend, free, time.perf_counter() - started)

    def _make_layers(self, recorded: Recorded) -> list[Layer]:
        return [
            Layer(name, module, module.forward, index in recorded.recomputed)
            for index, (name, module) in enumerate(zip(self.names, self.modules, strict=True))
        ]

    def _check_layers(self, layers: Sequence[Layer], recorded: Recorded) -> bool:
        """Whether gradients are added inside the graphs. CaptureError for what cannot be captured."""
        for index in recorded.reentrant:
            reason = (
                "a reentrant checkpoint around it runs its forward twice, without and with grad"
            )
            raise CaptureError(self.names[index], "check", reason, "Use use_reentrant=False")
        hooked = None
        for layer in layers:
            watch_module.check_hooks(layer.name, layer.module)
            try:
                grads_module.check_hooks(layer.name, layer.trained)
            except CaptureError as error:
                hooked = hooked or error
        if self._grads_choice == "add":
            if hooked is not None:
                raise hooked
            if self._ddp:
                raise CaptureError(
                    self.names[0],
                    "check",
                    "the layers run inside DistributedDataParallel, whose hooks on parameters would not fire",
                    "Use grads='autograd'",
                )
        in_charge = getattr(self.fp8_state, "in_charge", None)
        if in_charge == "auto":
            raise CaptureError(
                self.names[0],
                "check",
                "fp8_state updates itself inside the layers (in_charge='auto')",
                "Call fp8_state.reduce_and_update() once per iteration, from the first one on",
            )
        return self._grads_choice == "add" or (
            self._grads_choice == "auto" and hooked is None and not self._ddp
        )

    def _install(
        self, layers: Sequence[Layer], graphs: GraphSet, states: Mapping[str, Any]
    ) -> None:
        for index, layer in enumerate(layers):
            now = watch_module.plain_attributes(layer.module)
            attributes = watch_module.steady(self._attributes[index], now)
            slot = Slot(self, index, layer)
            self._slots.append(slot)
            slot.install()
            watch = watch_module.LayerWatch(layer.name, layer.module, attributes, states)
            for call in graphs.calls:
                if call.forward_step.layer == index:
                    call.watch = watch

    def _make_report(self, capturer: Capturer, backend: Backend, free: int, seconds: float) -> None:
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
                )
            )
        plan, pool = capturer.plan, backend.reserved_bytes()
        self._report = Report(
            "replaying",
            tuple(graphs),
            plan.order.num_microbatches,
            len(plan.buffers),
            plan.bytes,
            plan.unshared_buffers,
            plan.unshared_bytes,
            (),
            pool,
            max(0, free - backend.free_bytes() - pool),
            self._targets.bytes if self._targets else 0,
            seconds,
        )

    def recapture(self) -> None:
        """Capture again, with parameters, buffers and attributes as they are now.

        Needed after what moves or replaces them: `load_state_dict(assign=True)`, `.to()`, another adapter. The recorded
        order and shapes stay. Call it between iterations.

        Raises:
            CaptureError: the layers run eagerly then.
        """
        if self.phase not in ("replaying", "failed"):
            raise RuntimeError(f"nothing was captured yet: the manager is {self.phase}")
        self._drop()
        self._attributes = [watch_module.plain_attributes(m) for m in self.modules]
        self.phase = "failed"
        self._capture(self._recorded)
        self.phase = "replaying"

    def _drop(self) -> None:
        for slot in self._slots:
            slot.remove()
        self._slots.clear()
        if self._evals is not None:
            self._evals.destroy()
            self._evals = None
        if self.graphs is not None:
            self.graphs.destroy()
        if self._targets is not None:
            self._targets.release()
        if self._pins is not None:
            self._pins.remove()
        self.graphs = self._plan = self._targets = self._pins = None

    def reset(self) -> None:
        """Drop all graphs and their memory, and record anew from the next iteration on."""
        if self.phase == "recording":
            self._stop_recording()
        self._drop()
        self._recorded = None  # type: ignore[assignment]
        self._report = Report("recording")
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
        if self.graphs is not None:
            self.graphs.end_iteration()
        before, self._suspended = self._suspended, True
        self._recorder.paused = True
        try:
            yield
        finally:
            self._suspended = self._recorder.paused = before

    def report(self) -> Report:
        """What is captured, and what it takes."""
        if self.graphs is None:
            return self._report
        copied = tuple(h.name for _, h in self.graphs.handed if h.copy and not self.graphs.trial)
        return Report(**{**vars(self._report), "copied": copied})

    def explain(self, error: BaseException) -> str:
        """What an error of this package means here and what to do about it."""
        return explain(error)

    def write_dot(self, folder: str) -> list[str]:
        """One DOT file per graph; needs `debug=True`."""
        if not self._debug or self.graphs is None:
            raise RuntimeError("write_dot needs debug=True and captured graphs")
        paths = []
        for call in self.graphs.calls:
            for direction in ("forward", "backward"):
                path = f"{folder}/{call.name}.{call.forward_step.microbatch}.{direction}.dot"
                getattr(call, f"{direction}_graph").write_dot(path)
                paths.append(path)
        return paths

    def warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def evaluate(self, slot: Slot, args: Any, kwargs: Any) -> Any:
        if self._evals is None:
            states = named_states(self.fp8_state, self.rng_states)
            self._evals = EvalGraphs(self._make_backend(), self.fp8_state, states)
        return self._evals.run(slot.layer, args, kwargs)


def _numbered(layers: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(layers, nn.Module) and not isinstance(layers, (nn.ModuleList, nn.Sequential)):
        raise TypeError(f"layers must be a sequence of modules, got one {type(layers).__name__}")
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {index} must be an nn.Module, got {type(layer).__name__}")
        yield str(index), layer


def _device_of(modules: Sequence[nn.Module]) -> torch.device:
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            return tensor.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
