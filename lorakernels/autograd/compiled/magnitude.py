# SPDX-License-Identifier: Apache-2.0
"""The autograd node of DoRA over an FP8 base with one scale, without its bias.

    y = g ⊙ (x Wᵀ + scaling · x Aᵀ Bᵀ)      dy' = g ⊙ dy      dg = Σ_rows dy ⊙ y / g

g [N] fp32 goes into the scale of each column of the product, and into B. dx, dA and dB are those of LinearNode, from
dy'. What depends on g alone is PyTorch's. The rest is one call of csrc in each direction if recorded (recorded.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from lorakernels.autograd.compiled.recorded import (
    LayerCall,
    recorded_backward,
    recorded_forward,
    run_backward,
    run_forward,
)
from lorakernels.autograd.linear.linear import through_dispatcher
from lorakernels.autograd.linear.node import Saved
from lorakernels.autograd.linear.projections import Needs
from lorakernels.autograd.linear.saved import keep, kept
from lorakernels.autograd.linear.values import Adapter, Call, LoRASpec
from lorakernels.recorded.node import RECORDINGS
from lorakernels.recorded.once import once_differentiable
from lorakernels.recorded.routing import NOT_PLAIN, WATCHED, is_plain
from lorakernels.values import Scaled, Weight

LEAST = 2.0**-40  # backward divides by g: one that is nearer to 0 counts as that


class MagnitudeNode(torch.autograd.Function):
    """Saved for backward are y, for dg, and what LinearNode saves."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, g: Tensor, lora_A: Tensor, lora_B: Tensor, weight: Weight, call: Call
    ) -> Tensor:
        """y [M, N] of a contiguous x [M, K]."""
        least = torch.full_like(g, LEAST)
        g = torch.where(g.abs() < least, least.copysign(g), g)
        assert weight.scale_inv is not None
        by_column = weight._replace(scale_inv=weight.scale_inv * g)
        by_g = Adapter(lora_A, (g[:, None] * lora_B).to(lora_B.dtype))
        layer = LayerCall(by_column, None, by_g, call)
        results = recorded_forward(x, layer) if is_plain() else None
        if results is None:
            results = run_forward(through_dispatcher, x, layer)
        y, x8, x_scale_inv, s = results
        needs, adapter = _needs(ctx), Adapter(lora_A, lora_B, s)
        saved = Saved.of(needs, weight, adapter, Scaled(x8, x_scale_inv), call.slot)
        keep(ctx, **saved.by_name(), y=y if ctx.needs_input_grad[1] else None, g=g)
        ctx.call, ctx.dtype_A = call, lora_A.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *linear, y, g = kept(ctx).values()
        saved, needs, wide = Saved(*linear), _needs(ctx), dy.float()
        dg = None if y is None else wide.mul(y).sum(0) / g
        scaled = (wide * g).to(dy.dtype).contiguous()
        results = recorded_backward(scaled, saved, ctx.call, needs) if is_plain() else None
        if results is None:
            dtypes = (ctx.dtype_A, None)
            results = run_backward(through_dispatcher, scaled, saved, ctx.call, needs, dtypes)
        dx, dA, dB, _ = results
        return (
            dx if needs.x else None,
            dg,
            dA if needs.A else None,
            dB if needs.B else None,
            None,
            None,
        )


def _needs(ctx: Any) -> Needs:
    x, _, lora_A, lora_B = ctx.needs_input_grad[:4]
    return Needs(x, lora_A, lora_B)


def ways_of(specs: Collection[LoRASpec]) -> set[str]:
    """How a layer's products with a magnitude ran: "" if recorded, or else why by the ops."""
    ways = set()
    for spec in specs:
        calls = spec.memo.get("compiled forward")
        if calls is not None:
            of_kind = [why for (_, kind, *_), why in RECORDINGS.ways() if kind is calls.kind]
            ways.add(NOT_PLAIN if calls.kind is None else (of_kind or [WATCHED])[0])
    return ways
