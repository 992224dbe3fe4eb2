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

from lorakernels.numerics.fp8 import E4M3, FP8_MAX, quantize, quantize_fp8, scale_of
from lorakernels.values import Scaled, Scaling, Weight

BLOCK = 128
_MOST_POWER = 2.0**126  # its inverse is fp32's smallest normal number
_LEAST = 2.0**-126


def blocks_of(size: int) -> int:
    """How many blocks of 128 `size` elements have; the last may be smaller."""
    return -(-size // BLOCK)


def in_blocks(operand: Scaled | Weight) -> bool:
    """Whether the scales are of blocks; otherwise there is one, or one for each row, or none."""
    return operand.scale_inv is not None and operand.scale_inv.dim() == 2


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


def quantize_by(
    x: Tensor, scaling: Scaling | None, dtype: torch.dtype, power_of_two: bool | None
) -> tuple[Tensor, Tensor]:
    """(bytes, scale_inv) of x [M, K]: of `quantize_rows` if `power_of_two` is given, else of `fp8.quantize`."""
    if power_of_two is None:
        return quantize(x, scaling, dtype)
    data, scale_inv = quantize_rows(x, dtype, power_of_two)
    assert scale_inv is not None
    return data, scale_inv


def power_below(scale: Tensor) -> Tensor:
    """The largest power of two that is not above `scale` (fp32, normal), and at most 2¹²⁶."""
    bits = scale.view(torch.int32) & 0x7F800000
    return bits.view(torch.float32).clamp(max=_MOST_POWER)


def dequantize_rows(
    x: Scaled, fp8_dtype: torch.dtype = E4M3, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[M, K] in `dtype` of bytes of `fp8_dtype` and their scale_inv [⌈K/128⌉, M]. Each value is rounded once."""
    assert x.scale_inv is not None
    return _multiplied(x.data.view(fp8_dtype).to(dtype), x.scale_inv.t(), 1)


def dequantize_weight_blocks(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, K] in `dtype` of e4m3 bytes (uint8 or e4m3) and their scale_inv [⌈N/128⌉, ⌈K/128⌉], each rounded once."""
    assert weight.scale_inv is not None
    return _multiplied(weight.data.view(E4M3).to(dtype), weight.scale_inv, BLOCK)


def _multiplied(values: Tensor, scales: Tensor, rows: int) -> Tensor:
    """`values` [M, K] times the scale of their block of `rows` × 128, in place, so that no fp32 copy is made of them.

    FP8 values are exact in 16 bits. The products are fp32's before they are rounded to `values`' dtype.
    """
    for row, high, of_row in _parts(values.shape[0], rows):
        for col, wide, of_col in _parts(values.shape[1], BLOCK):
            tiles = values[row].unflatten(0, (-1, high))[..., col].unflatten(2, (-1, wide))
            tiles *= scales[of_row, None, of_col, None]
    return values


def _parts(size: int, block: int) -> list[tuple[slice, int, slice]]:
    """The whole blocks of a dimension, and the rest: (its elements, elements of a block, its blocks)."""
    whole = size // block
    parts = [(slice(whole * block), block, slice(whole))] if whole else []
    if rest := size % block:
        parts.append((slice(whole * block, size), rest, slice(whole, whole + 1)))
    return parts


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
