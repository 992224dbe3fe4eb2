# SPDX-License-Identifier: Apache-2.0
"""The graph of a whole step, for calls of one shape."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.states import advance_all, no_device_rng_in_checkpoints, repeats_nothing
from ..compare.attributes import Attributes, plain_attributes, unchanged_attributes
from ..compare.signature import Signature, TensorSpec, autocast_state, difference, distinct, typed
from ..device.backend import Backend, Graph
from ..interface.errors import CaptureError, ReplayError, hint_for
from ..replay.derived import DerivedVersions
from ..replay.watch import LayerWatch, OptimizerWatch, Watch
from .followers import Follower, following

NAME = "step"  # in place of a layer's name in errors


class CapturedStep:
    """Captured when it is made: inputs are copied in, the graph is launched, outputs are copied out.

    `key`: equal for calls that this graph can replay.

    Raises:
        CaptureError: the step cannot be captured. All memory is freed; the caller restores gradients and states.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        signature: Signature,
        backend: Backend,
        states: Sequence[Any],
        replaced: Graph | None = None,
    ) -> None:
        self.key, self.backend = key_of(signature.tensors, signature.spec, backend), backend
        self._spec, self._paths = signature.spec, signature.paths
        self._specs = [TensorSpec.of(x) for x in signature.tensors]
        self._autocast = autocast_state(backend.device.type)
        self._watches: list[Watch] = []
        self._derived: DerivedVersions | None = None
        self.grads: list[tuple[str, nn.Parameter, Tensor | None]] = []
        self.zeroed: set[int] = set()
        self._inputs: list[Tensor] = []
        self._followers: list[Follower] = []
        with self._rolled_back():
            with backend.session(), no_device_rng_in_checkpoints():
                args, kwargs = signature.rebuild([self._input(x) for x in signature.tensors])
                with repeats_nothing(NAME, states), backend.capture(replaced) as captured:
                    with following() as self._followers:
                        output = step(*args, **kwargs)
                    advance_all(states)()
            self.graph, self.made = captured.graph, captured.made
            outputs = Signature(output)
            if (unsupported := outputs.unsupported()) is not None:
                raise ValueError(f"the step's output {unsupported}, which a replay cannot renew")
            if any(x.requires_grad for x in outputs.tensors):
                raise ValueError(
                    "the step returns a tensor with an autograd graph: return it detached"
                )
            self._outputs, self._rebuild = outputs.tensors, outputs.rebuild

    @contextmanager
    def _rolled_back(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.drop()
            if isinstance(error, CaptureError) or not isinstance(error, Exception):
                raise
            reason = f"{_where(error)}{type(error).__name__}: {error}"
            raise CaptureError(NAME, "capture", reason, hint_for(reason)) from error

    def _input(self, x: Tensor) -> Tensor:
        spec = TensorSpec.of(x)
        if spec.requires_grad:
            raise ValueError("an input that requires grad: its gradient would leave the graph")
        static = self.backend.allocate(spec)
        distinct(static).copy_(distinct(x))
        self._inputs.append(static)
        return static

    def watch(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        states: Mapping[str, Any],
        before: Sequence[Attributes],
    ) -> None:
        """Take the present state of what the step uses as the expected one."""
        self._derived = DerivedVersions(modules)  # first: watches have the addresses that it leaves
        for index, module in enumerate(modules):
            attributes = unchanged_attributes(before[index], plain_attributes(module))
            name = f"modules[{index}]"
            self._watches.append(LayerWatch(name, module, attributes, states if not index else {}))
            self.grads += [(f"{name}.{n}", p, p.grad) for n, p in module.named_parameters()]
        for index, optimizer in enumerate(optimizers):
            self._watches.append(OptimizerWatch(NAME, f"optimizers[{index}]", optimizer))

    def note_zeroed(
        self,
        before: Sequence[tuple[nn.Parameter, Tensor | None]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Note the parameters whose gradients the step itself sets to None.

        These are the parameters of an optimizer if all its gradients from `before` the capture are other tensors now.
        """
        kept = {id(p) for p, grad in before if grad is not None and p.grad is grad}
        renewed = {id(p) for p, grad in before if grad is not None} - kept
        for optimizer in optimizers:
            its = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if its & renewed and not its & kept:
                self.zeroed |= its

    def mismatch(self, tensors: Sequence[Tensor], spec: list[Any]) -> ReplayError | None:
        """How a call differs from the captured one; None if it does not."""
        if differing := difference(self._spec, spec):
            return ReplayError(NAME, "arguments", *differing)
        for path, x, expected in zip(self._paths, tensors, self._specs, strict=True):
            if (now := TensorSpec.of(x)) != expected:
                return ReplayError(NAME, f"input {path}", expected, now)
        if (autocast := autocast_state(self.backend.device.type)) != self._autocast:
            return ReplayError(NAME, "autocast", self._autocast, autocast)
        return None

    def check_state(self) -> None:
        """ReplayError if a module, state or optimizer is not as at capture."""
        for watch in self._watches:
            if (changed := watch.check()) >= 0:
                watch.refuse(changed)

    def check_grads(self) -> None:
        """ReplayError unless the gradients are the tensors of this graph."""
        for name, parameter, grad in self.grads:
            if parameter.grad is not grad:
                expected, actual = (
                    "None" if g is None else f"the tensor at {g.data_ptr():#x}"
                    for g in (grad, parameter.grad)
                )
                what = f"gradient of {name} (zero it inside the step)"
                raise ReplayError(NAME, what, expected, actual, True)

    def install_grads(self) -> None:
        """Make the gradients in this graph's memory the parameters' gradients."""
        for _, parameter, grad in self.grads:
            parameter.grad = grad

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """The step's output for `tensors`, as new tensors."""
        for static, x in zip(self._inputs, tensors, strict=True):
            distinct(static).copy_(distinct(x))
        if self._derived is not None:
            self._derived.renew_if_written()
        for follower in self._followers:
            follower.before_replay()
        self.graph.launch(self.backend.stream())
        return self._rebuild([x.clone() for x in self._outputs])

    def drop(self, keep_graph: bool = False) -> Any:
        """Free the memory, and destroy the graph unless it is to be kept; the graph."""
        graph, self.graph = getattr(self, "graph", None), None
        if graph is not None and not keep_graph:
            graph.destroy()
        self._inputs, self._outputs, self.grads = [], [], []
        self._watches, self._followers, self._derived = [], [], None
        self.backend.release()
        return graph


def _where(error: BaseException) -> str:
    """The innermost module whose forward raised `error`, as "in <class>: "; empty if none did."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [m for frame in frames if isinstance(m := frame.f_locals.get("self"), nn.Module)]
    return f"in {type(modules[-1]).__name__}: " if modules else ""


def key_of(tensors: Sequence[Tensor], spec: list[Any], backend: Backend) -> Any:
    """Equal for calls that one graph can replay."""
    specs = tuple(map(TensorSpec.of, tensors))
    return specs, typed(spec), autocast_state(backend.device.type)
