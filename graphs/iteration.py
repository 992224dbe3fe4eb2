# SPDX-License-Identifier: Apache-2.0
"""One graph for a whole training step: forward, loss, backward, clipping, optimizer, update of the FP8 scales."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .backend import Backend, CudaBackend
from .capture import no_device_rng_in_checkpoints
from .errors import CaptureError, ReplayError, explain, hint_for
from .order import check_count
from .report import GraphReport, Report
from .signature import Signature, TensorSpec, difference, distinct, flatten
from .states import Pins, Snapshot, advance_all, named_states, repeats_nothing
from .tracer import autocast_state
from .watch import LayerWatch, OptimizerWatch, Watch, plain_attributes, steady

_NAME = "iteration"


class IterationGraph:
    """Calls `step(*args, **kwargs)`, first eagerly, then as one graph. `GraphManager(step, scope="iteration")`.

        def step(tokens):                                   # any number of microbatches
            optimizer.zero_grad(set_to_none=True)
            loss = model(tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            fp8_state.reduce_and_update()
            return loss.detach()

        run = GraphManager(step, scope="iteration", modules=[model], optimizers=[optimizer])
        for tokens in batches:
            loss = run(tokens)

    Every call is one step of training. The tensors in a call are copied into the graph's, the returned ones out of it;
    everything else must stay equal. What changes from step to step (learning rate, loss scale) is a device tensor.

    Args:
        step: the function; it keeps no autograd graph alive and does not wait for the device.
        warmup_steps: calls that run eagerly, on the capture's stream, before the one that captures.
        fp8_state, rng_states: as for layers. The end of the graph advances the random states.
        modules: whose parameters, buffers, gradients and attributes are watched. All that the step uses.
        optimizers: checked for what would be frozen: a learning rate that is a number, `capturable=False`; and watched.
        on_new_shape: "error", or "eager", saying so once.
        mode, debug, backend: as for layers.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        warmup_steps: int = 3,
        num_microbatches: int = 1,
        fp8_state: Any = None,
        rng_states: Iterable[Any] = (),
        *,
        modules: Sequence[nn.Module] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        on_new_shape: str = "error",
        mode: str = "relaxed",
        debug: bool = False,
        backend: Callable[[], Backend] | None = None,
    ) -> None:
        if not callable(step):
            raise TypeError(f"step must be callable, got {type(step).__name__}")
        if on_new_shape not in ("error", "eager"):
            raise ValueError(f"on_new_shape must be 'error' or 'eager', got {on_new_shape!r}")
        check_count("num_microbatches", num_microbatches)
        self.step, self.warmup_steps = step, check_count("warmup_steps", warmup_steps)
        self.modules, self.optimizers = list(modules), list(optimizers)
        self.fp8_state, self.rng_states = fp8_state, list(rng_states)
        self.on_new_shape = on_new_shape
        self._make_backend = backend or (lambda: CudaBackend(self._device(), mode, debug))
        self._backend: Backend | None = None
        self._suspended = self._warned = False
        self._debug = debug
        self._start()

    def _start(self) -> None:
        self.phase, self.calls = "recording", 0
        self._graph: Any = None
        self._inputs: list[Tensor] = []
        self._specs: list[TensorSpec] = []
        self._spec: list[Any] = []
        self._paths: list[str] = []
        self._outputs: list[Tensor] = []
        self._rebuild: Callable[[Sequence[Tensor]], Any] = tuple
        self._grads: list[tuple[str, nn.Parameter, Tensor | None]] = []
        self._watches: list[Watch] = []
        self._autocast: tuple[bool, torch.dtype | None] = (False, None)
        self._pins: Pins | None = None
        self._attributes = [plain_attributes(m) for m in self.modules]
        self._report = Report("recording")

    def _device(self) -> torch.device:
        for module in self.modules:
            for parameter in module.parameters():
                return parameter.device
        return torch.device("cuda", torch.cuda.current_device())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step of training; its output.

        Raises:
            CaptureError: this call captured, in vain. Nothing was trained; the next calls run eagerly.
            ReplayError: the call or the model is not as it was at capture. Nothing was launched.
        """
        if self._suspended or self.phase == "failed":
            return self._eagerly(args, kwargs)
        if self.phase == "recording":
            if self.calls < self.warmup_steps:
                return self._eagerly_aside(args, kwargs)
            self.capture(*args, **kwargs)
        tensors, spec = flatten((args, kwargs))
        try:
            self._check(tensors, spec)
        except ReplayError as error:
            if self.on_new_shape == "error" or error.recapture:
                raise
            if not self._warned:
                self._warned = True
                warnings.warn(f"{error}: this call runs eagerly", RuntimeWarning, stacklevel=2)
            return self._eagerly(args, kwargs)
        for static, x in zip(self._inputs, tensors, strict=True):
            distinct(static).copy_(distinct(x))
        assert self._backend is not None
        self._graph.launch(self._backend.stream())
        return self._rebuild([x.clone() for x in self._outputs])

    def _eagerly(self, args: Any, kwargs: Any) -> Any:
        """The step itself; new gradients move to where the graph has them."""
        output = self.step(*args, **kwargs)
        with torch.no_grad():
            for _, parameter, grad in self._grads:
                if grad is not None and parameter.grad is not None and parameter.grad is not grad:
                    grad.copy_(parameter.grad)
                    parameter.grad = grad
        return output

    def _eagerly_aside(self, args: Any, kwargs: Any) -> Any:
        """On the stream of the capture, where autograd's nodes for the parameters then belong."""
        if self._backend is None:
            self._backend = self._make_backend()
        with self._backend.aside():
            output = self.step(*args, **kwargs)
        self.calls += 1
        return output

    # capture

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture the step for calls like this one, without training."""
        self.phase = "failed"
        signature = Signature((args, kwargs))
        if (found := signature.unsupported()) is not None:
            raise CaptureError(
                _NAME, "check", f"argument {found}, a constant that cannot be watched"
            )
        for optimizer in self.optimizers:
            _check_optimizer(optimizer)
        if self._backend is None:
            self._backend = self._make_backend()
        started, free = time.perf_counter(), self._backend.free_bytes()
        states = named_states(self.fp8_state, self.rng_states)
        snapshot, pins = (
            Snapshot(self.modules, self.fp8_state, states.values()),
            Pins(self.fp8_state),
        )
        before = [(p, p.grad) for m in self.modules for p in m.parameters()]
        try:
            self._capture(self._backend, signature, list(states.values()))
        except Exception as error:
            for parameter, grad in before:
                parameter.grad = grad
            pins.remove()
            snapshot.restore()
            self._outputs, self._inputs = [], []
            self._backend.release()
            self._backend = None
            if isinstance(error, CaptureError):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise CaptureError(_NAME, "capture", reason, hint_for(reason)) from error
        snapshot.restore()
        pins.add()
        self._pins = pins
        self._watch(states)
        nodes = GraphReport(
            _NAME, 0, "step", self._graph.nodes, self._graph.kernels, time.perf_counter() - started
        )
        pool = self._backend.reserved_bytes()
        self._report = Report(
            "replaying",
            (nodes,),
            1,
            pool_bytes=pool,
            driver_bytes=max(0, free - self._backend.free_bytes() - pool),
            capture_s=time.perf_counter() - started,
        )
        self.phase = "replaying"

    def _capture(self, backend: Backend, signature: Signature, states: Sequence[Any]) -> None:
        specs = [TensorSpec.of(x) for x in signature.tensors]
        with backend.session(), no_device_rng_in_checkpoints():
            inputs = []
            for x, spec in zip(signature.tensors, specs, strict=True):
                if spec.requires_grad:
                    raise ValueError(
                        "an input that requires grad: its gradient would leave the graph"
                    )
                inputs.append(backend.allocate(spec))
                distinct(inputs[-1]).copy_(distinct(x))
            args, kwargs = signature.rebuild(inputs)
            with repeats_nothing(_NAME, states), backend.capture() as captured:
                output = self.step(*args, **kwargs)
                advance_all(states)()
        outputs = Signature(output)
        if (found := outputs.unsupported()) is not None:
            raise ValueError(f"the step's output {found}, which a replay cannot renew")
        if any(x.requires_grad for x in outputs.tensors):
            raise ValueError("the step returns a tensor with an autograd graph: return it detached")
        self._graph, self._inputs, self._outputs = captured.graph, inputs, outputs.tensors
        self._rebuild, self._spec, self._specs = outputs.rebuild, signature.spec, specs
        self._paths, self._autocast = signature.paths, autocast_state(backend.device.type)

    def _watch(self, states: dict[str, Any]) -> None:
        self._watches = []
        for index, module in enumerate(self.modules):
            attributes = steady(self._attributes[index], plain_attributes(module))
            name = f"modules[{index}]"
            self._watches.append(LayerWatch(name, module, attributes, states if not index else {}))
            self._grads += [(f"{name}.{n}", p, p.grad) for n, p in module.named_parameters()]
        for index, optimizer in enumerate(self.optimizers):
            self._watches.append(OptimizerWatch(_NAME, f"optimizers[{index}]", optimizer))

    def _check(self, tensors: Sequence[Tensor], spec: list[Any]) -> None:
        if spec != self._spec and (found := difference(self._spec, spec)):
            raise ReplayError(_NAME, "arguments", *found)
        for path, x, expected in zip(self._paths, tensors, self._specs, strict=True):
            if (now := TensorSpec.of(x)) != expected:
                raise ReplayError(_NAME, f"input {path}", expected, now)
        assert self._backend is not None
        if (autocast := autocast_state(self._backend.device.type)) != self._autocast:
            raise ReplayError(_NAME, "autocast", self._autocast, autocast)
        for watch in self._watches:
            if (changed := watch.check()) >= 0:
                watch.refuse(changed)
        for name, parameter, grad in self._grads:
            if parameter.grad is not grad:
                expected_grad, found_grad = (
                    "None" if g is None else f"the tensor at {g.data_ptr():#x}"
                    for g in (grad, parameter.grad)
                )
                what = f"gradient of {name} (zero it inside the step)"
                raise ReplayError(_NAME, what, expected_grad, found_grad, True)

    # use

    def recapture(self) -> None:
        """Capture anew at the next call, with parameters, gradients and attributes as they are then."""
        self._drop()
        self.calls = self.warmup_steps

    def reset(self) -> None:
        """Drop the graph and its memory and warm up anew."""
        self._drop()

    def _drop(self) -> None:
        for _, parameter, grad in self._grads:
            if grad is not None and parameter.grad is grad:
                parameter.grad = grad.clone()  # out of the pool
        if self._graph is not None:
            self._graph.destroy()
        if self._pins is not None:
            self._pins.remove()
        self._start()
        if self._backend is not None:
            self._backend.release()
            self._backend = None

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, calls run the step eagerly."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def report(self) -> Report:
        """What is captured, and what it takes."""
        return self._report

    def explain(self, error: BaseException) -> str:
        """What an error of this package means here and what to do about it."""
        return explain(error)

    def write_dot(self, path: str) -> None:
        """The graph as DOT; needs `debug=True`."""
        if not self._debug or self._graph is None:
            raise RuntimeError("write_dot needs debug=True and a captured step")
        self._graph.write_dot(path)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """CaptureError for a group whose numbers the graph would freeze."""
    for index, group in enumerate(optimizer.param_groups):
        where = f"{type(optimizer).__name__}.param_groups[{index}]"
        if not isinstance(group["lr"], Tensor):
            reason = f"{where}['lr'] is the number {group['lr']!r}, which the graph would freeze"
            hint = "Make it a tensor on the device, and change it in place: lr.fill_(value)"
            raise CaptureError(_NAME, "check", reason, hint)
        if group.get("capturable") is False:
            raise CaptureError(
                _NAME, "check", f"{where} has capturable=False", "Set capturable=True"
            )
