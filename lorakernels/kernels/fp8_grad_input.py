# SPDX-License-Identifier: Apache-2.0
"""dx = dy W + mask ⊙ (ds A) / (1 − p) on CUDA.

dy [M, N] e5m2 or e4m3, W [N, K] e4m3, ds [M, R], A [R, K], dx [M, K]. One kernel (csrc/ops/fp8_gemm) draws the
mask again while the FP8 product runs and rounds dx once. Split accumulation by default, as Transformer Engine's dgrad.
Hopper's FP8 tensor cores read operands along the contraction only, so the product needs Wᵀ [K, N]: `weight_t` where the
layer keeps it; otherwise a transposed copy made for this call or, with few rows and split accumulation, W turned on its
way through the registers (csrc/ops/fp8_gemm). What the kernel does not take (`ladder.why_not_wgmma_gemm`) is
multiplied by cuBLASLt, or without FP8 tensor cores dequantized (dequantized.py), and the LoRA term comes after it.
Other operands go to reference.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lorakernels import checks, reference
from lorakernels.device import capability_of, extension, multiprocessors_of
from lorakernels.kernels import dequantized, tuning
from lorakernels.kernels.ladder import takes_cublaslt, takes_dequantized, why_not_wgmma_gemm
from lorakernels.kernels.pointers import address, name, stream
from lorakernels.kernels.product import product
from lorakernels.kernels.transpose_fp8 import transpose_fp8


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
    split: bool = True,
    dropped: Tensor | None = None,
) -> Tensor:
    """`reference.fp8_grad_input` on the tensor cores."""
    last = (weight_t, ds, lora_A, slot, p, site, out_dtype, row0, col0, split, dropped)
    if dy_scale_inv is None or weight_scale_inv is None:
        return unfused(dy, dy_scale_inv, fp8_dtype, weight, weight_scale_inv, *last)
    why_not = why_not_wgmma_gemm(dy, weight, weight_t, ds, lora_A, out_dtype, col0)
    form = unfused if why_not else in_one_kernel
    return form(dy, dy_scale_inv, fp8_dtype, weight, weight_scale_inv, *last)


def in_one_kernel(
    dy: Tensor,
    dy_scale_inv: Tensor,
    fp8_dtype: torch.dtype,
    weight: Tensor,
    weight_scale_inv: Tensor,
    weight_t: Tensor | None,
    ds: Tensor | None,
    lora_A: Tensor | None,
    slot: Tensor | None,
    p: float,
    site: int,
    out_dtype: torch.dtype,
    row0: int,
    col0: int,
    split: bool,
    dropped: Tensor | None,
) -> Tensor:
    """What `ladder.why_not_wgmma_gemm` has no objection to, by csrc."""
    checks.slot(slot, dy.device)
    words = reference.dropped_words(weight.shape[1])
    checks.dropped(dropped, dy.shape[0], words, dy.device)
    (rows, depth), cols = dy.shape, weight.shape[1]
    rank = threshold = 0
    if ds is None or lora_A is None:
        ds = lora_A = None
    else:
        threshold = 0 if slot is None else reference.dropout_threshold(p)
        rank = lora_A.shape[0]
        ds = F.pad(ds, (0, -rank % 8)) if rank % 8 or ds.data_ptr() % 16 else ds
        if lora_A.dtype not in (out_dtype, torch.float32) or lora_A.data_ptr() % 16:
            lora_A = lora_A.to(out_dtype, copy=True)
    multiprocessors = multiprocessors_of(dy.get_device())
    how = "split" if split else "fast"
    if weight_t is None and split and tuning.csrc_turns(rows, cols, rank, multiprocessors):
        how = "turned"
    elif weight_t is None:
        weight_t = transpose_fp8(weight)
    dx = torch.empty(rows, cols, dtype=out_dtype, device=dy.device)
    extension().fp8_grad_input(
        dx.data_ptr(),
        dy.data_ptr(),
        (weight if weight_t is None else weight_t).data_ptr(),
        weight_t is not None,
        dy_scale_inv.data_ptr(),
        weight_scale_inv.data_ptr(),
        address(ds) if rank else 0,
        address(lora_A) if rank else 0,
        rows,
        cols,
        depth,
        rank,
        rank + -rank % 8,
        reference.keep_scale(p) if threshold else 1.0,
        address(slot) if threshold else 0,
        site,
        threshold,
        row0,
        col0,
        address(dropped) if threshold else 0,
        name(out_dtype),
        name(out_dtype if lora_A is None else lora_A.dtype),
        name(fp8_dtype).removeprefix("float8_"),
        split,
        tuning.csrc_tile(rows, cols, rank, how, multiprocessors)[0],
        multiprocessors,
        stream(dy.device),
        dy.get_device(),
    )
    return dx


def unfused(
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
    row0: int,
    col0: int,
    split: bool,
    dropped: Tensor | None,
) -> Tensor:
    """One PyTorch kernel after the other, for any dtype, shape and stride."""
    dx = _base(dy, dy_scale_inv, fp8_dtype, weight, weight_scale_inv, weight_t, out_dtype, split)
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
    split: bool,
) -> Tensor:
    """dy W in `out_dtype`."""
    if dy_scale_inv is None or weight_scale_inv is None:
        return dy @ weight.to(dy.dtype)
    n, k = weight.shape
    capability = capability_of(dy.device)
    if takes_dequantized(capability, out_dtype):
        operands = (dy, dy_scale_inv, fp8_dtype, weight, weight_scale_inv)
        return dequantized.grad_input(*operands, out_dtype)
    if takes_cublaslt(capability, dy.shape[0], k, n):
        plain = (None, None, None, None, 0.0, 0, out_dtype)
        return reference.fp8_grad_input(
            dy, dy_scale_inv, fp8_dtype, weight, weight_scale_inv, *plain
        )
    wt = transpose_fp8(weight) if weight_t is None else weight_t
    return torch._scaled_mm(
        dy.contiguous().view(fp8_dtype),
        wt.view(reference.E4M3).t(),
        scale_a=dy_scale_inv,
        scale_b=weight_scale_inv,
        out_dtype=out_dtype,
        use_fast_accum=not split,
    )
