# SPDX-License-Identifier: Apache-2.0
"""Products with fp32 accumulation: one rounding on the tensor cores, FP8 operands dequantized, and blocks side by side.

Scales are one for a tensor, one for each row of a weight, or one for each block (numerics/blocks.py).

Without FP8 tensor cores, as on A100, both FP8 operands are dequantized and rounded to the activations' dtype. cuBLAS
then multiplies them with fp32 accumulation: 16 times fp32's peak on A100, and half of the scratch, 2 bytes a weight.
Rounding to bf16 costs 2⁻⁸ of each operand, a sixteenth of what FP8 itself took.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.numerics.blocks import dequantize_rows, dequantize_weight_blocks, in_blocks
from lorakernels.numerics.fp8 import E4M3, dequantize
from lorakernels.values import Scaled, SideBySide, Weight


def product(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha · a b, [M, K] × [K, N] of one dtype; cuBLAS multiplies alpha before it rounds."""
    out = a.new_empty(a.shape[0], b.shape[1])
    return torch.addmm(out, a, b, beta=0.0, alpha=alpha)


def dequantized_linear(x: Scaled, weight: Weight, dtype: torch.dtype) -> Tensor:
    """x Wᵀ [M, N] in `dtype`; x [M, K] and W [N, K] e4m3."""
    return dequantized(x, E4M3, dtype) @ dequantized_weight(weight, dtype).t()


def dequantized_grad_input(
    dy: Scaled, fp8_dtype: torch.dtype, weight: Weight, dtype: torch.dtype
) -> Tensor:
    """dy W [M, K] in `dtype`; dy [M, N] `fp8_dtype`, W [N, K] e4m3."""
    return dequantized(dy, fp8_dtype, dtype) @ dequantized_weight(weight, dtype)


def dequantized(
    x: Scaled, fp8_dtype: torch.dtype = E4M3, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[M, K] in `dtype` of a plain operand, or of bytes of `fp8_dtype`. The product with the scale is rounded once."""
    if in_blocks(x):
        return dequantize_rows(x, fp8_dtype, dtype)
    return dequantize(x, fp8_dtype).to(dtype)


def dequantized_weight(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, K] in `dtype` of a plain weight, or of e4m3 bytes. The product with the scale is rounded once."""
    if in_blocks(weight):
        return dequantize_weight_blocks(weight, dtype)
    of_rows = None if weight.scale_inv is None else weight.scale_inv.view(-1, 1)
    return dequantize(Scaled(weight.data, of_rows)).to(dtype)


def adapter_places(
    side: SideBySide | None, compact: bool = False
) -> list[tuple[int, tuple[slice, slice]]]:
    """For each projection with R_i > 0: i, its N_i, and its R_i of the ΣR side by side; `compact`: of one R for all.

    Without `side` there is one projection, which has everything.
    """
    if side is None:
        return [(0, (slice(None), slice(None)))]
    places, row, rank = [], 0, 0
    for i, (n, r) in enumerate(zip(*side, strict=True)):
        if r:
            places.append((i, (slice(row, row + n), slice(rank, rank + r))))
        row, rank = row + n, rank + (0 if compact else r)
    return places
