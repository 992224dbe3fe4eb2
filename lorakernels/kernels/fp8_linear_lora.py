# SPDX-License-Identifier: Apache-2.0
"""y = x Wᵀ + bias + scaling · s Bᵀ on CUDA.

x [M, K] e4m3, W [N, K] e4m3, s [M, R], B [N, R], y [M, N]. One Triton kernel (fp8_linear_lora_triton.py) adds
everything in fp32 registers and rounds y once. What it cannot take is multiplied by cuBLASLt (`torch._scaled_mm`, fast
accumulation as Transformer Engine's forward), and the bias and the LoRA term, a second, rank-sized product added in
fp32 inside `addmm`, come after it: y is rounded up to three times. A plain base is one product in x's dtype; FP8 sizes
that cuBLASLt does not take are multiplied in fp32 (reference.py). `ladder.py` says which and why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import reference
from lorakernels.device import capability_of, multiprocessors_of
from lorakernels.kernels import tuning
from lorakernels.kernels.ladder import takes_cublaslt, why_not_triton_gemm


def fp8_linear_lora(
    x: Tensor,
    x_scale_inv: Tensor | None,
    weight: Tensor,
    weight_scale_inv: Tensor | None,
    bias: Tensor | None,
    s: Tensor | None,
    lora_B: Tensor | None,
    scaling: float,
    out_dtype: torch.dtype,
    split: bool = False,
) -> Tensor:
    """`reference.fp8_linear_lora` on the tensor cores."""
    if (
        x_scale_inv is None
        or weight_scale_inv is None
        or why_not_triton_gemm(x, weight, bias, s, lora_B, scaling, out_dtype, split)
    ):
        base = (x, x_scale_inv, weight, weight_scale_inv)
        return _unfused(*base, bias, s, lora_B, scaling, out_dtype, split)
    from lorakernels.kernels.fp8_linear_lora_triton import launch

    capability = capability_of(x.device)
    (m, k), n = x.shape, weight.shape[0]
    y = torch.empty(m, n, dtype=out_dtype, device=x.device)
    problem = tuning.Problem(m, n, k, 0 if s is None else s.shape[1])
    multiprocessors = multiprocessors_of(x.get_device())
    config = tuning.choose(problem, capability, multiprocessors)
    programs = tuning.programs(config, problem, multiprocessors)
    with torch.cuda.device(x.device):
        launch(
            y,
            x,
            x_scale_inv,
            weight,
            weight_scale_inv,
            bias,
            s,
            lora_B,
            scaling,
            config,
            programs,
        )
    return y


def _unfused(
    x: Tensor,
    x_scale_inv: Tensor | None,
    weight: Tensor,
    weight_scale_inv: Tensor | None,
    bias: Tensor | None,
    s: Tensor | None,
    lora_B: Tensor | None,
    scaling: float,
    out_dtype: torch.dtype,
    split: bool,
) -> Tensor:
    y = _base(x, x_scale_inv, weight, weight_scale_inv, out_dtype, split)
    if bias is not None:
        y += bias
    if s is not None and lora_B is not None:
        y.addmm_(s.to(out_dtype), lora_B.to(out_dtype).t(), alpha=scaling)
    return y


def _base(
    x: Tensor,
    x_scale_inv: Tensor | None,
    weight: Tensor,
    weight_scale_inv: Tensor | None,
    out_dtype: torch.dtype,
    split: bool,
) -> Tensor:
    """x Wᵀ in `out_dtype`."""
    if x_scale_inv is None or weight_scale_inv is None:
        return x @ weight.to(x.dtype).t()
    if takes_cublaslt(capability_of(x.device), x.shape[0], *weight.shape):
        return reference.fp8_linear_lora(
            x, x_scale_inv, weight, weight_scale_inv, None, None, None, 1.0, out_dtype
        )
    return torch._scaled_mm(
        x.view(reference.E4M3),
        weight.view(reference.E4M3).t(),
        scale_a=x_scale_inv,
        scale_b=weight_scale_inv,
        out_dtype=out_dtype,
        use_fast_accum=not split,
    )
