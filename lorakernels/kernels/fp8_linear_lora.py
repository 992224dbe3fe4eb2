# SPDX-License-Identifier: Apache-2.0
"""y = x Wᵀ + bias + scaling · s Bᵀ + residual on CUDA.

x [M, K] e4m3, W [N, K] e4m3, s [M, R], B [N, R], residual, y [M, N]. On Hopper csrc's kernel
(fp8_linear_lora_csrc.py), elsewhere with TMA Triton's (fp8_linear_lora_triton.py), adds everything in fp32 registers
and rounds y once. What neither can take is multiplied by cuBLASLt (`torch._scaled_mm`,
fast accumulation as Transformer Engine's forward), and the bias, the LoRA term, a second, rank-sized product added in
fp32 inside `addmm`, and the residual come after it: y is rounded up to four times. A plain base is one product in x's
dtype. Without FP8 tensor cores both operands are dequantized to y's dtype (dequantized.py). FP8 sizes that cuBLASLt
does not take are multiplied in fp32 (reference.py). `ladder.py` says which and why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import checks, reference
from lorakernels.device import capability_of, multiprocessors_of
from lorakernels.kernels import dequantized, fp8_linear_lora_csrc, tuning
from lorakernels.kernels.ladder import (
    takes_cublaslt,
    takes_dequantized,
    why_not_triton_gemm,
    why_not_wgmma_linear,
)


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
    residual: Tensor | None = None,
) -> Tensor:
    """`reference.fp8_linear_lora` on the tensor cores."""
    checks.fp8_linear_lora(x, weight, weight_scale_inv, residual)
    if (
        x_scale_inv is not None
        and weight_scale_inv is not None
        and not why_not_wgmma_linear(x, weight, bias, s, lora_B, out_dtype, residual)
    ):
        y = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
        base = (x, x_scale_inv, weight, weight_scale_inv)
        fp8_linear_lora_csrc.launch(y, *base, bias, s, lora_B, scaling, split, residual)
        return y
    if (
        x_scale_inv is None
        or weight_scale_inv is None
        or why_not_triton_gemm(x, weight, bias, s, lora_B, scaling, out_dtype, split, residual)
    ):
        operands = (x, x_scale_inv, weight, weight_scale_inv)
        return _unfused(*operands, bias, s, lora_B, scaling, out_dtype, split, residual)
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
            residual,
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
    residual: Tensor | None = None,
) -> Tensor:
    y = _base(x, x_scale_inv, weight, weight_scale_inv, out_dtype, split)
    if bias is not None:
        y += bias
    if s is not None and lora_B is not None:
        y.addmm_(s.to(out_dtype), lora_B.to(out_dtype).t(), alpha=scaling)
    if residual is not None:
        y += residual
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
    capability = capability_of(x.device)
    if takes_dequantized(capability, out_dtype):
        return dequantized.linear(x, x_scale_inv, weight, weight_scale_inv, out_dtype)
    if takes_cublaslt(capability, x.shape[0], *weight.shape):
        return reference.fp8_linear_lora(
            x, x_scale_inv, weight, weight_scale_inv, None, None, None, 1.0, out_dtype
        )
    by_column = weight_scale_inv.numel() > 1
    y = torch._scaled_mm(
        x.view(reference.E4M3),
        weight.view(reference.E4M3).t(),
        scale_a=x_scale_inv,
        scale_b=torch.ones_like(x_scale_inv) if by_column else weight_scale_inv,
        out_dtype=torch.float32 if by_column else out_dtype,
        use_fast_accum=not split,
    )
    return (y * weight_scale_inv).to(out_dtype) if by_column else y
