# SPDX-License-Identifier: Apache-2.0
"""Embedding, head and cross-entropy of a language model whose vocabulary is split over T ranks.

    z_t = h W_tᵀ      m = max over ranks and columns      e = Σ exp(z − m) over both      W_t [V/T, H], h [M, H]
    loss = f · Σ_i (log e_i + m_i − z_i,label)            dh = Σ over ranks of f · (exp(z_t − m) / e − onehot_t) W_t

Each rank has V/T columns of the logits, `chunk` tokens at a time. Three numbers a token are reduced instead of logits,
and dh once. Both the embedding and the head are frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakernels.modules.marks import SplitModule
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.group import Ranks

CHUNK = 2048


class VocabularyEmbedding(SplitModule, nn.Module):
    """This rank's rows [V/T, H] of a frozen embedding. The result is the whole embedding's, bit for bit."""

    dimensions: ClassVar[Mapping[str, int]] = {"weight": 0}

    def __init__(self, weight: nn.Parameter, ranks: Ranks) -> None:
        super().__init__()
        self.weight, self.ranks = weight, ranks

    def forward(self, tokens: Tensor) -> Tensor:
        """[..., H] of tokens [...], on every rank. Collective.

        Raises:
            IndexError: a token is outside of the vocabulary, as for nn.Embedding.
        """
        rows, inside = _local(tokens, self.ranks, len(self.weight))
        exists = (tokens >= 0) & (tokens < self.ranks.size * len(self.weight))
        rows = rows.where(exists, -1)
        embedded = F.embedding(rows, self.weight).masked_fill_(~inside[..., None], 0.0)
        comm.all_reduce(self.ranks.group, embedded)
        return embedded


class VocabularyHead(SplitModule, nn.Module):
    """This rank's rows [V/T, H] of a frozen output head. Its forward gathers; `loss` does not."""

    dimensions: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, ranks: Ranks) -> None:
        super().__init__()
        self.weight, self.bias, self.ranks = weight, bias, ranks

    def forward(self, hidden: Tensor) -> Tensor:
        """The whole logits [..., V] of a hidden [..., H] that all ranks have. Collective, forward and backward."""
        logits: Tensor = _Logits.apply(hidden, self)
        return logits

    def loss(self, hidden: Tensor, labels: Tensor, items: Any = None, chunk: int = CHUNK) -> Tensor:
        """Collective: the mean cross-entropy, fp32 [], equal on all ranks.

        Args:
            hidden: [M, H], all rows, on every rank.
            labels: int64 [M]; a negative one does not count. Already shifted.
            items: divide by this number instead of by the labels that count. If no label counts, the loss is 0.
            chunk: how many tokens have logits at a time.
        """
        count = (labels >= 0).sum().clamp(min=1) if items is None else torch.as_tensor(items)
        factor = 1.0 / count.to(hidden.device, torch.float32)
        loss: Tensor = _Loss.apply(hidden, self, labels, factor, chunk)
        return loss


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: VocabularyHead) -> Tensor:
        ctx.head, ctx.dtype = head, hidden.dtype
        part = F.linear(hidden, head.weight, head.bias)
        return comm.gather_rows(head.ranks.group, part.movedim(-1, 0)).movedim(0, -1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, None]:
        head = ctx.head
        part = dz[..., head.ranks.share(dz.shape[-1])].to(
            head.weight.dtype
        )  # autocast's logits have another
        dh = (part @ head.weight).to(ctx.dtype).contiguous()
        comm.all_reduce(head.ranks.group, dh)
        return dh, None


def _local(tokens: Tensor, ranks: Ranks, rows: int) -> tuple[Tensor, Tensor]:
    """(indices into this rank's rows, 0 where another rank has the token; whether this rank has it)."""
    index = tokens - ranks.rank * rows
    inside = (index >= 0) & (index < rows)
    return index.where(inside, 0), inside


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: VocabularyHead, labels: Tensor, factor: Tensor, chunk: int
    ) -> Tensor:
        dh = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), device=hidden.device)
        for rows in (slice(i, i + chunk) for i in range(0, len(hidden), chunk)):
            losses, dz = _chunk(hidden[rows], head, labels[rows])
            total += losses.sum()
            if dh is not None:
                dh[rows] = (dz * factor).to(hidden.dtype) @ head.weight
        if dh is not None:
            comm.all_reduce(head.ranks.group, dh)
        ctx.save_for_backward(dh)
        return total * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        (dh,) = ctx.saved_tensors
        return None if dh is None else dh * dloss.to(dh.dtype), None, None, None, None


def _chunk(hidden: Tensor, head: VocabularyHead, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(the loss of each token, fp32; softmax − onehot in this rank's columns).

    Both are 0 where a label is negative, whatever the logits are, and NaN where it is not below V.
    """
    group = head.ranks.group
    z = F.linear(hidden, head.weight, head.bias).float()
    largest = z.amax(1)
    comm.maximum(group, largest)
    index, inside = _local(labels, head.ranks, len(head.weight))
    label_z = z.gather(1, index[:, None])[:, 0].where(inside, 0.0)
    e = z.sub_(largest[:, None]).exp_()
    sums = torch.stack((e.sum(1), label_z))
    comm.all_reduce(group, sums)
    sums[0].masked_fill_(labels >= head.ranks.size * len(head.weight), torch.nan)
    ignored = labels < 0
    losses = (sums[0].log() + largest - sums[1]).masked_fill(ignored, 0.0)
    dz = e.div_(sums[0][:, None])
    dz.scatter_add_(1, index[:, None], -inside.to(dz.dtype)[:, None])
    return losses, dz.masked_fill_(ignored[:, None], 0.0)
