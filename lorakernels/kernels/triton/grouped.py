# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels behind the ops of groups of rows: what goes before and after the products with FP8 weights.

A program takes rows of one group, or all rows of a group and some of its columns. Sums over rows run in the rows'
order, so that they do not depend on how programs are scheduled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels.triton.launch import launch, on_device
from lorakernels.kernels.triton.quantize import (
    decode_e4m3,
    encode,
    is_native,
    magnitude,
    magnitude_bits,
    raise_amax,
    scale_of_bits,
)
from lorakernels.numerics.fp8 import E4M3, FP8_MAX
from lorakernels.numerics.groups import GROUP_ROWS
from lorakernels.values import Groups, Scaling

DOWN_ROWS, DOWN_COLUMNS = 32, 128
GRAD_ROWS = 32
SUM_COLUMNS = 1024
LEAST_RANK = 16  # of the tensor cores
MOST_RANK = 128
_GROUP_ROWS = tl.constexpr(GROUP_ROWS)


@triton.jit
def _amax_kernel(
    amaxes: tl.tensor,
    x: tl.tensor,
    rows: tl.tensor,
    group_of: tl.tensor,
    ends: tl.tensor,
    kept: tl.tensor,
    C: tl.tensor,
    DELAYED: tl.constexpr,
    GATHERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """The amax of every group that has no scale."""
    first = tl.program_id(0) * ROWS
    group = tl.load(group_of + first // _GROUP_ROWS)
    if group >= 0:
        current = 0.0
        if DELAYED:
            current = tl.load(kept + group)
        if not current > 0.0:
            row = first + tl.arange(0, ROWS)
            if GATHERS:
                source = tl.load(rows + row)
                inside = source >= 0
            else:
                source = row
                inside = row < tl.load(ends + group)
            most = tl.zeros((ROWS, COLUMNS), tl.float32)
            for column in tl.range(0, C, COLUMNS):
                c = column + tl.arange(0, COLUMNS)
                both = inside[:, None] & (c < C)[None, :]
                value = tl.load(x + source.to(tl.int64)[:, None] * C + c[None, :], both, other=0.0)
                most = magnitude(most, value)
            raise_amax(amaxes + group, magnitude_bits(tl.reshape(most, (ROWS * COLUMNS,))))


@triton.jit
def _scale(
    amaxes: tl.tensor,
    kept: tl.tensor,
    group: tl.tensor,
    DELAYED: tl.constexpr,
    FP8_MAX: tl.constexpr,
) -> tl.tensor:
    scale = 0.0
    if DELAYED:
        scale = tl.load(kept + group)
    if not scale > 0.0:
        scale = scale_of_bits(tl.load(amaxes + group), FP8_MAX)
    return scale


@triton.jit
def _scales(
    scale_inv: tl.tensor,
    amaxes: tl.tensor,
    kept: tl.tensor,
    G: tl.tensor,
    DELAYED: tl.constexpr,
    FP8_MAX: tl.constexpr,
) -> None:
    """Each group's scale_inv, also of groups without rows."""
    for g in tl.range(tl.program_id(0), G, tl.num_programs(0)):
        scale = _scale(amaxes, kept, g, DELAYED, FP8_MAX)
        tl.store(scale_inv + g, tl.div_rn(tl.full((), 1.0, tl.float32), scale))


@triton.jit
def _down_kernel(
    x8: tl.tensor,
    scale_inv: tl.tensor,
    s: tl.tensor,
    x: tl.tensor,
    rows: tl.tensor,
    group_of: tl.tensor,
    lora_A: tl.tensor,
    amaxes: tl.tensor,
    kept: tl.tensor,
    recorded: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    G: tl.tensor,
    DELAYED: tl.constexpr,
    NATIVE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ADAPTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
) -> None:
    """x8 and s = x A_gᵀ, of ROWS rows. They are copies of the rows of x that `rows` names."""
    _scales(scale_inv, amaxes, kept, G, DELAYED, FP8_MAX)
    first = tl.program_id(0) * ROWS
    group = tl.load(group_of + first // _GROUP_ROWS)
    if group >= 0:
        scale = _scale(amaxes, kept, group, DELAYED, FP8_MAX)
        row = first + tl.arange(0, ROWS)
        source = tl.load(rows + row)
        inside = source >= 0
        rank = tl.arange(0, RANK)
        total = tl.zeros((ROWS, RANK), tl.float32)
        most = tl.zeros((ROWS, COLUMNS), tl.float32)
        A = lora_A + group.to(tl.int64) * R * K
        for column in tl.range(0, K, COLUMNS):
            k = column + tl.arange(0, COLUMNS)
            there = (k < K)[None, :]
            from_ = source.to(tl.int64)[:, None] * K + k[None, :]
            value = tl.load(x + from_, inside[:, None] & there, other=0.0)
            wide = value.to(tl.float32)
            most = magnitude(most, wide)
            to = row.to(tl.int64)[:, None] * K + k[None, :]
            tl.store(x8 + to, encode(wide * scale, False, NATIVE), there)
            if ADAPTED:
                a = tl.load(
                    A + rank[:, None] * K + k[None, :], (rank < R)[:, None] & there, other=0.0
                )
                total = tl.dot(value, tl.trans(a.to(value.dtype)), total)
        if DELAYED:
            raise_amax(recorded + group, magnitude_bits(tl.reshape(most, (ROWS * COLUMNS,))))
        if ADAPTED:
            out = row.to(tl.int64)[:, None] * R + rank[None, :]
            total = tl.where(inside[:, None], total, 0.0)
            tl.store(s + out, total.to(s.dtype.element_ty), (rank < R)[None, :])


@triton.jit
def _grad_kernel(
    dy8: tl.tensor,
    scale_inv: tl.tensor,
    partial: tl.tensor,
    dB: tl.tensor,
    dy: tl.tensor,
    lora_B: tl.tensor,
    s: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    amaxes: tl.tensor,
    kept: tl.tensor,
    recorded: tl.tensor,
    scaling: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    R: tl.tensor,
    G: tl.tensor,
    DELAYED: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ADAPTED: tl.constexpr,
    TRAINS_B: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
) -> None:
    """dy8, dy B_g of these columns alone, and dB_g, of COLUMNS columns of a group's rows."""
    strip, group = tl.program_id(0), tl.program_id(1)
    if group == 0:
        _scales(scale_inv, amaxes, kept, G, DELAYED, FP8_MAX)
    start, end = tl.load(starts + group), tl.load(ends + group)
    scale = _scale(amaxes, kept, group, DELAYED, FP8_MAX)
    n = strip * COLUMNS + tl.arange(0, COLUMNS)
    there = n < N
    rank = tl.arange(0, RANK)
    some = there[:, None] & (rank < R)[None, :]
    B_at = group.to(tl.int64) * N * R + n.to(tl.int64)[:, None] * R + rank[None, :]
    if ADAPTED:
        b = tl.load(lora_B + B_at, some, other=0.0).to(dy.dtype.element_ty)
    sums = tl.zeros((COLUMNS, RANK), tl.float32)
    most = tl.zeros((ROWS, COLUMNS), tl.float32)
    last = start + (end - start + _GROUP_ROWS - 1) // _GROUP_ROWS * _GROUP_ROWS
    for row in tl.range(start, last, ROWS):
        m = row + tl.arange(0, ROWS)
        offset = m.to(tl.int64)[:, None] * N + n[None, :]
        value = tl.load(dy + offset, (m < end)[:, None] & there[None, :], other=0.0)
        wide = value.to(tl.float32)
        most = magnitude(most, wide)
        tl.store(dy8 + offset, encode(wide * scale, E5M2, NATIVE), there[None, :])
        if ADAPTED:
            out = (strip.to(tl.int64) * M + m)[:, None] * R + rank[None, :]
            down = tl.where((m < end)[:, None], tl.dot(value, b) * scaling, 0.0)
            tl.store(partial + out, down, (rank < R)[None, :])
            if TRAINS_B:
                down_rows = tl.load(
                    s + m.to(tl.int64)[:, None] * R + rank[None, :],
                    (m < end)[:, None] & (rank < R)[None, :],
                    other=0.0,
                )
                sums = tl.dot(tl.trans(value), down_rows, sums)
    if DELAYED:
        raise_amax(recorded + group, magnitude_bits(tl.reshape(most, (ROWS * COLUMNS,))))
    if TRAINS_B:
        tl.store(dB + B_at, (sums * scaling).to(dB.dtype.element_ty), some)


@triton.jit
def _grad_a_kernel(
    dA: tl.tensor,
    ds: tl.tensor,
    x8: tl.tensor,
    x_scale_inv: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
) -> None:
    """dA_g of COLUMNS columns."""
    group = tl.program_id(1)
    start, end = tl.load(starts + group), tl.load(ends + group)
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = k < K
    rank = tl.arange(0, RANK)
    total = tl.zeros((RANK, COLUMNS), tl.float32)
    for row in tl.range(start, end, ROWS):
        m = row + tl.arange(0, ROWS)
        inside = (m < end)[:, None]
        byte = tl.load(
            x8 + m.to(tl.int64)[:, None] * K + k[None, :], inside & there[None, :], other=0
        )
        ds_rows = tl.load(
            ds + m.to(tl.int64)[:, None] * R + rank[None, :],
            inside & (rank < R)[None, :],
            other=0.0,
        )
        value = decode_e4m3(byte, NATIVE).to(ds_rows.dtype)
        total = tl.dot(tl.trans(ds_rows), value, total)
    total *= tl.load(x_scale_inv + group)
    offset = group.to(tl.int64) * R * K + rank.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(dA + offset, total.to(dA.dtype.element_ty), (rank < R)[:, None] & there[None, :])


@triton.jit
def _sum_kernel(
    out: tl.tensor,
    y: tl.tensor,
    place: tl.tensor,
    weights: tl.tensor,
    N: tl.tensor,
    J: tl.tensor,
    WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.range(0, J):
        row = tl.load(place + token * J + j)
        if row >= 0:
            value = tl.load(y + row.to(tl.int64) * N + n, n < N, other=0.0).to(tl.float32)
            if WEIGHTED:
                value *= tl.load(weights + token * J + j).to(tl.float32)
            total += value
    tl.store(out + token.to(tl.int64) * N + n, total.to(out.dtype.element_ty), n < N)


@triton.jit
def _spread_kernel(
    dy: tl.tensor,
    dweights: tl.tensor,
    dout: tl.tensor,
    y: tl.tensor,
    place: tl.tensor,
    weights: tl.tensor,
    N: tl.tensor,
    J: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    for j in tl.range(0, J):
        row = tl.load(place + token * J + j).to(tl.int64)
        weight = tl.load(weights + token * J + j).to(tl.float32)
        total = tl.zeros((COLUMNS,), tl.float32)
        if row >= 0:
            for column in tl.range(0, N, COLUMNS):
                n = column + tl.arange(0, COLUMNS)
                value = tl.load(dout + token.to(tl.int64) * N + n, n < N, other=0.0).to(tl.float32)
                total += value * tl.load(y + row * N + n, n < N, other=0.0).to(tl.float32)
                tl.store(dy + row * N + n, (value * weight).to(dy.dtype.element_ty), n < N)
        tl.store(dweights + token * J + j, tl.sum(total, 0).to(dweights.dtype.element_ty))


def quantize_down(
    out: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    rows: Tensor,
    groups: Groups,
    lora_A: Tensor | None,
    scaling: Scaling,
) -> None:
    """Write x8 uint8 [M, K], scale_inv fp32 [G] and s [M, R] of the rows `rows` int32 [M] of x, all contiguous."""
    x8, scale_inv, s = out
    (m, k), g = x8.shape, len(groups.ends)
    rank = 0 if lora_A is None else lora_A.shape[1]
    amaxes, kept, recorded = _places(scaling, g)
    common = {"DELAYED": scaling.delayed, "ROWS": DOWN_ROWS, "COLUMNS": DOWN_COLUMNS}
    grid = (m // DOWN_ROWS,)
    with on_device(x):
        launch(
            _amax_kernel,
            grid,
            amaxes,
            x,
            rows,
            groups.group_of,
            groups.ends,
            kept,
            k,
            GATHERS=True,
            **common,
        )
        launch(
            _down_kernel, grid, x8, scale_inv, s, x, rows, groups.group_of, x if lora_A is None else lora_A,
            amaxes, kept, recorded, k, rank, g,
            NATIVE=is_native(x.device), FP8_MAX=FP8_MAX[E4M3], ADAPTED=rank > 0, RANK=padded(rank), **common,
        )  # fmt: skip


def quantize_grad(
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    dy: Tensor,
    groups: Groups,
    factors: tuple[Tensor | None, Tensor | None, float],
    scaling: Scaling,
    fp8_dtype: torch.dtype,
) -> None:
    """Write dy8 uint8 [M, N], scale_inv fp32 [G], ds [M, R] and dB [G, N, R]; `factors`: B [G, N, R], s and scaling."""
    dy8, scale_inv, ds, dB = out
    lora_B, s, factor = factors
    (m, n), g = dy.shape, len(groups.ends)
    rank = 0 if lora_B is None else lora_B.shape[2]
    columns = grad_columns(n, rank)
    strips = triton.cdiv(n, columns)
    amaxes, kept, recorded = _places(scaling, g)
    partial = dy.new_empty((strips, m, rank), dtype=torch.float32)
    absent = dy
    with on_device(dy):
        launch(
            _amax_kernel, (m // DOWN_ROWS,), amaxes, dy, groups.ends, groups.group_of, groups.ends, kept, n,
            DELAYED=scaling.delayed, GATHERS=False, ROWS=DOWN_ROWS, COLUMNS=DOWN_COLUMNS,
        )  # fmt: skip
        launch(
            _grad_kernel, (strips, g), dy8, scale_inv, partial, dB, dy,
            absent if lora_B is None else lora_B, absent if s is None else s,
            groups.starts, groups.ends, amaxes, kept, recorded, factor, m, n, rank, g,
            DELAYED=scaling.delayed, E5M2=fp8_dtype == torch.float8_e5m2, NATIVE=is_native(dy.device),
            FP8_MAX=FP8_MAX[fp8_dtype], ADAPTED=rank > 0, TRAINS_B=s is not None,
            ROWS=GRAD_ROWS, COLUMNS=columns, RANK=padded(rank), num_warps=8,
        )  # fmt: skip
    if rank:
        ds.copy_(partial.sum(0))


def grad_columns(n: int, rank: int) -> int:
    """How many columns of dy a program takes: many, for few partial sums, but enough programs."""
    most = 256 if rank <= 32 else 128
    return most if n >= 16 * most else 128


def grad_a(dA: Tensor, ds: Tensor, x8: Tensor, x_scale_inv: Tensor, groups: Groups) -> None:
    """Write dA [G, R, K] of ds [M, R] and x8 uint8 [M, K] with scale_inv fp32 [G]."""
    g, rank, k = dA.shape
    columns = 128
    with on_device(x8):
        launch(
            _grad_a_kernel, (triton.cdiv(k, columns), g), dA, ds, x8, x_scale_inv, groups.starts, groups.ends, k, rank,
            NATIVE=is_native(x8.device), ROWS=64, COLUMNS=columns, RANK=padded(rank),
        )  # fmt: skip


def weighted_sum(out: Tensor, y: Tensor, place: Tensor, weights: Tensor | None) -> None:
    """Write out [T, N] from rows of y [M, N]."""
    tokens, n = out.shape
    columns = min(SUM_COLUMNS, triton.next_power_of_2(n))
    with on_device(y):
        launch(
            _sum_kernel, (tokens, triton.cdiv(n, columns)), out, y, place, place if weights is None else weights,
            n, place.shape[1], WEIGHTED=weights is not None, COLUMNS=columns,
        )  # fmt: skip


def spread(
    out: tuple[Tensor, Tensor], dout: Tensor, y: Tensor, place: Tensor, weights: Tensor
) -> None:
    """Write dy [M, N], the rows that are somebody's, and dweights [T, J]."""
    dy, dweights = out
    tokens, n = dout.shape
    columns = min(SUM_COLUMNS, triton.next_power_of_2(n))
    with on_device(y):
        launch(
            _spread_kernel, (tokens,), dy, dweights, dout, y, place, weights, n, place.shape[1], COLUMNS=columns
        )  # fmt: skip


def _places(scaling: Scaling, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """int32 zeros [G] for fresh amaxes, and the groups' scales and amaxes in the FP8 state."""
    state, column, _ = scaling
    columns = slice(column, column + groups)
    return state.new_zeros(groups, dtype=torch.int32), state[-1, columns], state[0, columns]


def padded(rank: int) -> int:
    """Columns of a tile that holds `rank` ones."""
    return max(LEAST_RANK, triton.next_power_of_2(rank))
