# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over the output head without the logits of all tokens.

    z = h Wᵀ + b          loss = Σ_t  log Σ_v exp z_tv − z_t,label          (fp32, summed, labels −100 left out)
    dz = softmax(z) − onehot(label)          dh = dz W          dW = dzᵀ h          db = Σ_t dz

Logits exist for ``chunk`` tokens at a time: chunk · V · 4 bytes instead of n · V · 4 (4.2 GB for 8192 tokens and a
vocabulary of 128256). A plain nn.Linear head computes dh while the chunk's logits are there and saves only dh (and
dW, if it trains); backward multiplies by the incoming gradient. Any other head (one with adapters, say) is
checkpointed per chunk: its logits are computed again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lorakernels.train.packing import IGNORE


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int
    ) -> Tensor:
        need_h, need_w, need_b = ctx.needs_input_grad[:3]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.zeros_like(hidden) if need_h else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_w else None
        d_bias = (
            torch.zeros_like(bias, dtype=torch.float32) if need_b and bias is not None else None
        )
        for part in range(0, len(hidden), chunk):
            rows = slice(part, part + chunk)
            h, keep = hidden[rows], labels[rows] != IGNORE
            target = labels[rows].clamp(min=0)
            log_p = F.linear(h, weight, bias).float().log_softmax(dim=-1)
            total -= log_p.gather(1, target[:, None])[:, 0].masked_fill(~keep, 0.0).sum()
            if not (need_h or need_w or need_b):
                continue
            dz = log_p.exp_()
            dz.scatter_add_(1, target[:, None], torch.full_like(dz[:, :1], -1.0))
            dz.masked_fill_(~keep[:, None], 0.0)
            if d_hidden is not None:
                d_hidden[rows] = dz.to(weight.dtype) @ weight
            if d_weight is not None:
                d_weight.addmm_(dz.T, h.float())
            if d_bias is not None:
                d_bias += dz.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        scale = grads[0]
        return (
            None if d_hidden is None else (d_hidden * scale).to(d_hidden.dtype),
            None if d_weight is None else (d_weight * scale).to(weight_dtype),
            None if d_bias is None else (d_bias * scale).to(bias_dtype),
            None,
            None,
        )


def chunked_cross_entropy(hidden: Tensor, head: nn.Module, labels: Tensor, chunk: int) -> Tensor:
    """Sum of the token losses, fp32 scalar. hidden [n, H], labels [n] with IGNORE where nothing is asked."""
    if hidden.ndim != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected hidden [n, H] and labels [n], got {tuple(hidden.shape)}, {tuple(labels.shape)}"
        )
    if type(head) is nn.Linear:
        tensors: tuple[Tensor | None, ...] = (hidden, head.weight, head.bias)
        if not torch.is_grad_enabled():  # needs_input_grad does not know about no_grad
            tensors = tuple(None if t is None else t.detach() for t in tensors)
        loss: Tensor = _LinearCrossEntropy.apply(*tensors, labels, chunk)
        return loss
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for part in range(0, len(hidden), chunk):
        rows = slice(part, part + chunk)
        total = total + checkpoint(
            _head_loss, head, hidden[rows], labels[rows], use_reentrant=False
        )
    return total


def _head_loss(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), labels, ignore_index=IGNORE, reduction="sum")
