# SPDX-License-Identifier: Apache-2.0
"""FP8 casts: `x8 = sat(x · scale)`, `scale_inv = 1/scale`; saturation keeps NaN and turns ±inf into ±max.

An FP8 state is one fp32 tensor [L + 1, n] per direction (state/fp8.py). Rows 0…L−1 are the amax history of n tensors,
and row L their scales. Scale 0 means that no amax has been seen yet: the tensor is then scaled by its own amax.

FP8 operands cross an op's boundary as uint8 bytes, which torch's checks, gloo and autograd all understand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.values import Scaled, Scaling

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FLT_MAX = torch.finfo(torch.float32).max
E4M3 = torch.float8_e4m3fn


def amax_of(x: Tensor) -> Tensor:
    """fp32 [1]: largest magnitude; NaN if there is one, else inf if there is one; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros(1, device=x.device)
    return x.abs().amax().float().view(1)


def scale_of(amax: Tensor, fp8_max: float) -> Tensor:
    """fp8_max / amax; 1 where amax is 0, inf or NaN (TE's `compute_scale_from_amax`); FLT_MAX where it overflows."""
    usable = amax.isfinite() & (amax > 0)
    return torch.where(usable, divide(fp8_max, amax).clamp(max=FLT_MAX), 1.0)


def divide(value: float, by: Tensor) -> Tensor:
    """value / by, rounded once: torch's scalar / tensor multiplies by a rounded reciprocal."""
    return torch.full_like(by, value) / by


def quantize_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """sat(x · scale): round to nearest even, ±max beyond the range, NaN stays NaN."""
    return (x.float() * scale).clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)


def quantize(x: Tensor, scaling: Scaling | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x8 uint8, scale_inv fp32 [1]), contiguous. Without a scaling both are empty: the operand stays as it is.

    Delayed scaling multiplies by the state's scale and records the amax in the state's row 0. While the state's scale
    is 0, x's own amax gives the scale. Without delayed scaling x is scaled by its own amax, and the state is left
    alone.
    """
    if scaling is None:
        return x.new_empty(0, dtype=torch.uint8), torch.empty(0, device=x.device)
    state, column, delayed = scaling
    amax = amax_of(x)
    scale = scale_of(amax, FP8_MAX[dtype])
    if delayed:
        kept = state[-1, column : column + 1]
        scale = torch.where(kept > 0, kept, scale)
        row0 = state[0, column : column + 1]
        row0.copy_(torch.maximum(row0, amax))
    return quantize_fp8(x, scale, dtype).contiguous().view(torch.uint8), 1.0 / scale


def scale_that_tells(dy: Tensor, scale_inv: Tensor) -> Tensor:
    """scale_inv [1] of dy8; NaN where dy is fp16 and holds inf or NaN.

    FP8 saturates: without that, an overflow of fp16 that passes a frozen layer would come out finite, and torch's
    GradScaler would not see it. bf16 and fp32 have no loss scale to look after.
    """
    if dy.dtype != torch.float16 or scale_inv.numel() == 0 or dy.numel() == 0:
        return scale_inv
    least, most = dy.aminmax()  # both NaN if there is one
    return torch.where(least.isfinite() & most.isfinite(), scale_inv, torch.nan)


def dequantize(x: Scaled, dtype: torch.dtype = E4M3) -> Tensor:
    """fp32 values of a plain or FP8 operand; `dtype` is the FP8 type of its bytes."""
    return x.data.float() if x.scale_inv is None else x.data.view(dtype).float() * x.scale_inv
