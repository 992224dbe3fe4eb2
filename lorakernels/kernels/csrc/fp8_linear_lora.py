# SPDX-License-Identifier: Apache-2.0
"""Launches csrc's kernel of ops/fp8_linear_lora.py (csrc/ops/fp8_gemm): wgmma and TMA, one rounding, any rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lorakernels.device import extension, multiprocessors_of
from lorakernels.kernels import tune
from lorakernels.kernels.arguments import address, name, stream
from lorakernels.values import Scaled, Up, Weight


def launch(
    y: Tensor,
    x: Scaled,
    weight: Weight,
    bias: Tensor | None,
    up: Up | None,
    split: bool,
    residual: Tensor | None,
) -> None:
    """Write y [M, N]. `why_not_csrc_kernel` of the op has nothing against the operands."""
    assert x.scale_inv is not None and weight.scale_inv is not None
    (rows, cols), depth = y.shape, x.data.shape[1]
    s, lora_B = _padded_factors(up, y.dtype)
    rank = 0 if up is None or s is None else up.lora_B.shape[1]
    multiprocessors = multiprocessors_of(y.get_device())
    extension().fp8_linear_lora(
        address(y),
        address(x.data),
        address(weight.data),
        address(x.scale_inv),
        address(weight.scale_inv),
        weight.scale_inv.numel() > 1,
        address(s),
        address(lora_B),
        address(bias),
        address(residual),
        rows,
        cols,
        depth,
        rank,
        rank + -rank % 8,
        1.0 if up is None else up.scaling,
        name(y.dtype),
        name(y.dtype if lora_B is None else lora_B.dtype),
        name(y.dtype if bias is None else bias.dtype),
        split,
        tune.csrc_tile(rows, cols, 0, "split" if split else "fast", multiprocessors)[0],
        multiprocessors,
        stream(y.device),
        y.get_device(),
    )


def _padded_factors(up: Up | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """(s, B) as csrc reads them, B in `dtype` or fp32; None for both without a term to add."""
    if up is None or up.s is None or up.lora_B.shape[1] == 0:
        return None, None
    s, lora_B = _padded(up.s), up.lora_B
    if lora_B.dtype not in (dtype, torch.float32):
        lora_B = lora_B.to(dtype)
    return s, _padded(lora_B)


def _padded(factor: Tensor) -> Tensor:
    """With rows of a multiple of 16 bytes, zeros behind the rank, 16-byte aligned."""
    rank = factor.shape[1]
    if rank % 8:
        return F.pad(factor, (0, -rank % 8))
    return factor.clone() if factor.data_ptr() % 16 else factor
