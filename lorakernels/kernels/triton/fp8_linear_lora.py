# SPDX-License-Identifier: Apache-2.0
"""Triton's kernel of ops/fp8_linear_lora.py: y = x Wᵀ · (sx sw) + bias + scaling · s Bᵀ + residual, rounded once.

x [M, K] and W [N, K] are e4m3. W has one scale, or one for each row. s [M, R] is bf16 or fp16; B [N, R] and bias [N]
are of any floating type. residual and y [M, N] are of one type. TMA reads x, W and residual.
The FP8 product stays in fp32 registers. B is rounded to s's dtype on the way into shared memory. bf16 or fp16 MMAs add
s Bᵀ after the FP8 steps, because Hopper's FP8 MMA drops low bits of what it adds to. So that the adapter's
terms are not rounded again, the accumulator is multiplied by sx sw / scaling before them and by scaling after them.

One program per multiprocessor walks over the tiles. Tile and contraction are two loops, not one flattened loop. With a
second wgmma inside the pipelined loop, ptxas 12.8 and 13.0 serialize every FP8 wgmma in it (their note C7515). At
M = N = K = 8192 on an H200 that takes 0.98 ms instead of 0.81.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lorakernels.kernels import tune
from lorakernels.kernels.triton.launch import TRITON_DTYPE
from lorakernels.kernels.triton.launch import launch as launch_kernel
from lorakernels.numerics.fp8 import E4M3
from lorakernels.values import Scaled, Up, Weight


@triton.jit
def _load_rows(
    base: tl.tensor,
    row0: tl.tensor,
    rows: tl.tensor,
    r0: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """Columns r0 … r0 + STEP of rows row0 … row0 + BLOCK of a contiguous [rows, RANK], zero outside."""
    row = tl.arange(0, BLOCK)
    column = r0 + tl.arange(0, STEP)
    inside = tl.broadcast_to((row < rows - row0)[:, None], (BLOCK, STEP))
    if RANK % STEP != 0:
        inside = inside & (column < RANK)[None, :]
    return tl.load(
        base + row0.to(tl.int64) * RANK + row[:, None] * RANK + column[None, :], inside, other=0
    )


@triton.jit
def _halves(tile: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """[M, N] → its left and right half."""
    parts = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return tl.split(tl.permute(parts, (0, 2, 1)))


@triton.jit(do_not_specialize=["M"])
def _fp8_linear_lora_kernel(
    y_tiles: tl.tensor_descriptor,
    x_tiles: tl.tensor_descriptor,
    w_tiles: tl.tensor_descriptor,
    residual_tiles: tl.tensor_descriptor,
    s_bits: tl.tensor,
    b_bits: tl.tensor,
    bias: tl.tensor,
    x_scale_inv: tl.tensor,
    w_scale_inv: tl.tensor,
    scaling: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SCALE_PER_ROW: tl.constexpr,
    S_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """s and B come as integers: registers hold them during the loop, and they go to shared memory after it."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps_k = tl.cdiv(K, BLOCK_K)
    scale = tl.load(x_scale_inv)
    if not SCALE_PER_ROW:
        scale *= tl.load(w_scale_inv)
    PREFETCH: tl.constexpr = RANK > 0 and RANK <= STEP
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tiles_in_group = GROUP * tiles_n
        first = tile // tiles_in_group * GROUP
        rows_in_group = tl.minimum(tiles_m - first, GROUP)
        m0 = (first + tile % tiles_in_group % rows_in_group) * BLOCK_M
        n0 = tile % tiles_in_group // rows_in_group * BLOCK_N
        column = tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            bias_row = tl.load(bias + n0 + column, column < N - n0, other=0.0)
        if SCALE_PER_ROW:
            w_scales = tl.load(w_scale_inv + n0 + column, column < N - n0, other=0.0)
        if PREFETCH:
            s_int = _load_rows(s_bits, m0, M, 0, BLOCK_M, RANK, STEP)
            b_int = _load_rows(b_bits, n0, N, 0, BLOCK_N, RANK, STEP)

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(0, steps_k):
            x = x_tiles.load([m0, step * BLOCK_K])
            w = w_tiles.load([n0, step * BLOCK_K])
            acc = tl.dot(x, w.T, acc)

        factor = scale
        if SCALE_PER_ROW:
            acc *= (w_scales * (scale / scaling))[None, :]
            factor = scaling
        elif RANK > 0:
            acc *= scale / scaling
            factor = scaling
        if RANK > 0:
            for r0 in tl.static_range(0, RANK, STEP):
                if not PREFETCH:
                    s_int = _load_rows(s_bits, m0, M, r0, BLOCK_M, RANK, STEP)
                    b_int = _load_rows(b_bits, n0, N, r0, BLOCK_N, RANK, STEP)
                s = s_int.to(S_DTYPE, bitcast=True).to(DOT_DTYPE)
                b = b_int.to(B_DTYPE, bitcast=True).to(S_DTYPE).to(DOT_DTYPE)
                acc = tl.dot(s, b.T, acc)
        y0, y1 = _halves(acc)
        y0 *= factor
        y1 *= factor
        if HAS_BIAS:
            pair = tl.permute(tl.reshape(bias_row.to(tl.float32), (2, BLOCK_N // 2)), (1, 0))
            bias0, bias1 = tl.split(pair)
            y0 += bias0[None, :]
            y1 += bias1[None, :]
        if HAS_RESIDUAL:
            y0 += residual_tiles.load([m0, n0]).to(tl.float32)
        y_tiles.store([m0, n0], y0.to(y_tiles.dtype))
        if HAS_RESIDUAL:
            y1 += residual_tiles.load([m0, n0 + BLOCK_N // 2]).to(tl.float32)
        y_tiles.store([m0, n0 + BLOCK_N // 2], y1.to(y_tiles.dtype))


def launch(
    y: Tensor,
    x: Scaled,
    weight: Weight,
    bias: Tensor | None,
    up: Up | None,
    config: tune.KernelConfig,
    programs: int,
    residual: Tensor | None = None,
) -> None:
    """Write y, with at most one of `programs` for each tile. The op's `why_not_triton_kernel` took the operands."""
    m, n = y.shape
    s: Tensor | None = None
    lora_B: Tensor | None = None
    scaling = 1.0
    if up is not None and up.s is not None and up.scaling != 0.0:
        lora_B, s, scaling = up
    assert weight.scale_inv is not None
    rank = 0 if s is None else s.shape[1]
    s_dtype = TRITON_DTYPE[torch.bfloat16 if s is None else s.dtype]
    interpreted = not y.is_cuda  # there, bf16 operands of tl.dot are read as integers
    launch_kernel(
        _fp8_linear_lora_kernel,
        (programs,),
        TensorDescriptor.from_tensor(y, [config.block_m, config.block_n // 2]),
        _tiles(x.data, config.block_m, config.block_k),
        _tiles(weight.data, config.block_n, config.block_k),
        TensorDescriptor.from_tensor(
            y if residual is None else residual, [config.block_m, config.block_n // 2]
        ),
        _bits(s, y),
        _bits(lora_B, y),
        y if bias is None else bias,
        x.scale_inv,
        weight.scale_inv,
        scaling if rank else 1.0,
        m,
        n,
        x.data.shape[1],
        RANK=rank,
        STEP=tune.rank_step(rank),
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        SCALE_PER_ROW=weight.scale_inv.numel() > 1,
        S_DTYPE=s_dtype,
        B_DTYPE=s_dtype if lora_B is None else TRITON_DTYPE[lora_B.dtype],
        DOT_DTYPE=tl.float32 if interpreted else s_dtype,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=config.group,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _tiles(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix.view(E4M3), [rows, columns])


def _bits(matrix: Tensor | None, unused: Tensor) -> Tensor:
    """The same memory as integers; `unused` where there is none, since a kernel's pointer must point somewhere."""
    if matrix is None:
        return unused
    return matrix.view(torch.int32 if matrix.element_size() == 4 else torch.int16)
