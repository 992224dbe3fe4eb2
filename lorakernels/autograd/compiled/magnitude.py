# SPDX-License-Identifier: Apache-2.0
"""The autograd node of DoRA over an FP8 base with one scale, without its bias.

    y = g ⊙ (x Wᵀ + scaling · x Aᵀ Bᵀ)      dy' = g ⊙ dy      dg = Σ_rows dy ⊙ y / g

g [N] fp32 goes into the scale of each column of the product, and into B. dx, dA and dB are those of LinearNode, from
dy'. What depends on g alone is PyTorch's. The rest is one call of csrc each way where a plan fits (plan.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from lorakernels.autograd.compiled.plan import (
    PLANS,
    Saved,
    planned_backward,
    planned_forward,
    run_backward,
    run_forward,
)
from lorakernels.autograd.linear.linear import through_dispatcher
from lorakernels.autograd.linear.projections import Needs
from lorakernels.autograd.linear.values import Adapter, Call, LoRASpec
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
        adapter = Adapter(lora_A, (g[:, None] * lora_B).to(lora_B.dtype))
        found = planned_forward(x, None, adapter, by_column, call) if is_plain() else None
        if found is None:
            found = run_forward(through_dispatcher, x, None, adapter, by_column, call)
        y, x8, x_scale_inv, s = found
        needs = _needs(ctx)
        ctx.save_for_backward(
            *(weight if needs.x else (None, None)),
            lora_A if needs.x else None,
            lora_B if needs.x or needs.A or needs.B else None,
            s if needs.B else None,
            x8 if needs.A else None,
            x_scale_inv if needs.A else None,
            y if ctx.needs_input_grad[1] else None,
            g,
        )
        ctx.call, ctx.dtype_A = call._replace(state_x=None), lora_A.dtype
        ctx.state_x = call.state_x
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *weight, lora_A, lora_B, s, x8, x_scale_inv, y, g = ctx.saved_tensors
        needs, wide = _needs(ctx), dy.float()
        dg = None if y is None else wide.mul(y).sum(0) / g
        scaled = (wide * g).to(dy.dtype).contiguous()
        saved = Saved(
            Weight(*weight) if needs.x else None,
            Adapter(lora_A, lora_B, s),
            Scaled(x8, x_scale_inv) if needs.A else None,
            ctx.call,
        )
        found = planned_backward(scaled, saved, needs, ctx.state_x) if is_plain() else None
        if found is None:
            found = run_backward(through_dispatcher, scaled, saved, needs, (ctx.dtype_A, None))
        dx, dA, dB, _ = found
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
    """How a layer's products with a magnitude ran: "" by plans, or else why by the ops."""
    found = set()
    for spec in specs:
        known = spec.memo.get("compiled forward")
        if known is not None:
            ways = [why for (kind, *_), why in PLANS.ways() if kind is known.kind]
            found.add(NOT_PLAIN if known.kind is None else (ways or [WATCHED])[0])
    return found
