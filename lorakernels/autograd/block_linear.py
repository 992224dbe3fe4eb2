# SPDX-License-Identifier: Apache-2.0
"""A linear layer with an adapter over a block-scaled base: one op each way, eagerly and in a trace.

    forward    x8, xs = quantize_blocks(x)      s = D(x) Aᵀ      y = fp8_block_linear(x8, W8, s, B, bias)
    backward   dy8, dys = quantize_blocks(dy)   ds, dB = quantize_grad(dy, B, s)   dA = lora_grad_a(ds, x8)
               dx = fp8_block_grad_input(dy8, W8, ds, A)

Scales come from the tensors at hand. So there is no FP8 state, nothing is written but results, and torch.compile, CUDA
graphs and checkpointing need to know of nothing. Saved for backward are x8 and xs (only for dA), s, and the slot. In a
trace the adapter's numbers come from the layer's handle, so that equal layers share the trace (compiled_linear.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.autograd.linear import Needs
from lorakernels.autograd.linear_values import Adapter, Call, LoRASpec, check_input
from lorakernels.config import BlockScaling
from lorakernels.numerics.blocks import blocks_of
from lorakernels.numerics.fp8 import E4M3
from lorakernels.ops.register import Op, define_composed, empty
from lorakernels.state.handles import numbers_of
from lorakernels.values import Dropout, Scaled, Up, Weight

Tensors = tuple[Tensor | None, ...]


class BlockCall(NamedTuple):
    """What a call needs beside tensors of the layer.

    Attributes:
        recipe: formats and scales.
        slot: int64 [2], Philox's key and offset; None draws no mask.
        scaling: factor of B A; None takes the handle's.
        p: dropout probability; None takes the handle's.
        site: the model's dropout that this is. With a handle, it is the handle's.
        handle: stands for the layer's numbers in a trace; None outside.
    """

    recipe: BlockScaling
    slot: Tensor | None
    scaling: float | None = None
    p: float | None = None
    site: int = 0
    handle: Tensor | None = None


def _run(op: Op[..., Any], *arguments: Any) -> Any:
    """`op` without the dispatcher, through which the enclosing op has come."""
    return op.run(*arguments) if arguments[0].is_cuda else op.reference(*arguments)


def _run_scaled(op: Op[..., Any], x: Scaled, *arguments: Any) -> Any:
    return op.run(x, *arguments) if x.data.is_cuda else op.reference(x, *arguments)


class _Numbers(NamedTuple):
    """The last arguments of both ops, each way."""

    handle: Tensor | None
    scaling: float | None
    p: float | None
    site: int
    backward_dtype: torch.dtype
    power_of_two: bool

    def known(self, slot: Tensor | None) -> tuple[float, Dropout | None]:
        """(scaling, the mask), by the handle where they are not given."""
        handle, scaling, p, site = self[:4]
        if handle is not None:
            layer = numbers_of(handle)
            scaling = layer.scaling if scaling is None else scaling
            p, site = layer.p if p is None else p, layer.site
        dropout = None if slot is None else Dropout(slot, p or 0.0, site)
        return 1.0 if scaling is None else scaling, dropout


def block_linear_forward(
    x: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor,
    bias: Tensor | None,
    lora_A: Tensor | None,
    lora_B: Tensor | None,
    slot: Tensor | None,
    handle: Tensor | None,
    scaling: float | None,
    p: float | None,
    site: int,
    backward_dtype: torch.dtype,
    power_of_two: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y [M, N], x8 [M, K], its scale_inv [⌈K/128⌉, M], s [M, R]); s is empty without an adapter."""
    numbers = _Numbers(handle, scaling, p, site, backward_dtype, power_of_two)
    factor, dropout = numbers.known(slot)
    x8, scale_inv = _run(ops.quantize_blocks, x, E4M3, power_of_two)
    up, s = None, x.new_empty(0)
    if lora_A is not None and lora_B is not None:
        s = _run(ops.quantize_lora_down, x, lora_A, None, dropout)[2]
        up = Up(lora_B, s, factor)
    frozen = Weight(weight, weight_scale_inv)
    y = _run_scaled(ops.fp8_block_linear, Scaled(x8, scale_inv), frozen, bias, up, x.dtype)
    return y, x8, scale_inv, s


def _fake_forward(  # type: ignore[no-untyped-def]
    x, weight, weight_scale_inv, bias, lora_A, lora_B, slot, handle, scaling, p, site, backward_dtype, power_of_two
):  # fmt: skip
    rows, cols = x.shape
    y, x8 = empty(x, rows, weight.shape[0]), empty(x, rows, cols, dtype=torch.uint8)
    scale_inv = empty(x, blocks_of(cols), rows, dtype=torch.float32)
    return y, x8, scale_inv, empty(x, 0) if lora_A is None else empty(x, rows, lora_A.shape[0])


def block_linear_backward(
    dy: Tensor,
    x8: Tensor | None,
    x_scale_inv: Tensor | None,
    s: Tensor | None,
    weight: Tensor | None,
    weight_scale_inv: Tensor | None,
    bias: Tensor | None,
    lora_A: Tensor | None,
    lora_B: Tensor | None,
    slot: Tensor | None,
    handle: Tensor | None,
    scaling: float | None,
    p: float | None,
    site: int,
    backward_dtype: torch.dtype,
    power_of_two: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx [M, K], dA, dB, dbias) of dy [M, N]. A gradient is empty if what it alone reads is None.

    dx reads the weight, dA reads x8, dB reads s, and dbias the bias.
    """
    numbers = _Numbers(handle, scaling, p, site, backward_dtype, power_of_two)
    dy, (factor, mask) = dy.contiguous(), numbers.known(slot)
    dx, dA, dB, dbias = (dy.new_empty(0) for _ in range(4))
    ds = None
    if lora_B is not None:
        up = Up(lora_B, s, factor)
        _, _, ds, found = _run(ops.quantize_grad, dy, up, None, backward_dtype, None)
        dB = dB if s is None else found
    if x8 is not None and ds is not None:
        assert lora_A is not None
        dA = _run(ops.lora_grad_a, ds, Scaled(x8, x_scale_inv), mask, lora_A.dtype)
    if weight is not None:
        dy8 = Scaled(*_run(ops.quantize_blocks, dy, backward_dtype, power_of_two))
        frozen = Weight(weight, weight_scale_inv)
        branch = (ds, None if ds is None else lora_A, mask)
        dx = _run_scaled(ops.fp8_block_grad_input, dy8, backward_dtype, frozen, *branch, dy.dtype)
    if bias is not None:
        dbias = dy.float().sum(0).to(bias.dtype)
    return dx, dA, dB, dbias


def _fake_backward(  # type: ignore[no-untyped-def]
    dy, x8, x_scale_inv, s, weight, weight_scale_inv, bias, lora_A, lora_B, slot, handle, scaling, p, site,
    backward_dtype, power_of_two,
):  # fmt: skip
    none = [empty(dy, 0) for _ in range(4)]
    return (
        none[0] if weight is None else empty(dy, dy.shape[0], weight.shape[1]),
        none[1] if x8 is None or lora_B is None else torch.empty_like(lora_A),
        none[2] if s is None or lora_B is None else torch.empty_like(lora_B),
        none[3] if bias is None else torch.empty_like(bias),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, weight_scale_inv, bias, lora_A, lora_B, slot, handle, *numbers = inputs
    _, x8, scale_inv, s = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(x8, scale_inv, s)
    ctx.needs = Needs(*(ctx.needs_input_grad[i] for i in (0, 4, 5, 3)))
    base = (weight, weight_scale_inv, bias)
    ctx.save_for_backward(
        *_read(ctx.needs, (x8, scale_inv, s), base, (lora_A, lora_B, slot)), handle
    )
    ctx.numbers, ctx.inputs = numbers, len(inputs)


def _read(needs: Needs, made: Tensors, base: Tensors, adapter: Tensors) -> Tensors:
    """The tensors of `block_linear_backward` after dy, without what the wanted gradients do not read.

    Args:
        made: x8, its scale_inv and s.
        base: the weight, its scale_inv and the bias.
        adapter: A, B and the slot.
    """
    of_x, of_A, of_B, of_bias = needs
    wanted = (of_A, of_A, of_B, of_x, of_x, of_bias, *[of_x or of_A or of_B] * 3)
    given = zip((*made, *base, *adapter), wanted, strict=True)
    return tuple([t if is_wanted else None for t, is_wanted in given])


def _differentiate(ctx: Any, dy: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
    found: list[Tensor | None] = [None] * ctx.inputs
    if dy is None:
        return tuple(found)
    grads = _backward(dy, *ctx.saved_tensors, *ctx.numbers)
    for place, grad, needed in zip((0, 4, 5, 3), grads, ctx.needs, strict=True):
        found[place] = grad if needed else None
    return tuple(found)


class BlockNode(torch.autograd.Function):
    """What a plan records of a layer. Its forward runs for stand-ins alone, and what stands below is its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        lora_A: Tensor | None,
        lora_B: Tensor | None,
        weight: Weight,
        call: Call,
    ) -> Tensor:
        """y [..., N] of a contiguous x [..., K]."""
        ctx.spec, ctx.needs = call.spec, Needs(*(ctx.needs_input_grad[i] for i in (0, 2, 3, 1)))
        data, scale_inv, _ = weight
        assert scale_inv is not None
        base, adapter = (data, scale_inv, bias), (lora_A, lora_B, call.slot)
        rows = x.view(-1, x.shape[-1])
        y, *made = block_linear_forward(rows, *base, *adapter, *_numbers_of(call.spec))
        ctx.save_for_backward(*_read(ctx.needs, tuple(made), base, adapter))
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Tensors:
        run = _backward if isinstance(dy, Tensor) else block_linear_backward
        rows = dy.reshape(-1, dy.shape[-1])
        found = run(rows, *ctx.saved_tensors, *_numbers_of(ctx.spec))
        needed = zip(found, ctx.needs, strict=True)
        dx, dA, dB, dbias = (grad if is_needed else None for grad, is_needed in needed)
        dx = None if dx is None else dx.view(*dy.shape[:-1], dx.shape[1])
        return dx, dbias, dA, dB, None, None


def _numbers_of(spec: LoRASpec) -> tuple[Any, ...]:
    """The last arguments of both ops outside of a trace: no handle."""
    recipe = spec.blocks
    assert recipe is not None
    return None, spec.scaling, spec.p, spec.site, recipe.backward_dtype, recipe.power_2_scale


_backward = define_composed(block_linear_backward, _fake_backward)
_forward = define_composed(
    block_linear_forward, _fake_forward, save=_save, differentiate=_differentiate
)


def block_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, adapter: Adapter, call: BlockCall
) -> Tensor:
    """y = x Wᵀ + bias + scaling · D(x) Aᵀ Bᵀ, differentiable in x, bias, A and B.

    Args:
        x: [..., K] fp32, bf16 or fp16. Under autocast it is cast to the autocast dtype first.
        weight: bytes uint8 [N, K] with scale_inv fp32 [⌈N/128⌉, ⌈K/128⌉].
        bias: [N] or None.
        adapter: A [R, K] and B [N, R], or None for both.
        call: the recipe, the random slot and the adapter's numbers.

    Returns:
        [..., N] in x's dtype (the autocast dtype under autocast).

    Raises:
        TypeError: x is not float32, bfloat16 or float16.
        ValueError: x's last dimension is not K, or x is on another device.
    """
    check_input(x, weight.data)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    recipe, slot, scaling, p, site, handle = call
    numbers = (handle, scaling, p, site, recipe.backward_dtype, recipe.power_2_scale)
    base = (weight.data, weight.scale_inv, bias)
    y: Tensor = _forward(rows, *base, adapter.A, adapter.B, slot, *numbers)[0]
    return y.view(*x.shape[:-1], y.shape[1])
