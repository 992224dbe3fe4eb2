# SPDX-License-Identifier: Apache-2.0
"""LoRALinear under torch.compile: one op each way, equal in every layer's trace.

    forward    y, x8, s = lora_linear_forward(x, W8, A, B, handle, training)
    backward   dx, dA, dB = lora_linear_backward(dy, x8, s, W8, A, B, handle, training)

They run the ops of `lora_linear`, with the same numbers. When an op runs, it finds the layer's dropout
site, FP8 columns, scaling and FP8 state by the handle. So one trace serves all layers.

The compiler does not see that the state is read and written. This is safe: backward adds amaxes by a maximum, and a
forward that runs twice records the same amax. The first layer's op makes the automatic update before it reads a scale.
A visible write would do harm: the state would be saved for backward, which would then find it overwritten.

Inductor keeps backward passes on disk by the forward's graph alone. So a change of the backward op's arguments, or of
`_differentiate`, needs another name of the forward op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lorakernels.autograd.compiled.call import CallRecording, launch_ahead
from lorakernels.autograd.compiled.recorded import (
    LayerCall,
    Recorded,
    backward_recording,
    forward_recording,
    recorded_backward,
    recorded_forward,
    run_backward,
    run_forward,
)
from lorakernels.autograd.linear.node import Needs, Saved, in_bytes
from lorakernels.autograd.linear.numbers import Numbers
from lorakernels.autograd.linear.saved import keep, kept
from lorakernels.autograd.linear.values import Adapter, check_input
from lorakernels.numerics.autocast import under_autocast
from lorakernels.numerics.blocks import blocks_of
from lorakernels.ops.register import Op, define_composed, empty
from lorakernels.state.handles import numbers_of
from lorakernels.values import Scaled, Weight


def _directly(x: Tensor) -> Callable[..., Any]:
    """Returns `run(op, *arguments)`, which calls the op's implementation for x's device without the dispatcher.

    The enclosing op's call has been through the dispatcher already.
    """

    def run(op: Op[..., Any, Any], *arguments: Any) -> Any:
        return op.run(*arguments) if x.is_cuda else op.by_reference(*arguments)

    return run


def lora_linear_forward(
    x: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor | None,
    bias: Tensor | None,
    lora_A: Tensor | None,
    lora_B: Tensor | None,
    slot: Tensor | None,
    handle: Tensor,
    training: bool,
    scaling: float | None = None,
    p: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, x8, x_scale_inv, s) of x [M, K]. x8 and its scale_inv are empty if W is plain.

    `scaling` and `p`, if given, replace the layer's own. `weight` may be e4m3.
    """
    numbers = numbers_of(handle)
    spec = numbers.spec(training, scaling, p)
    if numbers.state is not None:
        numbers.state.begin(x.device, spec.column, training)
    frozen, adapter = Weight(weight, weight_scale_inv), Adapter(lora_A, lora_B)
    layer = LayerCall(frozen, bias, adapter, numbers.call(spec, slot))
    results = None if weight_scale_inv is None else recorded_forward(x, layer)
    if results is not None:
        return results
    return run_forward(_directly(x), x, layer._replace(weight=in_bytes(frozen)))


def _fake_forward(  # type: ignore[no-untyped-def]
    x, weight, weight_scale_inv, bias, lora_A, lora_B, slot, handle, training,
    scaling=None, p=None,
):  # fmt: skip
    y = empty(x, x.shape[0], weight.shape[0])
    quantizes = weight_scale_inv is not None
    made8 = empty(x, *(x.shape if quantizes else (0,)), dtype=torch.uint8)
    scale_inv = empty(x, 1 if quantizes else 0, dtype=torch.float32)
    if quantizes and weight_scale_inv.dim() == 2:  # of blocks
        scale_inv = empty(x, blocks_of(x.shape[1]), x.shape[0], dtype=torch.float32)
    s = empty(x, 0) if lora_A is None else empty(x, x.shape[0], lora_A.shape[-2])
    return y, made8, scale_inv, s


def lora_linear_backward(
    dy: Tensor,
    weight: Tensor | None,
    weight_scale_inv: Tensor | None,
    lora_A: Tensor | None,
    lora_B: Tensor | None,
    slot: Tensor | None,
    operand: Tensor | None,
    x_scale_inv: Tensor | None,
    s: Tensor | None,
    bias: Tensor | None,
    handle: Tensor,
    needs: Sequence[bool],
    training: bool,
    scaling: float | None = None,
    p: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, dA, dB, dbias) from dy [M, N]; empty where `needs` is False.

    `operand` is x8, or x over a plain W. `training` is the forward's.
    """
    numbers, needed = numbers_of(handle), Needs(*needs)
    call = numbers.call(numbers.spec(training, scaling, p), None)
    dy = dy.contiguous()
    saved = Saved(weight, weight_scale_inv, lora_A, lora_B, slot, operand, x_scale_inv, s)
    results = None if weight_scale_inv is None else recorded_backward(dy, saved, call, needed)
    if results is not None:
        return results
    if weight is not None:
        saved = saved._replace(weight=in_bytes(Weight(weight)).data)
    dtypes = tuple(None if t is None else t.dtype for t in (lora_A, bias))
    return run_backward(_directly(dy), dy, saved, call, needed, dtypes)  # type: ignore[arg-type]


def _fake_backward(  # type: ignore[no-untyped-def]
    dy, weight, weight_scale_inv, lora_A, lora_B, slot, operand, x_scale_inv, s, bias,
    handle, needs, training, scaling=None, p=None,
):  # fmt: skip
    need = Needs(*needs)
    none = [empty(dy, 0) for _ in range(4)]
    return (
        empty(dy, dy.shape[0], weight.shape[1]) if need.x else none[0],
        torch.empty_like(lora_A, memory_format=torch.contiguous_format) if need.A else none[1],
        torch.empty_like(lora_B) if need.B else none[2],
        torch.empty_like(bias) if need.bias else none[3],
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, weight_scale_inv, bias, lora_A, lora_B, slot, handle, *numbers = inputs
    _, x8, x_scale_inv, s = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(x8, x_scale_inv, s)
    needs = Needs(*(ctx.needs_input_grad[i] for i in (0, 4, 5, 3)))
    frozen, adapter = Weight(weight, weight_scale_inv), Adapter(lora_A, lora_B, s)
    operand = Scaled(x) if weight_scale_inv is None else Scaled(x8, x_scale_inv)
    saved = Saved.of(needs, frozen, adapter, operand, slot)
    if needs.A:  # dA is made like A
        saved = saved._replace(lora_A=lora_A)
    if needs.A or needs.B:  # recordings are found by W, also where no dx is computed
        saved = saved._replace(weight=weight, w_scale_inv=weight_scale_inv)
    keep(ctx, **saved.by_name(), bias=bias if needs.bias else None, handle=handle)
    ctx.needs, ctx.inputs, ctx.numbers = needs, len(inputs), numbers


def _differentiate(ctx: Any, dy: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * ctx.inputs
    if dy is None:
        return tuple(grads)
    made = backward_op(dy, *kept(ctx).values(), list(ctx.needs), *ctx.numbers)
    for place, grad, needed in zip((0, 4, 5, 3), made, ctx.needs, strict=True):
        grads[place] = grad if needed else None
    return tuple(grads)


backward_op = define_composed(lora_linear_backward, _fake_backward)
forward_op = define_composed(
    lora_linear_forward, _fake_forward, save=_save, differentiate=_differentiate
)


def _call_recording(
    match: Recorded | None, args: Sequence[Any], places: Sequence[int]
) -> CallRecording | None:
    if match is None:
        return None
    recorded, calls = match
    tensors = [i for i in places if args[i] is not None]
    return CallRecording(recorded, tensors, calls.columns, calls.sites)


def _layer_of(numbers: Numbers, args: Sequence[Any]) -> LayerCall:
    """What `forward_recording` takes besides x, of the first nine arguments of `lora_linear_forward`."""
    _, weight, weight_scale_inv, bias, lora_A, lora_B, slot, _, training = args
    frozen, adapter = Weight(weight, weight_scale_inv), Adapter(lora_A, lora_B)
    return LayerCall(frozen, bias, adapter, numbers.call(numbers.spec(training), slot))


def _forward_found(numbers: Numbers, args: Sequence[Any]) -> CallRecording | None:
    if args[2] is None:  # a plain weight
        return None
    match = forward_recording(args[0], _layer_of(numbers, args))
    return _call_recording(match, args, (0, 3, 4, 5, 1, 2, 6))


def _forward_by_ops(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`lora_linear_forward` behind the state's `begin`."""
    layer = _layer_of(numbers_of(args[7]), args)
    return run_forward(_directly(args[0]), args[0], layer._replace(weight=in_bytes(layer.weight)))


def _backward_found(numbers: Numbers, args: Sequence[Any]) -> CallRecording | None:
    dy, saved, needs, training = args[0], Saved(*args[1:9]), Needs(*args[11]), args[12]
    if saved.w_scale_inv is None:
        return None
    match = backward_recording(dy, saved, numbers.call(numbers.spec(training), None), needs)
    return _call_recording(match, args, (0, 3, 4, 1, 2, 8, 6, 7, 5))


launch_ahead(forward_op, 7, 9, _forward_found, _forward_by_ops, begins=True)
launch_ahead(backward_op, 10, 13, _backward_found, lora_linear_backward, begins=False)


def is_compiling() -> bool:
    """Whether to trace `compiled_linear`. torch.export must not: an exported program has no handles when it is loaded.

    The private flag is read because `torch.compiler.is_exporting()` is true in every trace of torch 2.8.
    """
    return torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag


def rows_of(x: Tensor) -> Tensor:
    """[..., K] → contiguous [M, K], in the autocast dtype under autocast."""
    return under_autocast(x).reshape(-1, x.shape[-1]).contiguous()


def compiled_linear(
    x: Tensor,
    base: tuple[Tensor, Tensor | None, Tensor | None],
    adapter: tuple[Tensor | None, Tensor | None],
    slot: Tensor | None,
    handle: Tensor,
    training: bool,
    **options: Any,
) -> Tensor:
    """`lora_linear` for a trace: x [..., K] → [..., N].

    `base` is (weight, its scale_inv, bias), `adapter` is (A, B). `options` are the optional arguments of
    `lora_linear_forward`.
    """
    check_input(x, base[0])
    y = forward_op(rows_of(x), *base, *adapter, slot, handle, training, **options)[0]
    return y.view(*x.shape[:-1], base[0].shape[0])
