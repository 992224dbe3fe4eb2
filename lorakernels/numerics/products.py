# SPDX-License-Identifier: Apache-2.0
"""Products with fp32 accumulation: one rounding on the tensor cores, FP8 operands dequantized, and blocks side by side.

Without FP8 tensor cores, as on A100, both FP8 operands are dequantized and rounded to the activations' dtype. cuBLAS
then multiplies them with fp32 accumulation: 16 times fp32's peak on A100, and half of the scratch, 2 bytes a weight.
Rounding to bf16 costs 2⁻⁸ of each operand, a sixteenth of what FP8 itself took.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.numerics.fp8 import E4M3
from lorakernels.values import Scaled, SideBySide, Weight


def product(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha · a b, [M, K] × [K, N] of one dtype; cuBLAS multiplies alpha before it rounds."""
    out = a.new_empty(a.shape[0], b.shape[1])
    return torch.addmm(out, a, b, beta=0.0, alpha=alpha)


def dequantized_linear(x: Scaled, weight: Weight, dtype: torch.dtype) -> Tensor:
    """x Wᵀ [M, N] in `dtype`, bf16 or fp16; x [M, K] and W [N, K] e4m3, W's scale [1] or [N]."""
    return _dequantized(x, E4M3, dtype) @ _dequantized_weight(weight, dtype).t()


def dequantized_grad_input(
    dy: Scaled, fp8_dtype: torch.dtype, weight: Weight, dtype: torch.dtype
) -> Tensor:
    """dy W [M, K] in `dtype`, bf16 or fp16; dy [M, N] `fp8_dtype`, W [N, K] e4m3."""
    return _dequantized(dy, fp8_dtype, dtype) @ _dequantized_weight(weight, dtype)


def _dequantized_weight(weight: Weight, dtype: torch.dtype) -> Tensor:
    assert weight.scale_inv is not None
    return _dequantized(Scaled(weight.data, weight.scale_inv.view(-1, 1)), E4M3, dtype)


def _dequantized(x: Scaled, fp8_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Rounded once: the product with the scale is fp32's."""
    assert x.scale_inv is not None
    return (x.data.view(fp8_dtype).float() * x.scale_inv).to(dtype)


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
