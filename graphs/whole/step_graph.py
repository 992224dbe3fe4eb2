# SPDX-License-Identifier: Apache-2.0
"""StepGraph: forward, loss, backward, clipping, optimizer and the update of the FP8 scales in one graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.states import Pins, Snapshot, named_states
from ..compare.attributes import Attributes, plain_attributes
from ..compare.signature import Signature, flatten
from ..device.backend import Backend
from ..interface.errors import CaptureError, ReplayError, explain
from ..interface.options import GraphOptions, WarnOnce
from ..interface.report import GraphReport, Report
from ..plan.order import check_count
from ..replay.derived import renew_derived
from .captured_step import NAME, CapturedStep, key_of


class StepGraph:
    """Runs `step(*args, **kwargs)`, a whole step of training: first eagerly, then as one graph.

        def step(tokens):                                   # any number of microbatches
            optimizer.zero_grad(set_to_none=True)
            loss = model(tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            fp8_state.reduce_and_update()
            return loss.detach()

        run = StepGraph(step, modules=[model], optimizers=[optimizer])
        for tokens in batches:
            loss = run(tokens)

    Every call is one step of training. The tensors in a call are copied into the graph's, the returned ones out of it;
    everything else must stay equal. What changes from step to step (learning rate, loss scale) is a device tensor.

    Args:
        step: the function; it keeps no autograd graph alive and does not wait for the device.
        warmup_steps: calls that run eagerly, on the capture's stream, before the one that captures.
        fp8_state: state of the FP8 scales that the step uses; the step updates it.
        rng_states: random states in device memory; the end of the graph advances them.
        modules: all that the step uses. Their parameters, buffers, gradients and attributes are watched.
        optimizers: checked for what would be frozen: a learning rate that is a number, `capturable=False`; and watched.
        options: what new shapes do, and how graphs are captured. With `on_new_shape="capture"` the first call of a new
            shape runs eagerly, and the second captures another graph.

    Raises:
        ValueError, TypeError: an argument is not one of the above, or the modules are not on a GPU.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        warmup_steps: int = 3,
        fp8_state: Any = None,
        rng_states: Iterable[Any] = (),
        *,
        modules: Sequence[nn.Module] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        options: GraphOptions = GraphOptions(),  # noqa: B008  (frozen)
    ) -> None:
        if not callable(step):
            raise TypeError(f"step must be callable, got {type(step).__name__}")
        self.step, self.warmup_steps = step, check_count("warmup_steps", warmup_steps)
        self.modules, self.optimizers = list(modules), list(optimizers)
        self.fp8_state, self.rng_states, self.options = fp8_state, list(rng_states), options
        options.check(self._device())
        self._eager_backend: Backend | None = None  # for eager calls on the capture's stream
        self._replaced: dict[Any, Any] = {}  # executable graphs that recapture() has kept
        self._suspended = False
        self._warn_once = WarnOnce()
        self._start()

    def _make_backend(self) -> Backend:
        return self.options.make_backend(self._device())

    def _start(self) -> None:
        self.phase, self.calls = "recording", 0
        self._steps: list[CapturedStep] = []  # the step that ran last comes first
        self._reports: list[Report] = []
        self._pins: list[Pins] = []
        # Gradients that an eager call has left, and that the step's own zero_grad would drop
        self._left_grads: list[tuple[nn.Parameter, Tensor]] = []
        # New shapes that ran once, and the attributes before that; the next call of such a shape captures it
        self._seen: dict[Any, list[Attributes]] = {}
        self._failed: set[Any] = set()
        self._attributes = self._attributes_now()

    def _attributes_now(self) -> list[Attributes]:
        return [plain_attributes(m) for m in self.modules]

    def _device(self) -> torch.device:
        for module in self.modules:
            for parameter in module.parameters():
                return parameter.device
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step of training; its output.

        Raises:
            CaptureError: this call was to be captured, and that failed. Nothing was trained; later calls run eagerly.
            ReplayError: the call or the model has changed since the capture. Nothing was launched.
        """
        if self._suspended or self.phase == "failed":
            return self._eagerly(args, kwargs)
        if self.phase == "recording":
            if self.calls < self.warmup_steps:
                self.calls += 1
                return self._eagerly_aside(args, kwargs)
            self.capture(*args, **kwargs)
        tensors, spec = flatten((args, kwargs))
        error: ReplayError | None = None
        for captured in self._steps:
            mismatch = captured.mismatch(tensors, spec)
            if mismatch is None:
                return self._replay(captured, tensors)
            error = error or mismatch
        assert error is not None
        return self._new(error, tensors, spec, args, kwargs)

    def _replay(self, captured: CapturedStep, tensors: Sequence[Tensor]) -> Any:
        for parameter, grad in self._left_grads:
            if parameter.grad is grad:
                parameter.grad = None  # the step's own zero_grad, which a replay does not run
        self._left_grads.clear()
        self._steps[0].check_grads()
        captured.check_state()
        if captured is not self._steps[0]:
            captured.install_grads()
            self._steps.remove(captured)
            self._steps.insert(0, captured)
        return captured.replay(tensors)

    def _new(
        self, error: ReplayError, tensors: Sequence[Tensor], spec: list[Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a call that no graph can replay, as `on_new_shape` says; `error` is how it differs."""
        if self.options.on_new_shape == "error":
            raise error
        key = key_of(tensors, spec, self._steps[0].backend)
        if self.options.on_new_shape == "eager" or key in self._failed:
            self._warn_once("new shape", f"{error}: this call runs eagerly")
            return self._eagerly(args, kwargs)
        if len(self._steps) >= (limit := self.options.max_shapes):
            text = f"max_shapes={limit} graphs are captured: further shapes run eagerly"
            self._warn_once("max_shapes", text)
            return self._eagerly(args, kwargs)
        if key not in self._seen:
            text = f"{error}: this call runs eagerly, the next one like it captures another graph"
            self._warn_once("new shape", text)
            self._seen[key] = self._attributes_now()
            return self._eagerly_aside(args, kwargs)
        try:
            self._capture(Signature((args, kwargs)), self._seen[key])
        except Exception:
            self._failed.add(key)
            raise
        return self._replay(self._steps[0], tensors)

    def _eagerly(self, args: Any, kwargs: Any) -> Any:
        """Run the step. Gradients that it makes move to where the graph that ran last expects them."""
        output = self.step(*args, **kwargs)
        with torch.no_grad():
            for _, parameter, grad in self._steps[0].grads if self._steps else ():
                if parameter.grad is None or parameter.grad is grad:
                    continue
                if grad is not None:
                    grad.copy_(parameter.grad)
                    parameter.grad = grad
                elif id(parameter) in self._steps[0].zeroed:
                    self._left_grads.append((parameter, parameter.grad))
        return output

    def _eagerly_aside(self, args: Any, kwargs: Any) -> Any:
        """Run the step on the capture's stream, so that autograd's nodes of the parameters belong to that stream."""
        if self._eager_backend is None:
            self._eager_backend = self._make_backend()
        with self._eager_backend.aside():
            return self._eagerly(args, kwargs)

    # capture

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture the step for calls like this one. Nothing is trained."""
        self.phase = "failed"
        self._capture(Signature((args, kwargs)), self._attributes)
        self.phase = "replaying"

    def _capture(self, signature: Signature, attributes: Sequence[Attributes]) -> None:
        """Capture one more graph. On an error everything is as before."""
        if (unsupported := signature.unsupported()) is not None:
            reason = f"argument {unsupported}, a constant that cannot be watched"
            raise CaptureError(NAME, "check", reason)
        for optimizer in self.optimizers:
            _check_optimizer(optimizer)
        for module in self.modules:
            renew_derived(module)
        backend, self._eager_backend = self._eager_backend or self._make_backend(), None
        started, free = time.perf_counter(), backend.free_bytes()
        states = named_states(self.fp8_state, self.rng_states)
        snapshot = Snapshot(self.modules, self.fp8_state, states.values())
        pins = Pins(self.fp8_state)
        before = [(p, p.grad) for m in self.modules for p in m.parameters()]
        replaced = self._replaced.pop(key_of(signature.tensors, signature.spec, backend), None)
        captured: CapturedStep | None = None
        try:
            captured = CapturedStep(self.step, signature, backend, list(states.values()), replaced)
            snapshot.restore()
            captured.watch(self.modules, self.optimizers, states, attributes)
            captured.note_zeroed(before, self.optimizers)
            report = self._report_of(captured, free, time.perf_counter() - started)
            pins.add()
        except BaseException:
            if captured is not None:
                captured.drop()
            if replaced is not None:
                replaced.destroy()
            for parameter, grad in before:
                parameter.grad = grad
            pins.remove()
            snapshot.restore()
            raise
        self._pins.append(pins)
        self._steps.insert(0, captured)
        self._reports.append(report)

    def _report_of(self, captured: CapturedStep, free: int, seconds: float) -> Report:
        shape, pool = len(self._reports), captured.backend.reserved_bytes()
        graph = GraphReport(
            NAME,
            0,
            "step",
            captured.graph.nodes,
            captured.graph.kernels,
            seconds,
            captured.made,
            shape,
        )
        return Report(
            "replaying",
            (graph,),
            1,
            pool_bytes=pool,
            driver_bytes=max(0, free - captured.backend.free_bytes() - pool),
            capture_s=seconds,
            shapes=(", ".join(map(str, captured.key[0])),),
        )

    # use

    def recapture(self) -> None:
        """Capture again at the next call, with parameters, gradients and attributes as they are then.

        Executable graphs stay and take the new addresses where the new capture has the same nodes; `report()` says so.
        """
        self._replaced |= {captured.key: captured.graph for captured in self._steps}
        seen = [*self._seen, *self._replaced]
        self._drop(keep_graphs=True)
        self.calls = self.warmup_steps
        self._seen = {key: self._attributes for key in seen}

    def reset(self) -> None:
        """Drop the graphs and their memory, and warm up again."""
        self._drop()

    def _drop(self, keep_graphs: bool = False) -> None:
        for _, parameter, grad in self._steps[0].grads if self._steps else ():
            if grad is not None and parameter.grad is grad:
                parameter.grad = grad.clone()  # out of the pool
        for captured in self._steps:
            captured.drop(keep_graphs)
        for pins in reversed(self._pins):
            pins.remove()
        if not keep_graphs:
            for graph in self._replaced.values():
                graph.destroy()
            self._replaced.clear()
        if self._eager_backend is not None:
            self._eager_backend.release()
            self._eager_backend = None
        self._start()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, calls run the step eagerly."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def report(self) -> Report:
        """The captured graphs, with their memory and time."""
        return Report.of_shapes(self._reports) if self._reports else Report(self.phase)

    def explain(self, error: BaseException) -> str:
        """An explanation of an error of this package here, and what to do about it."""
        return explain(error)

    def write_dot(self, path: str) -> None:
        """The graph that ran last as DOT."""
        if not self._steps:
            raise RuntimeError("write_dot needs a captured step")
        self._steps[0].graph.write_dot(path)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """CaptureError for a group whose numbers the graph would freeze."""
    for index, group in enumerate(optimizer.param_groups):
        where = f"{type(optimizer).__name__}.param_groups[{index}]"
        if not isinstance(group["lr"], Tensor):
            reason = f"{where}['lr'] is the number {group['lr']!r}, which the graph would freeze"
            hint = "Make it a tensor on the device, and change it in place: lr.fill_(value)"
            raise CaptureError(NAME, "check", reason, hint)
        if group.get("capturable") is False:
            raise CaptureError(
                NAME, "check", f"{where} has capturable=False", "Set capturable=True"
            )
