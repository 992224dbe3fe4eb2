# SPDX-License-Identifier: Apache-2.0
"""The autograd node of a linear layer: one projection of `linear`, and the tensors that it keeps.

Backward may need x8 and its 4-byte scale_inv (x itself over a plain base), s, and the 16-byte slot. Only tensors that
the wanted gradients need are saved. Parameters are saved by reference. Under BlockScaling x8 has a scale_inv for each
1 × 128, and only results are written. Layers that ranks hold together and compiled calls run the same functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.autograd.linear import linear
from lorakernels.autograd.linear.linear import Run, through_dispatcher
from lorakernels.autograd.linear.projections import Adapters, Needs, Projections
from lorakernels.autograd.linear.saved import keep, kept
from lorakernels.autograd.linear.values import Adapter, Call
from lorakernels.numerics.fp8 import E4M3
from lorakernels.recorded.once import once_differentiable
from lorakernels.values import Scaled, Weight


class Saved(NamedTuple):
    """The tensors of a linear layer that backward reads; None for one that no gradient needs.

    Attributes:
        weight, w_scale_inv: of a `Weight`.
        lora_A, lora_B, s: of an `Adapter`.
        slot: of a `Call`.
        x, x_scale_inv: x8 and its scale_inv, or x over a plain base.
    """

    weight: Tensor | None
    w_scale_inv: Tensor | None
    lora_A: Tensor | None
    lora_B: Tensor | None
    slot: Tensor | None
    x: Tensor | None
    x_scale_inv: Tensor | None
    s: Tensor | None

    @classmethod
    def of(
        cls, needs: Needs, weight: Weight, adapter: Adapter, operand: Scaled, slot: Tensor | None
    ) -> Saved:
        lora_A, lora_B, s = adapter
        any_mask = needs.x or needs.A
        return cls(
            weight.data if needs.x else None,
            weight.scale_inv if needs.x else None,
            lora_A if needs.x else None,
            lora_B if any_mask or needs.B else None,
            slot if any_mask else None,
            operand.data if needs.A else None,
            operand.scale_inv if needs.A else None,
            s if needs.B else None,
        )

    def by_name(self) -> dict[str, Tensor | None]:
        return self._asdict()


class LinearGradients(NamedTuple):
    """dx [M, K], dA, dB and dbias of a linear layer; None for one that is not needed."""

    x: Tensor | None
    A: Tensor | None
    B: Tensor | None
    bias: Tensor | None


def forward(
    x: Tensor,
    bias: Tensor | None,
    adapter: Adapter,
    weight: Weight,
    call: Call,
    keeps_s: bool = True,
    run: Run = through_dispatcher,
) -> tuple[Tensor, Scaled, Tensor | None]:
    """(y [M, N], x8 and its scale_inv or x itself over a plain base, s [M, R] or None) of x [M, K].

    Args:
        keeps_s: whether backward will read s.
        run: calls an op.
    """
    to = Projections.single(weight, bias, adapter, weight.data.shape[0], call)
    to = to.placed(x.shape[0])
    operand, s = linear.quantize_down(x, to, run)
    y, s = linear.projected(operand, s, to, adapter.B, x.dtype, keeps_s=keeps_s, run=run)
    return y, operand, s


def gradients(
    saved: Saved,
    call: Call,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    needs: Needs,
    dy: Tensor,
    run: Run = through_dispatcher,
) -> LinearGradients:
    """The gradients in `needs`, from a contiguous dy [M, N].

    Args:
        call: the forward's; `saved` has its slot.
        dtypes: of A and of the bias; None for an absent one.
        run: calls an op.
    """
    frozen, adapter = Weight(saved.weight, saved.w_scale_inv), Adapter(saved.lora_A, saved.lora_B)  # type: ignore[arg-type]
    to = Projections.single(frozen, None, adapter, dy.shape[1], call._replace(slot=saved.slot))
    dtype_A, dtype_bias = dtypes
    adapters = Adapters(saved.s, dtype_A, [] if adapter.B is None else [adapter.B])

    def operand() -> Scaled:
        return Scaled(saved.x, saved.x_scale_inv)  # type: ignore[arg-type]

    grads = linear.gradients(to, dy, None, operand, adapters, needs, run=run)
    (dbias,) = linear.bias_gradients(to, dy, [dtype_bias if needs.bias else None])
    return LinearGradients(grads.x, (*grads.A, None)[0], (*grads.B, None)[0], dbias)


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
        """y [M, N] of x [M, K]. Over ranks that split rows, y and x have different M."""
        needs, adapter = _needs(ctx), Adapter(lora_A, lora_B)
        y, operand, s = forward(x, bias, adapter, weight, call, keeps_s=needs.B)
        saved = Saved.of(needs, weight, adapter._replace(s=s), operand, call.slot)
        if call.over is not None:  # W's shape gives the parts, also where no dx is computed
            saved = saved._replace(weight=weight.data, w_scale_inv=weight.scale_inv)
        keep(ctx, **saved.by_name())
        ctx.spec, ctx.state_dy, ctx.over = call.spec, call.state_dy, call.over
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (lora_A, bias))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call = Call(ctx.spec, None, None, ctx.state_dy, ctx.over)
        grads = gradients(Saved(**kept(ctx)), call, ctx.dtypes, _needs(ctx), dy.contiguous())
        return grads.x, grads.bias, grads.A, grads.B, None, None


def _needs(ctx: Any) -> Needs:
    x, bias, lora_A, lora_B = ctx.needs_input_grad[:4]
    return Needs(x, lora_A, lora_B, bias)


def in_bytes(weight: Weight) -> Weight:
    """`weight`, with e4m3 data viewed as uint8, which the ops take."""
    if weight.data.dtype == E4M3:
        return weight._replace(data=weight.data.view(torch.uint8))
    return weight
