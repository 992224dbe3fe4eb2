# SPDX-License-Identifier: Apache-2.0
"""Attention of rows whose tokens are split over n ranks. Each rank gathers all keys and values for its own queries.

A row of S tokens is cut into 2n chunks of C = S / 2n. Rank r has chunks r and 2n − 1 − r. All ranks then have equal
work, as a token attends to itself and earlier tokens.

    forward    k, v [S] ← gather of every rank's [2C]; each chunk's queries attend to the keys up to the chunk's end
    backward   dk, dv [S] of both chunks, summed over the ranks in fp32; each rank keeps its [2C]

A kernel returns dk and dv of a range of keys in the dtype of k. On one rank each key lies in one range. Ranks are added
in fp32, and the sum is rounded once, to k's dtype. Where GPUs read each other's memory, kernels of this package copy
keys, values and gradients (kernels/triton/chunk_rows.py). Elsewhere torch's ops and a collective do.

Documents that are packed into rows may begin anywhere. Every rank has the starts of all documents, counted in whole
rows. A document ends with its row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.autograd.attention import graphed
from lorakernels.autograd.attention.choose import (
    GRAPH,
    LONG,
    Segments,
    attend_segments,
    choose,
    choose_segments,
)
from lorakernels.autograd.attention.chunk import NAMES as CHUNKS
from lorakernels.autograd.attention.chunk import (
    AttendedChunks,
    ChunkCall,
    attend_chunks,
    chunk_gradients,
)
from lorakernels.kernels.triton.chunk_rows import KeyGradients, in_order, layered, side_by_side
from lorakernels.kernels.triton.sum_rows import sum_rows
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.recorded.once import once_differentiable


class Chunks(NamedTuple):
    """The two chunks of `size` tokens that rank `rank` of `ranks` has of each row."""

    rank: int
    ranks: int
    size: int

    @classmethod
    def of(cls, ranks: Ranks, tokens: int) -> Chunks:
        """`tokens`: how many tokens of a row this rank has, 2C."""
        return cls(ranks.rank, ranks.size, tokens // 2)

    @property
    def length(self) -> int:
        """S."""
        return 2 * self.ranks * self.size

    @property
    def begins(self) -> tuple[int, int]:
        """The first token of each of this rank's chunks."""
        return self.rank * self.size, (2 * self.ranks - 1 - self.rank) * self.size

    def own(self, whole: Tensor) -> Tensor:
        """This rank's tokens [B, 2C, …] of [B, S, …]."""
        return torch.cat([whole[:, begin : begin + self.size] for begin in self.begins], 1)

    def by_rank(self, whole: Tensor) -> Tensor:
        """[n B, 2C, …] of [B, S, …]: the tokens of all ranks, in rank order."""
        chunks = whole.unflatten(1, (2 * self.ranks, self.size)).movedim(1, 0)
        head, tail = chunks[: self.ranks], chunks[self.ranks :].flip(0)
        return torch.stack((head, tail), 2).flatten(2, 3).flatten(0, 1)

    def in_order(self, parts: Tensor) -> Tensor:
        """The inverse of `by_rank`: [B, S, …] of [n B, 2C, …]."""
        halves = parts.unflatten(1, (2, self.size)).unflatten(0, (self.ranks, -1))
        chunks = torch.cat((halves[:, :, 0], halves[:, :, 1].flip(0)))
        return chunks.movedim(0, 1).flatten(1, 2)

    def segments(self, starts: Tensor, rows: int, begin: int, longest: int) -> Segments:
        """The segments of the chunks that begin at token `begin` of each row, with all keys of all rows.

        A document is a segment, and so are the keys of a row behind the chunk. The number of segments depends on shapes
        alone, and the host never reads the device.

        Args:
            starts: int32 [N + 1], where documents begin among the B S tokens.
            rows: B.
            begin: the chunks' first token in their rows.
            longest: the number of tokens of the longest document.
        """
        length, size = self.length, self.size
        row_starts = torch.arange(rows, device=starts.device, dtype=torch.int32) * length
        keys = torch.cat((starts, row_starts, row_starts + begin + size)).sort().values
        row = keys // length
        queries = row * size + (keys - row * length - begin).clamp(0, size)
        longest = min(longest, length)
        return Segments(queries.int(), keys, min(size, longest), longest)


class _GatherKeys(torch.autograd.Function):
    """Gathers k and v [B, Hk, 2C, D] of all ranks to [B, Hk, S, D], views of one matrix [B, S, 2 Hk, D]."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, chunks: Chunks, ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        ctx.chunks, ctx.ranks, ctx.dtype = chunks, ranks, k.dtype
        return _gathered(k, v, chunks, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        whole = [KeyGradients(0, dk, dv)]
        return *_summed(whole, ctx.dtype, ctx.chunks, ctx.ranks), None, None


class _WholeRows(torch.autograd.Function):
    """Attention of rows that are one document each. q, k and v have this rank's tokens."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: ChunkCall, chunks: Chunks, ranks: Ranks
    ) -> Tensor:
        part, whole = (k, v), _gathered(k, v, chunks, ranks)
        attended = attend_chunks(call, q, part, whole)
        ctx.save_for_backward(q, *part, *whole, attended.out, attended.lse)
        ctx.call, ctx.rest, ctx.chunks, ctx.ranks = call, attended.rest, chunks, ranks
        return attended.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, *keys, out, lse = ctx.saved_tensors
        part, whole = (keys[0], keys[1]), (keys[2], keys[3])
        attended = AttendedChunks(out, lse, ctx.rest)
        dq, parts = chunk_gradients(ctx.call, dout, q, part, whole, attended)
        return dq, *_summed(parts, q.dtype, ctx.chunks, ctx.ranks), None, None, None


def _gathered(k: Tensor, v: Tensor, chunks: Chunks, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Collective: k and v [B, Hk, S, D], gathered from the [B, Hk, 2C, D] of all ranks."""
    batch, heads, tokens, dim = k.shape
    form = torch.Size([batch, tokens, 2 * heads, dim])
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    buffers = ranks.rows.lay_down(form, k.dtype, partial(side_by_side, k, v))
    if buffers is not None:
        return _heads(in_order(buffers, chunks.rank))
    both = torch.cat((k, v), 1).transpose(1, 2)
    return _heads(chunks.in_order(ranks.rows.gather(both)[0]))


def _summed(
    parts: list[KeyGradients], dtype: torch.dtype, chunks: Chunks, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """Collective: dk and dv [B, Hk, 2C, D] of this rank's tokens in `dtype`: the `parts` of all ranks, summed."""
    batch, heads, _, dim = parts[0].dk.shape
    wide, buffers = torch.promote_types(dtype, torch.float32), None
    if wide == torch.float32:
        form = torch.Size([chunks.ranks, batch, 2 * chunks.size, 2 * heads, dim])
        buffers = ranks.rows.lay_down(form, wide, partial(layered, parts))
    if buffers is not None:
        return _heads(sum_rows([buffer[chunks.rank] for buffer in buffers], None, dtype))
    both = parts[0].dk.new_zeros((batch, chunks.length, 2 * heads, dim), dtype=wide)
    for begin, *grads in parts:
        for total, d in zip(_heads(both), grads, strict=True):
            total[:, :, begin : begin + d.shape[2]].add_(d)
    return _heads(ranks.rows.sum(chunks.by_rank(both))[0].to(dtype))


def _heads(both: Tensor) -> tuple[Tensor, Tensor]:
    """k and v [B, Hk, T, D] of [B, T, 2 Hk, D]."""
    k, v = both.transpose(1, 2).chunk(2, 1)
    return k, v


_Key = tuple[torch.dtype, int, bool, bool, bool]


class ContextAttention:
    """Attention of one model's rows over `ranks`, by the backend `attention` or by "auto".

    A copy has the same ranks.

    Attributes:
        size: the number of ranks.
        begin: called before a fused layer runs, with the number of tokens that this rank has of a row.
        chosen: {(dtype, D, whether each row is one document, whether one may have LONG tokens, whether algorithms are
            deterministic): name of the backend}.
    """

    def __init__(self, ranks: Ranks, attention: str, begin: Callable[[int], None]) -> None:
        self.ranks, self.size, self.attention, self.begin = ranks, ranks.size, attention, begin
        self.chosen: dict[_Key, str] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextAttention:
        return ContextAttention(self.ranks, self.attention, copy.deepcopy(self.begin, memo))

    def together(self) -> AbstractContextManager[None]:
        return comm.together(self.ranks.group)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, documents: tuple[Tensor | None, int], scale: float
    ) -> Tensor:
        """Collective: out [B, H, 2C, D]. Each of this rank's tokens attends to its document up to itself.

        Args:
            q: [B, H, 2C, D].
            k, v: [B, Hk, 2C, D].
            documents: (int32 [N + 1], where documents begin among the B S tokens of all ranks, or None if each row is
                one document; the number of tokens of the longest document, ignored with None).
            scale: the factor of q kᵀ.

        Raises:
            RuntimeError: under torch.compile.
            ValueError: the backend cannot take a part of a row's queries.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("attention over ranks cannot be compiled: run it eagerly")
        chunks, rows = Chunks.of(self.ranks, q.shape[2]), q.shape[0]
        starts, longest = documents
        exact = torch.are_deterministic_algorithms_enabled()
        longest = chunks.length if starts is None else min(longest, chunks.length)
        key = q.dtype, q.shape[3], starts is None, longest >= LONG, exact
        if starts is None and key not in self.chosen:
            self.chosen[key] = self._whole(q, k, v)
        if starts is None and self.chosen[key] in CHUNKS:
            call = ChunkCall(self.chosen[key], chunks.begins, scale)
            whole: Tensor = _WholeRows.apply(q, k, v, call, chunks, self.ranks)
            return whole
        k, v = _GatherKeys.apply(k, v, chunks, self.ranks)
        if starts is None:
            starts = torch.arange(rows + 1, device=q.device, dtype=torch.int32) * chunks.length
        outs = []
        for part, begin in zip(q.chunk(2, 2), chunks.begins, strict=True):
            segments = chunks.segments(starts, rows, begin, longest)
            name = self._of_segments(key, (part, k, v), segments, scale)
            outs.append(attend_segments(name, part, k, v, segments, scale))
        return torch.cat([out.transpose(1, 2) for out in outs], 1).transpose(1, 2)

    def _of_segments(
        self, key: _Key, qkv: tuple[Tensor, Tensor, Tensor], segments: Segments, scale: float
    ) -> str:
        """The backend for segments. While cuDNN graphs have no room, another backend is chosen in each call."""
        name, wanted, long = self.chosen.get(key), self.attention, key[3]
        if not name:
            name = self.chosen[key] = choose_segments(wanted, *qkv, long)
        if name == GRAPH:
            longest = segments.longest_q, segments.longest_k
            if graphed.has_no_room(*qkv, len(segments.q) - 1, longest, scale):
                return choose_segments(wanted, *qkv, long)
        return name

    def _whole(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        """The backend in CHUNKS that attends to rows of one document; "" if they are taken as segments instead."""
        name = choose("auto", q, k, v, None, True) if self.attention == "auto" else ""
        return name if name in CHUNKS else ""
