# SPDX-License-Identifier: Apache-2.0
"""RMSNorm alone, for a model's last norm: one kernel each way. x and one rstd per row are kept for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.autograd.decoder.node import flat
from lorakernels.recorded.once import once_differentiable


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = flat(x)
        normed, _, _, rstd = ops.rms_norm_quantize(rows, weight, eps, None, True)
        ctx.save_for_backward(rows, weight, rstd)
        return normed.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, rstd = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        dx, dweight = ops.rms_norm_backward(flat(dy), rows, weight, rstd, None, need_weight)
        return (
            dx.view(dy.shape) if need_x else None,
            dweight.to(weight.dtype) if need_weight else None,
            None,
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight [K] ⊙ x / √(mean(x²) + ε) for x [..., K], in x's dtype and rounded as in transformers' norms."""
    y: Tensor = _RMSNorm.apply(x, weight, eps)
    return y
