# SPDX-License-Identifier: Apache-2.0
"""How an op of ops.py is registered with torch.library, and what the fakes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from lorakernels import kernels, reference, reference_layer

TRUTHS = (reference, reference_layer)
_LIBRARY = torch.library.Library("lorakernels", "FRAGMENT")


def _without_autocast(fn: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(device_type):  # the context alone costs 6 µs
            return fn(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return fn(*args, **kwargs)

    return run


def define(
    name: str,
    *,
    mutates: tuple[str, ...] = (),
    guard: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda fn: fn,
) -> Callable[[Callable[..., Any]], Any]:
    """Register `lorakernels::name` with the schema of its reference; the decorated function is its fake.

    The reference is reference.`name` or reference_layer.`name`.

    `guard` wraps both implementations.
    """

    def register(fake: Callable[..., Any]) -> Any:
        truth = next(getattr(module, name) for module in TRUTHS if hasattr(module, name))
        cuda = getattr(kernels, name)
        schema = torch.library.infer_schema(truth, mutates_args=mutates, op_name=name)
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, _disable_dynamo(_without_autocast(guard(truth), "cpu")), "CPU")
        _LIBRARY.impl(name, _disable_dynamo(_without_autocast(guard(cuda), "cuda")), "CUDA")
        torch.library.register_fake(f"lorakernels::{name}", fake, lib=_LIBRARY)
        op = getattr(torch.ops.lorakernels, name).default
        _LIBRARY.impl(name, _undifferentiable(op), "Autograd", with_keyset=True)
        return op

    return register


def define_composed(
    fn: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Any:
    """Register `fn`, which calls other ops, as the op of its name on every device.

    `save(ctx, inputs, output)` and `differentiate(ctx, *grads)` are its gradient; without them it has none.
    """
    name = fn.__name__
    schema = torch.library.infer_schema(fn, mutates_args=(), op_name=name)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device_type in ("cpu", "cuda"):
        run = _disable_dynamo(_without_autocast(fn, device_type))
        _LIBRARY.impl(name, run, device_type.upper())
    torch.library.register_fake(f"lorakernels::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.lorakernels, name).default
    if differentiate is None:
        _LIBRARY.impl(name, _undifferentiable(op), "Autograd", with_keyset=True)
    else:
        torch.library.register_autograd(
            f"lorakernels::{name}", differentiate, setup_context=save, lib=_LIBRARY
        )
    return op


def _undifferentiable(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """What stands in for a gradient. torch.library.custom_op does the same in several times the host's time
    (docs/measured_facts.md)."""
    mutated = [
        (i, argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def run(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in mutated]
        if torch.is_grad_enabled():
            tensors = list(_tensors_with_gradients((*args, *kwargs.values())))
            if any(t is w for t in tensors for w in written):
                raise RuntimeError(
                    f"{op} writes to a tensor that requires grad: no autograd formula"
                )
            if tensors:
                return _NoFormula.apply(op, keyset, args, kwargs, *tensors)
        with torch._C._AutoDispatchBelowAutograd():
            out = op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
        for tensor in written:
            if tensor is not None:
                torch.autograd.graph.increment_version(tensor)
        return out

    return run


def _tensors_with_gradients(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.requires_grad:
                yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors_with_gradients(tuple(argument))


class _NoFormula(torch.autograd.Function):
    """`tensors` are those among the arguments that autograd has to see."""

    @staticmethod
    def forward(
        ctx: Any,
        op: Any,
        keyset: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *tensors: Tensor,
    ) -> Any:
        ctx.op = op
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{ctx.op}: no autograd formula; lorakernels.autograd composes gradients from these ops"
        )


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(shape, dtype=dtype or like.dtype)


def fake_quantized(x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    if state is None:
        return empty(x, 0, dtype=torch.uint8), empty(x, 0, dtype=torch.float32)
    return empty(x, *x.shape, dtype=torch.uint8), empty(x, 1, dtype=torch.float32)
