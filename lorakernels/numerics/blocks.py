# SPDX-License-Identifier: Apache-2.0
"""FP8 with a scale for each block: 1 × 128 of activations and gradients, 128 × 128 of a weight.

An operand [M, K] has scale_inv fp32 [⌈K/128⌉, M], the blocks of K outside, so that neighbouring rows are neighbours.
A weight [N, K] has scale_inv fp32 [⌈N/128⌉, ⌈K/128⌉], as block-FP8 checkpoints store it. The last blocks may be
smaller than 128. An element is its byte's value times its block's scale_inv.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lorakernels.numerics.fp8 import E4M3, FP8_MAX, quantize_fp8, scale_of
from lorakernels.values import Scaled, Weight

BLOCK = 128
_MOST_POWER = 2.0**126  # its inverse is fp32's smallest normal number
_LEAST = 2.0**-126


def blocks_of(size: int) -> int:
    """How many blocks of 128 `size` elements have; the last may be smaller."""
    return -(-size // BLOCK)


def quantize_rows(x: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> Scaled:
    """x [M, K] as bytes uint8 [M, K], and scale_inv fp32 [⌈K/128⌉, M].

    A block's scale is fp8_max / amax, or the power of two below. It is 1 for a block of zeros. A block with inf or NaN
    has scale_inv NaN, so that all that depends on it is NaN: FP8 alone would saturate, and hide an overflow.
    """
    rows, cols = x.shape
    padded = F.pad(x.float(), (0, -cols % BLOCK)).view(rows, blocks_of(cols), BLOCK)
    amax = padded.abs().amax(2) if padded.numel() else padded.new_zeros(padded.shape[:2])
    scale = scale_of(amax, FP8_MAX[dtype])
    if power_of_two:
        scale = power_below(scale)
    bytes_ = quantize_fp8(padded, scale[..., None], dtype).view(torch.uint8)
    scale_inv = torch.where(amax.isfinite(), 1.0 / scale, torch.nan)
    data = bytes_.view(rows, blocks_of(cols) * BLOCK)[:, :cols].contiguous()
    return Scaled(data, scale_inv.t().contiguous())


def power_below(scale: Tensor) -> Tensor:
    """The largest power of two that is not above `scale` (fp32, normal), and at most 2¹²⁶."""
    bits = scale.view(torch.int32) & 0x7F800000
    return bits.view(torch.float32).clamp(max=_MOST_POWER)


def dequantize_rows(x: Scaled, dtype: torch.dtype = E4M3) -> Tensor:
    """fp32 [M, K] of bytes of `dtype` and their scale_inv [⌈K/128⌉, M]."""
    assert x.scale_inv is not None
    by_element = x.scale_inv.t().repeat_interleave(BLOCK, 1)[:, : x.data.shape[1]]
    return x.data.view(dtype).float() * by_element


def quantize_weight_blocks(
    weight: Tensor, block: tuple[int, ...] = (BLOCK, BLOCK), power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """(e4m3 [N, K], scale_inv fp32 [⌈N/bn⌉, ⌈K/bk⌉]) of `weight` [N, K] in blocks of (bn, bk).

    The largest absolute value of a block becomes 448, or with `power_of_two` between 224 and 448. A block of zeros has
    scale_inv 1. scale_inv is at least fp32's smallest normal number, so that no block divides by zero.
    """
    weight = weight.float()
    (n, k), (bn, bk) = weight.shape, block
    padded = F.pad(weight, (0, -k % bk, 0, -n % bn))
    tiles = padded.view(padded.shape[0] // bn, bn, padded.shape[1] // bk, bk)
    most = FP8_MAX[E4M3]
    amax = tiles.abs().amax((1, 3))
    scales = torch.where(amax > 0, (amax / most).clamp(min=_LEAST), 1.0)
    if power_of_two:
        scales = 1.0 / power_below(1.0 / scales)
    raw = (tiles / scales[:, None, :, None]).clamp(-most, most).to(E4M3)
    return raw.view(padded.shape)[:n, :k].contiguous(), scales


def dequantize_weight_blocks(weight: Weight) -> Tensor:
    """fp32 [N, K] of e4m3 bytes (uint8 or e4m3) and their scale_inv [⌈N/128⌉, ⌈K/128⌉]."""
    assert weight.scale_inv is not None
    rows, cols = weight.data.shape
    by_row = weight.scale_inv.repeat_interleave(BLOCK, 0)[:rows]
    by_element = by_row.repeat_interleave(BLOCK, 1)[:, :cols]
    return weight.data.view(E4M3).float() * by_element
