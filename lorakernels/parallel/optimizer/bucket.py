# SPDX-License-Identifier: Apache-2.0
"""Parameters that are reduced and gathered together, and one rank's part of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lorakernels.parallel.optimizer.flat import Layout, Piece
from lorakernels.parallel.ranks import comm

MOMENTS = ("exp_avg", "exp_avg_sq")


class Bucket:
    """Parameters of one dtype and device that are reduced and gathered together.

    Attributes:
        whole: [layout.size], shared with other buckets: the gradients of a step, then its parameters.
        grad, own, moments: [layout.part]: this rank's part of the summed gradients, of the parameters and of
            AdamW's moments.
        shards: views of `own`, one a parameter; empty where none of it is this rank's.
    """

    def __init__(
        self, params: Sequence[Tensor], layout: Layout, pieces: Sequence[Piece], whole: Tensor
    ) -> None:
        self.params, self.layout, self._pieces = list(params), layout, list(pieces)
        self.whole = whole[: layout.size]
        self.grad, self.own, *moments = (whole.new_zeros(layout.part) for _ in range(4))
        self.moments = dict(zip(MOMENTS, moments, strict=True))
        self.shards = [piece.of(self.own) for piece in pieces]

    def each(self) -> Iterator[tuple[Tensor, Tensor, Piece]]:
        """Each parameter with its shard and its piece."""
        return zip(self.params, self.shards, self._pieces, strict=True)

    def views(self) -> list[Tensor]:
        """`whole` as tensors of the parameters' shapes."""
        found = zip(self.params, self.layout.offsets, self.layout.counts, strict=True)
        return [self.whole[at : at + count].view(p.shape) for p, at, count in found]

    def reduce(self, group: Any, factor: float) -> None:
        """Collective: sum the gradients times `factor`. Each shard gets its piece, or None for no gradient."""
        self.whole.zero_()
        pairs = [(v, p.grad) for v, p in zip(self.views(), self.params, strict=True)]
        given = [(view, grad) for view, grad in pairs if grad is not None]
        torch._foreach_copy_([view for view, _ in given], [grad for _, grad in given])
        if factor != 1.0:
            self.whole.mul_(factor)
        comm.reduce_scatter(group, self.grad, self.whole)
        for p, shard, piece in self.each():
            shard.grad = None if p.grad is None else piece.of(self.grad)

    def take(self) -> None:
        """Copy this rank's part of the parameters, which others may have written since the last step."""
        now = [p.detach().reshape(-1)[piece.start : piece.stop] for p, _, piece in self.each()]
        torch._foreach_copy_(self.shards, now)

    def give(self, group: Any) -> None:
        """Collective: write every rank's part into the parameters that have a gradient."""
        comm.all_gather(group, self.whole, self.own)
        pairs = zip(self.params, self.views(), strict=True)
        given = [(p, view) for p, view in pairs if p.grad is not None]
        torch._foreach_copy_([p for p, _ in given], [view for _, view in given])
