# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels behind ops/rms_norm.py: a row of K in registers, one read of it.

Of n programs, each takes every n-th row and keeps its amax until the end: few atomics meet at one address. The
weight is read again for every row, from L1, which frees registers; the next row is loaded while this one is summed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels import tune_layer as tune
from lorakernels.kernels.triton import quantize
from lorakernels.kernels.triton.launch import launch
from lorakernels.kernels.triton.quantize import (
    begin,
    begin_quantizing,
    encode,
    encode_in_blocks,
    leave_amax,
    magnitude,
    quantized,
)
from lorakernels.numerics.blocks import BLOCK as SCALED
from lorakernels.numerics.fp8 import E4M3
from lorakernels.values import Scaling

_SCALED = tl.constexpr(SCALED)  # columns of a block


@triton.jit(do_not_specialize=["M", "amax_at", "kept_at", "measured"])
def _rms_norm_quantize_kernel(
    normed: tl.tensor,
    x8: tl.tensor,
    scale_inv: tl.tensor,
    rstd: tl.tensor,
    state: tl.tensor,
    partials: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    amax_at: tl.tensor,
    kept_at: tl.tensor,
    measured: tl.tensor,
    MEASURE: tl.constexpr,
    KEEP: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DELAYED: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    PARTIALS: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
) -> None:
    dtype: tl.constexpr = x.dtype.element_ty
    VECTOR: tl.constexpr = 128 // dtype.primitive_bitwidth
    first, kept, scale = begin_quantizing(
        M, scale_inv, state, partials, kept_at, measured, MEASURE, QUANTIZE, DELAYED, FP8_MAX, PARTIALS, OVERLAP
    )  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < K
    step = tl.num_programs(0)
    step_at = tl.cast(step, tl.int64) * K
    M_wide = tl.cast(M, tl.int64)
    most = tl.zeros((BLOCK,), tl.float32)
    if PREFETCH:
        offset = tl.cast(first, tl.int64) * K + column
        ahead = tl.load(x + offset, column < tl.where(first < M, K, 0), other=0.0)
    for row in tl.range(first, M, step):
        offset = tl.cast(row, tl.int64) * K + column
        if PREFETCH:
            wide = ahead.to(tl.float32)
            more = column < tl.where(row + step < M, K, 0)
            ahead = tl.load(x + step_at + offset, more, other=0.0)
        else:
            wide = tl.load(x + offset, inside, other=0.0).to(tl.float32)
        w = tl.load(weight + column, inside, other=0.0)
        r = tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)
        h = (wide * r).to(dtype).to(tl.float32)
        n = (h * w.to(tl.float32)).to(dtype)
        if QUANTIZE:
            most = magnitude(most, n)
        if not MEASURE:
            tl.store(rstd + row, r)
            if KEEP:
                tl.store(normed + offset, n, inside)
            if QUANTIZE:
                offset = tl.max_contiguous(offset, VECTOR)
                tl.store(x8 + offset, encode(n.to(tl.float32) * scale, E5M2, NATIVE), inside)
            if IN_BLOCKS:
                offset = tl.max_contiguous(offset, VECTOR)
                blocks = tl.cdiv(K, _SCALED)
                bytes_ = encode_in_blocks(
                    n.to(tl.float32), scale_inv + row, M_wide, blocks, E5M2, NATIVE, FP8_MAX, POWER_OF_TWO
                )  # fmt: skip
                tl.store(x8 + offset, bytes_, inside)
    leave_amax(most, kept, state, partials, amax_at, MEASURE, DELAYED)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    scaling: Scaling | None,
    keep: bool,
    power_of_two: bool | None = None,
    config: tune.RowConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`ops.rms_norm_quantize` of what its `why_not_triton` has nothing against."""
    rows, cols = x.shape
    normed = x.new_empty(x.shape if keep else 0)
    rstd = x.new_empty(rows, dtype=torch.float32)
    target = quantized((rows, cols), x, scaling, E4M3, power_of_two)
    block = max(256, triton.next_power_of_2(cols))
    config = config or tune.norm_config(block)
    measured = quantize.measuring(rows, x.device)
    programs = min(rows, quantize.multiprocessors(x.device) * config.resident)
    for measure in (True, False) if target.quantizes else (False,):
        launch(
            _rms_norm_quantize_kernel,
            (measured if measure else programs,),
            normed,
            target.x8,
            target.scale_inv,
            rstd,
            target.state,
            target.partials,
            x,
            weight,
            eps,
            rows,
            cols,
            target.amax_at,
            target.kept_at,
            measured,
            MEASURE=measure,
            KEEP=keep and not measure,
            BLOCK=block,
            PREFETCH=config.prefetch,
            num_warps=config.num_warps,
            **target.constants,
            **target.options,
        )
    return normed, target.x8, target.scale_inv, rstd


@triton.jit(do_not_specialize=["M"])
def _rms_norm_backward_kernel(
    dx: tl.tensor,
    dnormed: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    rstd: tl.tensor,
    dresidual: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin(False, False, OVERLAP)
    column = tl.arange(0, BLOCK)
    inside = column < K
    first = tl.program_id(0)
    step = tl.num_programs(0)
    step_at = tl.cast(step, tl.int64) * K
    if PREFETCH:
        offset = tl.cast(first, tl.int64) * K + column
        d_ahead = tl.load(dnormed + offset, inside, other=0.0)
        x_ahead = tl.load(x + offset, inside, other=0.0)
    for row in tl.range(first, M, step):
        offset = tl.cast(row, tl.int64) * K + column
        if HAS_RESIDUAL:
            residual = tl.load(dresidual + offset, inside, other=0.0)
        if PREFETCH:
            d = d_ahead.to(tl.float32)
            wide = x_ahead.to(tl.float32)
            more = column < tl.where(row + step < M, K, 0)
            d_ahead = tl.load(dnormed + step_at + offset, more, other=0.0)
            x_ahead = tl.load(x + step_at + offset, more, other=0.0)
        else:
            d = tl.load(dnormed + offset, inside, other=0.0).to(tl.float32)
            wide = tl.load(x + offset, inside, other=0.0).to(tl.float32)
        g = d * tl.load(weight + column, inside, other=0.0).to(tl.float32)
        r = tl.load(rstd + row)
        h = wide * r
        result = r * (g - h * (tl.sum(g * h, 0) / K))
        if HAS_RESIDUAL:
            result += residual.to(tl.float32)
        tl.store(dx + offset, result.to(dx.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["M", "chunk"])
def _weight_grad_kernel(
    partial: tl.tensor,
    dnormed: tl.tensor,
    x: tl.tensor,
    rstd: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    chunk: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Columns of BLOCK, rows of a chunk, in steps of ROWS: one row of partial."""
    begin(False, False, OVERLAP)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, M)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for row0 in tl.range(first, last, ROWS):
        row = row0 + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & (column < K)[None, :]
        offset = row.to(tl.int64)[:, None] * K + column[None, :]
        d = tl.load(dnormed + offset, inside, other=0.0).to(tl.float32)
        r = tl.load(rstd + row, row < last, other=0.0)
        total += d * (tl.load(x + offset, inside, other=0.0).to(tl.float32) * r[:, None])
    to = partial + tl.program_id(1).to(tl.int64) * K + column
    tl.store(to, tl.sum(total, 0), column < K)


def _weight_grad(dnormed: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """dweight fp32 [K], summed in an order that depends on the shape and the GPU alone."""
    rows, cols = x.shape
    block = 256
    blocks = triton.cdiv(cols, block)
    chunks = max(1, min(triton.cdiv(rows, 16), 4 * quantize.multiprocessors(x.device) // blocks))
    chunk = triton.cdiv(triton.cdiv(rows, chunks), 16) * 16
    partial = x.new_empty(triton.cdiv(rows, chunk), cols, dtype=torch.float32)
    early = quantize.overlaps(x.device)
    launch(
        _weight_grad_kernel,
        (blocks, partial.shape[0]),
        partial,
        dnormed,
        x,
        rstd,
        rows,
        cols,
        chunk,
        ROWS=16,
        BLOCK=block,
        OVERLAP=early,
        num_warps=4,
        **quantize.launch_options(early),
    )
    return partial.sum(0)


def rms_norm_backward(
    dnormed: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dresidual: Tensor | None,
    weight_grad: bool,
    config: tune.RowConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """`ops.rms_norm_backward` of what its `why_not_triton_backward` has nothing against."""
    rows, cols = x.shape
    dx = x.new_empty(x.shape)
    block = max(256, triton.next_power_of_2(cols))
    config = config or tune.norm_backward_config(block)
    programs = min(rows, quantize.multiprocessors(x.device) * config.resident)
    early = quantize.overlaps(x.device)
    launch(
        _rms_norm_backward_kernel,
        (programs,),
        dx,
        dnormed,
        x,
        weight,
        rstd,
        dx if dresidual is None else dresidual,
        rows,
        cols,
        HAS_RESIDUAL=dresidual is not None,
        BLOCK=block,
        PREFETCH=config.prefetch,
        OVERLAP=early,
        num_warps=config.num_warps,
        **quantize.launch_options(early),
    )
    dweight = _weight_grad(dnormed, x, rstd) if weight_grad else rstd.new_empty(0)
    return dx, dweight
