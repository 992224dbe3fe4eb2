# SPDX-License-Identifier: Apache-2.0
"""x Wᵀ and dy W over FP8 operands on GPUs without FP8 tensor cores, such as A100.

Both operands are dequantized and rounded to the activations' dtype, and cuBLAS multiplies them with fp32 accumulation:
16 times fp32's peak on A100, and half of the scratch, 2 bytes a weight. Rounding to bf16 costs 2⁻⁸ of each operand,
a sixteenth of what FP8 itself took.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.reference import E4M3


def linear(
    x: Tensor, x_scale_inv: Tensor, weight: Tensor, weight_scale_inv: Tensor, dtype: torch.dtype
) -> Tensor:
    """x Wᵀ [M, N] in `dtype`, bf16 or fp16; x [M, K] and W [N, K] e4m3, W's scale [1] or [N]."""
    w = _dequantized(weight, weight_scale_inv.view(-1, 1), E4M3, dtype)
    return _dequantized(x, x_scale_inv, E4M3, dtype) @ w.t()


def grad_input(
    dy: Tensor,
    dy_scale_inv: Tensor,
    fp8_dtype: torch.dtype,
    weight: Tensor,
    weight_scale_inv: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """dy W [M, K] in `dtype`, bf16 or fp16; dy [M, N] `fp8_dtype`, W [N, K] e4m3."""
    w = _dequantized(weight, weight_scale_inv.view(-1, 1), E4M3, dtype)
    return _dequantized(dy, dy_scale_inv, fp8_dtype, dtype) @ w


def _dequantized(
    x: Tensor, scale_inv: Tensor, fp8_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Rounded once: the product with the scale is fp32's."""
    return (x.view(fp8_dtype).float() * scale_inv).to(dtype)
