# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of adapters in one batch (numerics/segments.py): a launch serves the segments of all of them.

    down    out[m] = Σ_c wide[m, c] · F_j[c]        s of x and A, ds of dy and B; j is the segment of row m
    outer   out_j = Σ_m narrow[m]ᵀ wide[m]          dA of ds and x, dB of s and dy; m in segment j

Partial sums in fp32 are added in their order by a third kernel, and rounded once. So the order depends on the shape
alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels.triton import grouped
from lorakernels.kernels.triton.launch import launch, on_device
from lorakernels.kernels.triton.quantize import decode_e4m3, is_native
from lorakernels.numerics.segments import adapters_of
from lorakernels.values import Up

ROWS, COLUMNS = 64, 128
MOST_RANK = grouped.MOST_RANK
SUM_ELEMENTS = 1024
ROWS_MULTIPLE = 16  # of a segment
PROGRAMS = 264  # two for each multiprocessor of an H100 or H200


@triton.jit
def _down_kernel(
    partial: tl.tensor,
    wide: tl.tensor,
    factor: tl.tensor,
    M: tl.tensor,
    C: tl.tensor,
    R: tl.tensor,
    T: tl.tensor,
    PART: tl.tensor,
    STRIDE_C: tl.tensor,
    STRIDE_R: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
) -> None:
    """ROWS rows of one segment times PART of the columns."""
    first = tl.program_id(0) * ROWS
    start = tl.program_id(1) * PART
    m = (first + tl.arange(0, ROWS)).to(tl.int64)
    rank = tl.arange(0, RANK)
    ranked = rank < R
    F = factor + (first // T).to(tl.int64) * C * R
    total = tl.zeros((ROWS, RANK), tl.float32)
    for column in tl.range(start, min(start + PART, C), COLUMNS):
        c = column + tl.arange(0, COLUMNS)
        there = c < C
        value = tl.load(wide + m[:, None] * C + c[None, :], there[None, :], other=0.0)
        offset = c.to(tl.int64)[:, None] * STRIDE_C + rank[None, :] * STRIDE_R
        f = tl.load(F + offset, there[:, None] & ranked[None, :], other=0.0)
        total = tl.dot(value, f.to(value.dtype), total)
    to = (tl.program_id(1).to(tl.int64) * M + m)[:, None] * R + rank[None, :]
    tl.store(partial + to, total, ranked[None, :])


@triton.jit
def _outer_kernel(
    partial: tl.tensor,
    wide: tl.tensor,
    narrow: tl.tensor,
    C: tl.tensor,
    R: tl.tensor,
    T: tl.tensor,
    PART: tl.tensor,
    STRIDE_C: tl.tensor,
    STRIDE_R: tl.tensor,
    scale_inv: tl.tensor,
    alpha: tl.tensor,
    WHOLE: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
) -> None:
    """COLUMNS columns of one segment's product, over PART of its rows. WHOLE: that is all of them, and the result."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = c < C
    segment, part = tl.program_id(1), tl.program_id(2)
    rank = tl.arange(0, RANK)
    ranked = rank < R
    total = tl.zeros((RANK, COLUMNS), tl.float32)
    start, end = part * PART, min((part + 1) * PART, T)
    for row in tl.range(start, end, ROWS):
        within = row + tl.arange(0, ROWS)
        inside = (within < end)[:, None]
        m = (segment * T + within).to(tl.int64)
        narrow_rows = tl.load(
            narrow + m[:, None] * R + rank[None, :], inside & ranked[None, :], other=0.0
        )
        value = tl.load(wide + m[:, None] * C + c[None, :], inside & there[None, :], other=0)
        if FP8:
            value = decode_e4m3(value, NATIVE).to(narrow_rows.dtype)
        total = tl.dot(tl.trans(narrow_rows), value.to(narrow_rows.dtype), total)
    base = (part * tl.num_programs(1) + segment).to(tl.int64) * R * C
    offset = c.to(tl.int64)[None, :] * STRIDE_C + rank[:, None] * STRIDE_R
    if WHOLE:
        total *= alpha
        if FP8:
            total *= tl.load(scale_inv)
    total = total.to(partial.dtype.element_ty)
    tl.store(partial + base + offset, total, ranked[:, None] & there[None, :])


@triton.jit
def _sum_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    scale_inv: tl.tensor,
    alpha: tl.tensor,
    N: tl.tensor,
    PARTS: tl.tensor,
    SCALED: tl.constexpr,
    ELEMENTS: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = i < N
    total = tl.zeros((ELEMENTS,), tl.float32)
    pointer = partial + i
    for _ in tl.range(0, PARTS):
        total += tl.load(pointer, there, other=0.0)
        pointer += N
    total *= alpha
    if SCALED:
        total *= tl.load(scale_inv)
    tl.store(out + i, total.to(out.dtype.element_ty), there)


def down(wide: Tensor, factor: Tensor, by_column: bool, alpha: float = 1.0) -> Tensor:
    """alpha · wide F_j [M, R] in the dtype of `wide` [M, C]; F [J, C, R] `by_column`, else [J, R, C]."""
    m, c = wide.shape
    rank = factor.shape[2 if by_column else 1]
    segment_rows = m // adapters_of(factor)
    tall = rank > 32 and segment_rows % 128 == 0  # by measurement
    rows = 128 if tall else next(size for size in (ROWS, 32, 16) if segment_rows % size == 0)
    columns = 64 if tall else COLUMNS
    blocks = m // rows
    part = _part(c, columns, blocks)
    parts = triton.cdiv(c, part)
    partial = wide.new_empty((parts, m, rank), dtype=torch.float32)
    out = wide.new_empty((m, rank))
    with on_device(wide):
        launch(
            _down_kernel, (blocks, parts), partial, wide, factor, m, c, rank, segment_rows, part,
            *((rank, 1) if by_column else (1, c)), ROWS=rows, COLUMNS=columns, RANK=grouped.padded(rank),
        )  # fmt: skip
        _add_up(out, partial, None, alpha)
    return out


def outer(
    wide: Tensor,
    narrow: Tensor,
    adapters: int,
    scale_inv: Tensor | None,
    dtype: torch.dtype,
    alpha: float = 1.0,
    by_column: bool = False,
) -> Tensor:
    """alpha · narrowᵀ wide of each segment, [J, R, C], or [J, C, R] `by_column`, in `dtype`.

    `wide` [M, C] has the dtype of `narrow` [M, R], or is uint8 bytes of e4m3 with a scale_inv fp32 [1].
    """
    (m, c), rank = wide.shape, narrow.shape[1]
    segment_rows = m // adapters
    strips = triton.cdiv(c, COLUMNS)
    part = _part(segment_rows, ROWS, strips * adapters)
    parts = triton.cdiv(segment_rows, part)
    shape = (adapters, c, rank) if by_column else (adapters, rank, c)
    out = narrow.new_empty(shape, dtype=dtype)
    whole = parts == 1
    partial = out if whole else narrow.new_empty((parts, *shape), dtype=torch.float32)
    with on_device(wide):
        launch(
            _outer_kernel, (strips, adapters, parts), partial, wide, narrow, c, rank, segment_rows, part,
            *((rank, 1) if by_column else (1, c)), wide if scale_inv is None else scale_inv, alpha,
            WHOLE=whole, FP8=scale_inv is not None, NATIVE=is_native(wide.device),
            ROWS=ROWS, COLUMNS=COLUMNS, RANK=grouped.padded(rank),
        )  # fmt: skip
        if not whole:
            _add_up(out, partial, scale_inv, alpha)
    return out


def gradients(dy: Tensor, up: Up) -> tuple[Tensor, Tensor]:
    """ds [M, R] and dB [J, N, R], scaled, of dy [M, N]; dB is empty without s."""
    lora_B, s, factor = up
    ds = down(dy, lora_B, True, factor)
    if s is None:
        return ds, dy.new_empty(0)
    return ds, outer(dy, s, len(lora_B), None, lora_B.dtype, factor, True)


def _add_up(out: Tensor, partial: Tensor, scale_inv: Tensor | None, alpha: float) -> None:
    n = out.numel()
    launch(
        _sum_kernel, (triton.cdiv(n, SUM_ELEMENTS),), out, partial, partial if scale_inv is None else scale_inv,
        alpha, n, partial.shape[0], SCALED=scale_inv is not None, ELEMENTS=SUM_ELEMENTS,
    )  # fmt: skip


def _part(size: int, step: int, blocks: int) -> int:
    """How much of `size` a program sums up, in whole steps, so that there are about PROGRAMS of them."""
    steps = triton.cdiv(size, step)
    parts = min(max(1, PROGRAMS // blocks), triton.cdiv(steps, 2))
    return triton.cdiv(steps, parts) * step
