# SPDX-License-Identifier: Apache-2.0
"""out₁ = x₁ cos₁ − x₂ sin₁, out₂ = x₂ cos₂ + x₁ sin₂ of q's and k's heads, and the way back, on CUDA.

qkv, dqkv [M, (H + 2 Hk) D], cos, sin [T, D]; dq [B, H, T, D], dk and dv [B, Hk, T, D] of any strides but the last. One
kernel each (triton/rope_qkv.py): forward in place over q and k, 4M(H + Hk)D bytes in bf16; backward gathers what
attention's backward left, turns q and k back and folds the weights' scale ratios in: 4M(H + 2 Hk)D bytes, where a
transposition, a rotation, a concatenation and a product apart move four times that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import checks_layer as checks
from lorakernels import reference_layer
from lorakernels.kernels.ladder import why_not_layer_kernel


def rope_qkv_(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> None:
    """`reference_layer.rope_qkv_`, bit for bit but for fused multiply-adds."""
    checks.rope_qkv(qkv, cos, sin, num_heads, num_kv_heads)
    arguments = (qkv, cos, sin, num_heads, num_kv_heads)
    if why_not_layer_kernel(qkv=qkv, cos=cos, sin=sin):
        return reference_layer.rope_qkv_(*arguments)
    from lorakernels.kernels.triton import rope_qkv

    with torch.cuda.device(qkv.device):
        rope_qkv.rope_qkv_(*arguments)


def rope_qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, multiplier: Tensor
) -> Tensor:
    """`reference_layer.rope_qkv_backward`, bit for bit but for fused multiply-adds."""
    checks.rope_qkv_backward(dq, dk, dv, cos, sin, multiplier)
    arguments = (dq, dk, dv, cos, sin, multiplier)
    if dq.numel() == 0 or why_not_layer_kernel(cos=cos, sin=sin, multiplier=multiplier):
        return reference_layer.rope_qkv_backward(*arguments)
    from lorakernels.kernels.triton import rope_qkv

    with torch.cuda.device(dq.device):
        return rope_qkv.rope_qkv_backward(*arguments)
