# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel behind ops/quantize_blocks.py: a program takes ROWS rows of one block of 128 columns.

It reads x once and stores bytes and scale_inv, with the bits of `numerics.blocks.quantize_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels.triton.launch import launch as launch_kernel
from lorakernels.kernels.triton.launch import on_device
from lorakernels.kernels.triton.quantize import encode, is_native, scale_of_block
from lorakernels.numerics.blocks import BLOCK, blocks_of
from lorakernels.numerics.fp8 import FP8_MAX

ROWS = 32  # of a program


@triton.jit
def _quantize_blocks_kernel(
    x: tl.tensor,
    x8: tl.tensor,
    scale_inv: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    MOST: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (column < K)[None, :]
    offset = row.to(tl.int64)[:, None] * K + column[None, :]
    value = tl.load(x + offset, inside, other=0.0).to(tl.float32)
    bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    scale, inverse = scale_of_block(bits, MOST, POWER_OF_TWO)
    tl.store(x8 + offset, encode(value * scale[:, None], E5M2, NATIVE), inside)
    tl.store(scale_inv + block.to(tl.int64) * M + row, inverse, row < M)


def launch(
    x: Tensor, x8: Tensor, scale_inv: Tensor, fp8_dtype: torch.dtype, power_of_two: bool
) -> None:
    """Write `x8` uint8 [M, K] and `scale_inv` fp32 [⌈K/128⌉, M] of x [M, K], all contiguous and not empty."""
    rows, cols = x.shape
    with on_device(x):
        launch_kernel(
            _quantize_blocks_kernel,
            (triton.cdiv(rows, ROWS), blocks_of(cols)),
            x,
            x8,
            scale_inv,
            rows,
            cols,
            MOST=FP8_MAX[fp8_dtype],
            E5M2=fp8_dtype == torch.float8_e5m2,
            POWER_OF_TWO=power_of_two,
            NATIVE=is_native(x.device),
            ROWS=ROWS,
            BLOCK=BLOCK,
            num_warps=4,
        )
