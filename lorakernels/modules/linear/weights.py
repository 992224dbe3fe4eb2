# SPDX-License-Identifier: Apache-2.0
"""Convert a weight between FP8 bytes and a plain tensor, also while a state_dict is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lorakernels.numerics.blocks import blocks_of, dequantize_weight_blocks, quantize_weight_blocks
from lorakernels.numerics.fp8 import E4M3, FP8_MAX, amax_of, quantize_fp8, scale_of
from lorakernels.recipes import BlockScaling
from lorakernels.values import Weight

BYTES = (torch.uint8, E4M3)  # dtypes in which e4m3 values are stored and saved


def check_plain(name: str, weight: Tensor) -> None:
    """Refuse a weight that needs scales and has none.

    Raises:
        TypeError: it is in FP8 or in integers.
    """
    if not weight.is_floating_point() or weight.element_size() == 1:
        raise TypeError(
            f"{name} must be plain floating point, or FP8 with its scales, found {weight.dtype} without scales: "
            "dequantize the model with the tool that quantized it, or load the bf16 checkpoint"
        )


def quantize_weight(
    weight: Tensor,
    blocks: BlockScaling | None = None,
    largest: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(e4m3 bytes as uint8 [N, K], scale_inv fp32 [1]) from the weight's exact amax.

    With `blocks`, scale_inv is [⌈N/128⌉, ⌈K/128⌉], from the amax of each block. Of a part of a weight, `largest` makes
    the amax of the whole, fp32 [1], of the part's.

    Raises:
        ValueError: the weight holds inf or NaN.
    """
    if weight.is_meta:
        shape = (1,) if blocks is None else scales_shape(weight)
        return torch.empty_like(weight, dtype=torch.uint8), torch.empty(shape, device="meta")
    weight = weight.detach()
    amax = amax_of(weight)
    if not bool(amax.isfinite().all()) or bool(weight.isnan().any()):
        raise ValueError("weight must be finite to be held in FP8, found inf or NaN in it")
    if blocks is not None:
        raw, scales = quantize_weight_blocks(weight, power_of_two=blocks.power_2_scale)
        return raw.view(torch.uint8), scales
    scale = scale_of(amax if largest is None else largest(amax), FP8_MAX[E4M3])
    return quantize_fp8(weight, scale, E4M3).view(torch.uint8), 1.0 / scale


def scales_shape(weight: Tensor) -> tuple[int, int]:
    """(⌈N/128⌉, ⌈K/128⌉)."""
    rows, cols = weight.shape
    return blocks_of(rows), blocks_of(cols)


def in_blocks(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """scale_inv [⌈N/128⌉, ⌈K/128⌉] of bytes with one scale_inv [1]: the same values."""
    return scale_inv.float().reshape(1, 1).repeat(scales_shape(weight))


def check_block_scales(name: str, weight: Tensor, scales: Tensor | None) -> None:
    """Refuse scales that bytes [N, K] cannot have in blocks of 128 × 128.

    Raises:
        ValueError: they are missing, of another shape or dtype, negative or not finite.
    """
    shape = scales_shape(weight)
    if scales is None or tuple(scales.shape) != shape or scales.dtype != torch.float32:
        what = None if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise ValueError(
            f"{name} must be float32 {list(shape)} for a weight {list(weight.shape)} in blocks of 128 × 128, "
            f"found {what}"
        )
    if scales.is_meta:
        return
    bad = scales[~(scales.isfinite() & (scales >= 0))]
    if bad.numel():
        raise ValueError(
            f"{name} must be finite and not negative, found {bad.numel()} other values, the first {float(bad[0])}"
        )


def dequantize_weight(weight: Tensor, scale_inv: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A new tensor [N, K] in `dtype`, from e4m3 values and their scale_inv, or from a plain weight and None.

    scale_inv is [1], or [⌈N/128⌉, ⌈K/128⌉] for blocks.
    """
    if scale_inv is None:
        return weight.to(dtype, copy=True)
    if scale_inv.dim() == 2:
        return dequantize_weight_blocks(Weight(weight, scale_inv)).to(dtype)
    return (weight.float() * scale_inv).to(dtype)


def take_weight(
    entries: dict[str, Any],
    prefix: str,
    storage: torch.dtype | None,
    blocks: BlockScaling | None = None,
) -> bool:
    """Convert the weight in `entries`, FP8 or plain, to the layer's form. Returns True if it was quantized here.

    Args:
        entries: the layer's entries of a state_dict; changed in place.
        prefix: the layer's path and a dot, with which the keys of `entries` begin.
        storage: the dtype of the layer's bytes, or None for a plain weight.
        blocks: the layer's recipe if it holds blocks; one scale for all bytes then becomes each block's.

    Raises:
        ValueError: FP8 bytes have no scale or several (with `blocks`: not one for each block), a weight has an
            unsuitable dtype, or values are not finite.
    """
    key, scale_key = prefix + "weight", prefix + "weight_scale_inv"
    weight, scale_inv = entries.get(key), entries.get(scale_key)
    if weight is None:
        return False
    if weight.dtype in BYTES:
        if blocks is not None:
            if scale_inv is not None and scale_inv.numel() == 1:
                entries[scale_key] = scale_inv = in_blocks(weight, scale_inv)
            check_block_scales(scale_key, weight, scale_inv)
        elif storage is None and scale_inv is not None and scale_inv.dim() == 2:
            check_block_scales(scale_key, weight, scale_inv)
        elif scale_inv is None or scale_inv.numel() != 1:
            shape = None if scale_inv is None else f"shape {tuple(scale_inv.shape)}"
            raise ValueError(f"FP8 bytes need one {scale_key}, found {shape}")
        if storage is None:
            del entries[scale_key]
            assert scale_inv is not None
            entries[key] = dequantize_weight(weight.view(E4M3), scale_inv, torch.float32)
        elif weight.dtype != storage:
            entries[key] = weight.view(storage)
        return False
    if not weight.is_floating_point() or weight.element_size() == 1:
        raise ValueError(
            f"a weight must be floating-point, or e4m3 with its scale, found {weight.dtype}"
        )
    if storage is None:
        return False
    raw, entries[scale_key] = quantize_weight(weight, blocks)
    entries[key] = raw.view(storage)
    return True
