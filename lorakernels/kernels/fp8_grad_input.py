# SPDX-License-Identifier: Apache-2.0
"""dx = dy W + mask ⊙ (ds A) / (1 − p) on CUDA.

dy [M, N] e5m2 or e4m3, W [N, K] e4m3, ds [M, R], A [R, K], dx [M, K]. Hopper's FP8 GEMM reads K-major
operands only, so the product needs Wᵀ [K, N]: `weight_t` where the layer keeps it, otherwise a transposed
copy made for this call. Split accumulation, as Transformer Engine's dgrad. Other operands go to reference.py
(`ladder.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import reference
from lorakernels.device import capability_of
from lorakernels.kernels.ladder import takes_cublaslt
from lorakernels.kernels.product import product


def fp8_grad_input(
    dy: Tensor,
    dy_scale_inv: Tensor | None,
    fp8_dtype: torch.dtype,
    weight: Tensor,
    weight_scale_inv: Tensor | None,
    weight_t: Tensor | None,
    ds: Tensor | None,
    lora_A: Tensor | None,
    slot: Tensor | None,
    p: float,
    site: int,
    out_dtype: torch.dtype,
    row0: int = 0,
    col0: int = 0,
) -> Tensor:
    """`reference.fp8_grad_input` on the tensor cores."""
    dx = _base(dy, dy_scale_inv, fp8_dtype, weight, weight_scale_inv, weight_t, out_dtype)
    if ds is None or lora_A is None:
        return dx
    a = lora_A.to(out_dtype)
    if slot is None or reference.dropout_threshold(p) == 0:
        return dx.addmm_(ds.to(out_dtype), a)
    branch = product(ds.to(out_dtype), a, reference.keep_scale(p))
    keep = reference.drawn_mask(slot, p, site, dx.shape[0], dx.shape[1], row0, col0)
    return dx.add_(branch.where(keep, 0.0))


def _base(
    dy: Tensor,
    dy_scale_inv: Tensor | None,
    fp8_dtype: torch.dtype,
    weight: Tensor,
    weight_scale_inv: Tensor | None,
    weight_t: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """dy W in `out_dtype`."""
    if dy_scale_inv is None or weight_scale_inv is None:
        return dy @ weight.to(dy.dtype)
    n, k = weight.shape
    if takes_cublaslt(capability_of(dy.device), dy.shape[0], k, n):
        plain = (None, None, None, None, 0.0, 0, out_dtype)
        return reference.fp8_grad_input(
            dy, dy_scale_inv, fp8_dtype, weight, weight_scale_inv, *plain
        )
    wt = reference.transpose_fp8(weight) if weight_t is None else weight_t
    return torch._scaled_mm(
        dy.view(fp8_dtype),
        wt.view(reference.E4M3).t(),
        scale_a=dy_scale_inv,
        scale_b=weight_scale_inv,
        out_dtype=out_dtype,
        use_fast_accum=False,
    )
