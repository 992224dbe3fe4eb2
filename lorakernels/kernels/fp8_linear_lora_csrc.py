# SPDX-License-Identifier: Apache-2.0
"""csrc's kernel behind fp8_linear_lora.py (csrc/ops/fp8_gemm): wgmma and TMA, one rounding, any rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lorakernels.device import extension, multiprocessors_of
from lorakernels.kernels import tuning
from lorakernels.kernels.pointers import address, name, stream


def launch(
    y: Tensor,
    x: Tensor,
    x_scale_inv: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor,
    bias: Tensor | None,
    s: Tensor | None,
    lora_B: Tensor | None,
    scaling: float,
    split: bool,
    residual: Tensor | None,
) -> None:
    """Write y. `ladder.why_not_wgmma_linear` has nothing against the operands."""
    (rows, cols), depth = y.shape, x.shape[1]
    rank = 0
    if s is not None and lora_B is not None:
        rank = lora_B.shape[1]
        s = _padded(s)
        if lora_B.dtype not in (y.dtype, torch.float32):
            lora_B = lora_B.to(y.dtype)
        lora_B = _padded(lora_B)
    multiprocessors = multiprocessors_of(y.get_device())
    extension().fp8_linear_lora(
        y.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        x_scale_inv.data_ptr(),
        weight_scale_inv.data_ptr(),
        weight_scale_inv.numel() > 1,
        address(s) if rank else 0,
        address(lora_B) if rank else 0,
        address(bias),
        address(residual),
        rows,
        cols,
        depth,
        rank,
        rank + -rank % 8,
        scaling,
        name(y.dtype),
        name(lora_B.dtype if rank and lora_B is not None else y.dtype),
        name(y.dtype if bias is None else bias.dtype),
        split,
        tuning.csrc_tile(rows, cols, 0, "split" if split else "fast", multiprocessors)[0],
        multiprocessors,
        stream(y.device),
        y.get_device(),
    )


def _padded(factor: Tensor) -> Tensor:
    """With rows of a multiple of 16 bytes, zeros behind the rank, 16-byte aligned."""
    rank = factor.shape[1]
    if rank % 8:
        return F.pad(factor, (0, -rank % 8))
    return factor.clone() if factor.data_ptr() % 16 else factor
