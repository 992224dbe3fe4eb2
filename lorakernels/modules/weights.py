# SPDX-License-Identifier: Apache-2.0
"""Convert a weight between FP8 bytes and a plain tensor, also while a state_dict is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lorakernels.numerics.fp8 import E4M3, FP8_MAX, amax_of, quantize_fp8, scale_of

BYTES = (torch.uint8, E4M3)  # dtypes in which e4m3 values are stored and saved


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 bytes as uint8 [N, K], scale_inv fp32 [1]) from the weight's exact amax.

    Raises:
        ValueError: the weight holds inf or NaN.
    """
    if weight.is_meta:
        return torch.empty_like(weight, dtype=torch.uint8), torch.empty(1, device="meta")
    weight = weight.detach()
    amax = amax_of(weight)
    if not bool(amax.isfinite().all()) or bool(weight.isnan().any()):
        raise ValueError("weight must be finite to be held in FP8, found inf or NaN in it")
    scale = scale_of(amax, FP8_MAX[E4M3])
    return quantize_fp8(weight, scale, E4M3).view(torch.uint8), 1.0 / scale


def dequantize_weight(weight: Tensor, scale_inv: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A new tensor [N, K] in `dtype`, from e4m3 values and their scale_inv [1], or from a plain weight and None."""
    if scale_inv is None:
        return weight.to(dtype, copy=True)
    return (weight.float() * scale_inv).to(dtype)


def take_weight(own: dict[str, Any], prefix: str, storage: torch.dtype | None) -> bool:
    """Convert the weight in `own`, FP8 or plain, to what the layer holds. Returns True if it was quantized here.

    Args:
        own: the layer's entries of a state_dict; changed in place.
        prefix: the layer's path and a dot, with which the keys of `own` begin.
        storage: the dtype of the layer's bytes, or None for a plain weight.

    Raises:
        ValueError: FP8 bytes have no scale or several, a weight has an unsuitable dtype, or values are not finite.
    """
    key, scale_key = prefix + "weight", prefix + "weight_scale_inv"
    weight, scale_inv = own.get(key), own.get(scale_key)
    if weight is None:
        return False
    if weight.dtype in BYTES:
        if scale_inv is None or scale_inv.numel() != 1:
            found = None if scale_inv is None else f"shape {tuple(scale_inv.shape)}"
            raise ValueError(f"FP8 bytes need one {scale_key}, found {found}")
        if storage is None:
            del own[scale_key]
            own[key] = weight.view(E4M3).float() * scale_inv
        elif weight.dtype != storage:
            own[key] = weight.view(storage)
        return False
    if not weight.is_floating_point() or weight.element_size() == 1:
        raise ValueError(
            f"a weight must be floating-point, or e4m3 with its scale, found {weight.dtype}"
        )
    if storage is None:
        return False
    raw, own[scale_key] = quantize_weight(weight)
    own[key] = raw.view(storage)
    return True
