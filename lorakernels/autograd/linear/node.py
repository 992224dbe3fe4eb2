# SPDX-License-Identifier: Apache-2.0
"""The autograd node of a linear layer: one projection of `linear`, and what is kept of it.

Backward may need x8 and its 4-byte scale_inv (x itself over a plain base), s, and the 16-byte slot. Only what the
wanted gradients need is saved. Parameters are saved by reference. Under BlockScaling x8 has a scale_inv for each
1 × 128, and nothing but results is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lorakernels.autograd.linear import linear
from lorakernels.autograd.linear.linear import Run, through_dispatcher
from lorakernels.autograd.linear.projections import Adapters, Needs, Projections
from lorakernels.autograd.linear.values import Adapter, Call
from lorakernels.numerics.fp8 import E4M3
from lorakernels.recorded.once import once_differentiable
from lorakernels.values import Scaled, Weight


def _save(
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
        lora_A if needs.x else None,
        lora_B if needs.x or needs.A or needs.B else None,
        call.slot if needs.x or needs.A else None,
        x.data if needs.A else None,
        x.scale_inv if needs.A else None,
        s if needs.B else None,
    )
    ctx.state_dy, ctx.spec = call.state_dy, call.spec
    ctx.dtypes = tuple(None if t is None else t.dtype for t in (lora_A, bias))


def gradients(
    ctx: Any, needs: Needs, dy: Tensor, run: Run = through_dispatcher
) -> tuple[Tensor | None, ...]:
    """(dx [M, K], dA, dB, dbias) from a contiguous dy [M, N]; None for what is not needed.

    `run(op, *arguments)` calls an op.
    """
    weight, w_scale_inv, lora_A, lora_B, slot, x8, x_scale_inv, s = ctx.saved_tensors
    dtype_A, dtype_bias = ctx.dtypes
    call = Call(ctx.spec, slot, None, ctx.state_dy)
    frozen, adapter = Weight(weight, w_scale_inv), Adapter(lora_A, lora_B)
    to = Projections.single(frozen, None, adapter, dy.shape[1], call)
    adapters = Adapters(s, dtype_A, [] if lora_B is None else [lora_B])

    def operand() -> Scaled:
        return Scaled(x8, x_scale_inv)

    found = linear.gradients(to, dy, None, operand, adapters, needs, run=run)
    (dbias,) = linear.bias_gradients(to, dy, [dtype_bias if needs.bias else None])
    dA, dB = (*found.A, None)[0], (*found.B, None)[0]
    return found.x, dA, dB, dbias


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
        """y [M, N] of x [M, K]."""
        adapter = Adapter(lora_A, lora_B)
        to = Projections.single(weight, bias, adapter, weight.data.shape[0], call)
        operand, s = linear.quantize_down(x, to)
        y = linear.project(operand, s, to, lora_B, x.dtype)
        _save(ctx, _needs(ctx), operand, weight, bias, adapter._replace(s=s), call)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dA, dB, dbias = gradients(ctx, _needs(ctx), dy.contiguous())
        return dx, dbias, dA, dB, None, None


def _needs(ctx: Any) -> Needs:
    x, bias, lora_A, lora_B = ctx.needs_input_grad[:4]
    return Needs(x, lora_A, lora_B, bias)


def in_bytes(weight: Weight) -> Weight:
    """`weight`, with e4m3 data viewed as uint8, which the ops take."""
    if weight.data.dtype == E4M3:
        return weight._replace(data=weight.data.view(torch.uint8))
    return weight
