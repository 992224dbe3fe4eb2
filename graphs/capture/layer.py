# SPDX-License-Identifier: Apache-2.0
"""How a layer runs while it is captured: with stand-ins for its parameters, and inputs that nothing else keeps.

A stand-in is a new leaf tensor at the parameter's address. Autograd's node of the parameter itself belongs to the
stream on which it was made. A backward through that node would put work on that stream, which breaks a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.autograd import Function

from ..compare.signature import Signature, TensorSpec
from ..record.tracer import RecordedCall


@dataclass(eq=False)
class Layer:
    """A module and its eager forward. `trained`: names and parameters that require grad."""

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    recomputed: bool = False
    trained: list[tuple[str, nn.Parameter]] = field(init=False)

    def __post_init__(self) -> None:
        named = self.module.named_parameters(remove_duplicate=True)
        self.trained = [(name, p) for name, p in named if p.requires_grad]

    @contextmanager
    def standing_in(self, leaves: dict[int, Tensor]) -> Iterator[None]:
        """Inside, the module's trained parameters are `leaves`, by the parameters' ids."""
        swapped: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        try:
            for inner in self.module.modules():
                for name, parameter in inner._parameters.items():
                    if parameter is not None and id(parameter) in leaves:
                        swapped.append((inner._parameters, name, parameter))
            for parameters, name, parameter in swapped:
                parameters[name] = leaves[id(parameter)]
            yield
        finally:
            for parameters, name, parameter in swapped:
                parameters[name] = parameter

    def leaves(self) -> dict[int, Tensor]:
        """A stand-in for each trained parameter, by the parameter's id."""
        stand_ins = {}
        for _, parameter in self.trained:
            leaf = parameter.detach().requires_grad_()
            leaf.__dict__.update(vars(parameter))
            stand_ins[id(parameter)] = leaf
        return stand_ins

    def run(
        self, recorded: RecordedCall, inputs: Sequence[Tensor], leaves: dict[int, Tensor]
    ) -> Signature:
        """The layer's output for `inputs`, with grad and under the recorded autocast."""
        args, kwargs = recorded.inputs.rebuild(inputs)
        device = inputs[0].device.type if inputs else "cpu"
        enabled, dtype = recorded.autocast
        cast = (
            torch.autocast(device, dtype, enabled, cache_enabled=False)
            if enabled
            else nullcontext()
        )
        with torch.enable_grad(), cast, self.standing_in(leaves):
            if self.recomputed:
                output = torch_checkpoint.checkpoint(
                    self.forward, *args, use_reentrant=False, **kwargs
                )
            else:
                output = self.forward(*args, **kwargs)
        return Signature(output)

    def backward(
        self,
        outputs: Sequence[Any],  # tensors, or their edges
        grads: Sequence[Tensor],
        leaves: dict[int, Tensor],
    ) -> None:
        """Run the backward in this thread, because each thread has cuBLAS handles and workspaces of its own."""
        with self.standing_in(leaves), torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(list(outputs), list(grads))


class InputGrads:
    """The gradients that a backward finds for a layer's inputs.

    Each has memory of its own, in the layout that autograd gives to the gradient of a leaf.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self.others: set[int] = set()  # storages that something else reads
        self.by_input: dict[int, Tensor] = {}

    def take(self, i: int, grad: Tensor) -> None:
        """Keep `grad` as the gradient of input `i`; a copy of it if its memory or layout cannot stay."""
        layout = self._specs[i].dense_stride()
        strides = zip(grad.shape, grad.stride(), layout, strict=True)
        laid_out = all(size < 2 or stride == expected for size, stride, expected in strides)
        if not laid_out or grad.untyped_storage()._cdata in self.others:
            grad = grad.new_empty_strided(grad.shape, layout).copy_(grad)
        self.others.add(grad.untyped_storage()._cdata)
        self.by_input[i] = grad


class _Enter(Function):
    """Makes an input the output of a node. As a leaf, it would keep its memory until the backward even if nothing
    saves it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, grads: InputGrads, i: int, real: list[Tensor]) -> Tensor:
        ctx.grads, ctx.i = grads, i
        return real[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.grads.take(ctx.i, grad)
        return None, None, None, None


def enter(real: Tensor, grads: InputGrads, i: int) -> Tensor:
    """Input `i` of a layer, in the memory of `real`; its gradient goes to `grads`."""
    anchor = torch.empty((), device=real.device, requires_grad=True)
    with torch.enable_grad():
        return _Enter.apply(anchor, grads, i, [real])
