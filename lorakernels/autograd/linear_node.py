# SPDX-License-Identifier: Apache-2.0
"""LoRALinear's forward and backward, in evaluation order.

    forward    x8, s = quantize_lora_down(x, A)        y  = fp8_linear_lora(x8, W8, s, B, bias)
    backward   dy8, ds, dB = quantize_grad(dy, B, s)   dA = lora_grad_a(ds, x8)   dx = fp8_grad_input(dy8, W8, ds, A)

In forward, `quantize_lora_down` draws the dropout mask. In backward, `quantize_grad` draws it again for the other two
ops, if all three can (`hands_mask_over`). Otherwise each of those two draws it.

dy B is computed first: it is rank-sized, so no [N, K] product is ever formed. Backward may need x8 and its 4-byte
scale_inv (x itself over a plain base), s, and the 16-byte slot. Only what the wanted gradients need is saved.
Parameters are saved by reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorakernels import ops
from lorakernels.autograd.linear_values import Adapter, Call, LoRASpec
from lorakernels.numerics.fp8 import E4M3
from lorakernels.ops.quantize_grad import hands_mask_over
from lorakernels.values import Scaled, Up, Weight


class Needs(NamedTuple):
    """Which gradients to compute. `ds` is the gradient of an s that was computed outside of this node."""

    x: bool
    A: bool
    B: bool
    bias: bool
    ds: bool = False


def save_for_gradients(
    ctx: Any,
    needs: Needs,
    x: Scaled,
    weight: Weight,
    bias: Tensor | None,
    adapter: Adapter,
    call: Call,
) -> None:
    """Keep what `gradients` reads."""
    lora_A, lora_B, s = adapter
    ctx.save_for_backward(
        weight.data if needs.x else None,
        weight.scale_inv if needs.x else None,
        weight.t if needs.x else None,
        lora_A if needs.x else None,
        lora_B if needs.x or needs.A or needs.B or needs.ds else None,
        call.slot if needs.x or needs.A else None,
        x.data if needs.A else None,
        x.scale_inv if needs.A else None,
        s if needs.B else None,
    )
    ctx.state_dy, ctx.spec = call.state_dy, call.spec
    ctx.dtypes = tuple(None if t is None else t.dtype for t in (lora_A, bias))


def through_dispatcher(op: Any, *arguments: Any) -> Any:
    return op(*arguments)


def gradients(
    ctx: Any, needs: Needs, dy: Tensor, run: Callable[..., Any] = through_dispatcher
) -> tuple[Tensor | None, ...]:
    """(dx [M, K], dA, dB, dbias, ds) from a contiguous dy [M, N]; None for what is not needed.

    `run(op, *arguments)` calls an op.
    """
    weight, w_scale_inv, weight_t, lora_A, lora_B, slot, x8, x_scale_inv, s = ctx.saved_tensors
    spec: LoRASpec = ctx.spec
    scaling, dropout = spec.of_state(ctx.state_dy), spec.dropout(slot)
    up = None if lora_B is None else Up(lora_B, s, spec.scaling)
    frozen = Weight(weight, w_scale_inv, weight_t)
    dx = dA = dbias = None
    if needs.A and needs.x and up is not None and hands_mask_over(dy, up, dropout, frozen):
        dy8, dy_scale_inv, ds, dB, dropped = run(
            ops.quantize_grad_and_mask,
            dy,
            up,
            scaling,
            spec.backward_dtype,
            dropout,
            weight.shape[1],
        )
        assert dropout is not None
        dropout = dropout._replace(dropped=dropped)
    else:
        dy8, dy_scale_inv, ds, dB = run(ops.quantize_grad, dy, up, scaling, spec.backward_dtype)
    if needs.A:
        dA = run(ops.lora_grad_a, ds, Scaled(x8, x_scale_inv), dropout, ctx.dtypes[0])
    if needs.x:
        dx = run(
            ops.fp8_grad_input,
            Scaled(dy) if scaling is None else Scaled(dy8, dy_scale_inv),
            spec.backward_dtype,
            frozen,
            ds if lora_A is not None else None,
            lora_A,
            dropout,
            dy.dtype,
            spec.split_dgrad,
        )
    if needs.bias:
        dbias = dy.float().sum(0).to(ctx.dtypes[1])
    return dx, dA, dB if needs.B else None, dbias, ds if needs.ds else None


class LinearNode(torch.autograd.Function):
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
        x8, x_scale_inv, s = ops.quantize_lora_down(x, lora_A, call.scaling_x, call.dropout)
        operand = Scaled(x) if call.state_x is None else Scaled(x8, x_scale_inv)
        spec = call.spec
        up = None if lora_A is None or lora_B is None else Up(lora_B, s, spec.scaling)
        y = ops.fp8_linear_lora(operand, weight, bias, up, x.dtype, spec.split_fprop)
        adapter = Adapter(lora_A, lora_B, s)
        save_for_gradients(ctx, _needs(ctx), operand, weight, bias, adapter, call)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dA, dB, dbias, _ = gradients(ctx, _needs(ctx), dy.contiguous())
        return dx, dbias, dA, dB, None, None


def _needs(ctx: Any) -> Needs:
    x, bias, lora_A, lora_B = ctx.needs_input_grad[:4]
    return Needs(x, lora_A, lora_B, bias)


def in_bytes(weight: Weight) -> Weight:
    """`weight`, with e4m3 data viewed as uint8, which the ops take."""
    if weight.data.dtype == E4M3:
        return weight._replace(data=weight.data.view(torch.uint8))
    return weight
