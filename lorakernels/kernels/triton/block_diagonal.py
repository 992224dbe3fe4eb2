# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel behind ops/block_diagonal.py: a program takes some rows of a whole matrix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels.triton import quantize
from lorakernels.kernels.triton.launch import launch as launch_kernel
from lorakernels.kernels.triton.launch import on_device
from lorakernels.kernels.triton.quantize import begin
from lorakernels.numerics.segments import adapters_of
from lorakernels.values import SideBySide

MAX_BLOCKS = 4
TILE = 16  # rows of a program
# The most rows of a program of several adapters: 9 µs, not 18, for eight of two projections of 14,336 rows on an H200.
MOST_ROWS = 64
ELEMENTS = 2048  # of a program of several adapters; registers hold all of them


def tile_of(adapters: int, columns: int) -> int:
    """Rows of a program, where each row has `columns` elements, rounded up to a power of two."""
    return TILE if adapters == 1 else max(TILE, min(MOST_ROWS, ELEMENTS // columns))


@triton.jit
def _places(row, column, n0, n1, r0, r1):  # type: ignore[no-untyped-def]
    """Offsets in a contiguous block at rows n0 … n1, columns r0 … r1, and which of them are inside."""
    inside = ((row >= n0) & (row < n1))[:, None] & ((column >= r0) & (column < r1))[None, :]
    offset = (row - n0).to(tl.int64)[:, None] * (r1 - r0) + (column - r0)[None, :]
    return offset, inside


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    first, second, block, row, column, n0, n1, r0, r1, factors, index,
    COUNT: tl.constexpr, SPLIT: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """SPLIT: the block's elements of `first`, times its factor, are stored; else they are added to both."""
    factor = tl.load(factors + index)
    offset, inside = _places(row, column, n0, n1, r0, r1)
    below, is_below = offset, inside
    if COMPACT:
        below, is_below = _places(row, column, n0, n1, 0, r1 - r0)
    if SPLIT:
        tl.store(block + below, (first * factor).to(block.dtype.element_ty), is_below)
    else:
        value = tl.load(block + offset, inside, other=0).to(tl.float32)
        first += tl.where(inside, value * factor, 0.0)  # beside a factor that is not finite, too
        if COMPACT:
            value = tl.load(block + below, is_below, other=0).to(tl.float32)
        second += tl.where(is_below, value * tl.load(factors + COUNT + index), 0.0)
    return first, second


@triton.jit
def _block_diagonal_kernel(  # type: ignore[no-untyped-def]
    out, out2,
    b0, b1, b2, b3, factors,
    n1, n2, n3, n4, r1, r2, r3, r4, compact_rank,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    COMPACT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """SPLIT: the blocks are written, from `out`; else read."""
    begin(False, False, OVERLAP)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, COLUMNS)
    rows, ranks = n1, r1
    if COUNT > 1:
        rows, ranks = n2, r2
    if COUNT > 2:
        rows, ranks = n3, r3
    if COUNT > 3:
        rows, ranks = n4, r4
    width = compact_rank if COMPACT else ranks
    which = tl.program_id(1).to(tl.int64)  # of several adapters in one batch
    out += which * rows * (width if SPLIT else ranks)
    out2 += which * rows * width
    b0 += which * n1 * r1
    b1 += which * (n2 - n1) * (r2 - r1)
    b2 += which * (n3 - n2) * (r3 - r2)
    b3 += which * (n4 - n3) * (r4 - r3)
    below = row.to(tl.int64)[:, None] * width + column[None, :]
    is_below = (row < rows)[:, None] & (column < width)[None, :]
    one = tl.zeros((TILE, COLUMNS), tl.float32)
    two = tl.zeros((TILE, COLUMNS), tl.float32)
    if SPLIT:
        one = tl.load(out + below, is_below, other=0).to(tl.float32)
    one, two = _block(one, two, b0, row, column, 0, n1, 0, r1, factors, 0, COUNT, SPLIT, COMPACT)
    if COUNT > 1:
        one, two = _block(
            one, two, b1, row, column, n1, n2, r1, r2, factors, 1, COUNT, SPLIT, COMPACT
        )
    if COUNT > 2:
        one, two = _block(
            one, two, b2, row, column, n2, n3, r2, r3, factors, 2, COUNT, SPLIT, COMPACT
        )
    if COUNT > 3:
        one, two = _block(
            one, two, b3, row, column, n3, n4, r3, r4, factors, 3, COUNT, SPLIT, COMPACT
        )
    if not SPLIT:
        whole = row.to(tl.int64)[:, None] * ranks + column[None, :]
        valid = (row < rows)[:, None] & (column < ranks)[None, :]
        tl.store(out + whole, one.to(out.dtype.element_ty), valid)
        tl.store(out2 + below, two.to(out.dtype.element_ty), is_below)


def launch(
    whole: Tensor,
    second: Tensor,
    blocks: Sequence[Tensor],
    side: SideBySide,
    factors: Tensor,
    compact: bool,
    *,
    split: bool,
) -> None:
    """Write `whole` and `second` from the blocks, or, with `split`, the blocks from `whole`. All may lead with J."""
    rows, ranks = side
    n, r = ([*accumulate(sizes)] for sizes in (rows, ranks))
    ends = [sizes + sizes[-1:] * (MAX_BLOCKS - len(rows)) for sizes in (n, r)]
    held = iter(blocks)
    pointers = [next(held) if rank else whole for rank in ranks]  # no rank: nothing is accessed
    pointers += [whole] * (MAX_BLOCKS - len(rows))
    early = quantize.overlaps(whole.device)
    adapters = max(1, adapters_of(whole))
    columns = triton.next_power_of_2(r[-1])
    tile = tile_of(adapters, columns)
    with on_device(whole):
        launch_kernel(
            _block_diagonal_kernel,
            (triton.cdiv(n[-1], tile), adapters),
            whole,
            second,
            *pointers,
            factors.contiguous(),
            *ends[0],
            *ends[1],
            max(ranks),
            COUNT=len(rows),
            COLUMNS=columns,
            TILE=tile,
            SPLIT=split,
            COMPACT=compact,
            OVERLAP=early,
            **quantize.launch_options(early),
        )
