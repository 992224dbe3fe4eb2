# SPDX-License-Identifier: Apache-2.0
"""Buckets of parameters whose gradients are reduced, and values gathered, together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lorakernels.parallel.optimizer.flat import FlatLayout, Piece
from lorakernels.parallel.ranks import comm

MOMENTS = ("exp_avg", "exp_avg_sq")


class Bucket:
    """Parameters of one dtype and device that are reduced and gathered together.

    Attributes:
        whole: [layout.size], a buffer that is shared with other buckets: the gradients of a step, then its parameters.
        grad, param, moments: [layout.part]: this rank's part of the summed gradients, of the parameters and of
            AdamW's moments.
        shards: views of `param`, one per parameter; empty where none of the parameter is in this rank's part.
    """

    def __init__(
        self, params: Sequence[Tensor], layout: FlatLayout, pieces: Sequence[Piece], whole: Tensor
    ) -> None:
        self.params, self.layout, self._pieces = list(params), layout, list(pieces)
        self.whole = whole[: layout.size]
        self.grad, self.param, *moments = (whole.new_zeros(layout.part) for _ in range(4))
        self.moments = dict(zip(MOMENTS, moments, strict=True))
        self.shards = [piece.of(self.param) for piece in pieces]

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, Piece]]:
        """(parameter, its shard, its piece) for all parameters."""
        return zip(self.params, self.shards, self._pieces, strict=True)

    def views(self) -> list[Tensor]:
        """`whole` as tensors of the parameters' shapes."""
        offsets, counts = self.layout.offsets, self.layout.counts
        spans = [slice(start, start + n) for start, n in zip(offsets, counts, strict=True)]
        return [self.whole[s].view(p.shape) for p, s in zip(self.params, spans, strict=True)]

    def reduce(self, group: Any, factor: float) -> None:
        """Collective: sum the gradients times `factor`. Each shard gets its piece as `grad`, if there is one."""
        self.whole.zero_()
        pairs = [(v, p.grad) for v, p in zip(self.views(), self.params, strict=True)]
        with_grad = [(view, grad) for view, grad in pairs if grad is not None]
        torch._foreach_copy_([view for view, _ in with_grad], [grad for _, grad in with_grad])
        if factor != 1.0:
            self.whole.mul_(factor)
        comm.reduce_scatter(group, self.grad, self.whole)
        for p, shard, piece in self.pieces():
            shard.grad = None if p.grad is None else piece.of(self.grad)

    def take(self) -> None:
        """Copy this rank's part of the parameters, as they may have been changed since the last step."""
        now = [p.detach().reshape(-1)[piece.start : piece.stop] for p, _, piece in self.pieces()]
        torch._foreach_copy_(self.shards, now)

    def give(self, group: Any) -> None:
        """Collective: write the parts of all ranks into the parameters that have a gradient."""
        comm.all_gather(group, self.whole, self.param)
        pairs = zip(self.params, self.views(), strict=True)
        with_grad = [(p, view) for p, view in pairs if p.grad is not None]
        torch._foreach_copy_([p for p, _ in with_grad], [view for _, view in with_grad])
