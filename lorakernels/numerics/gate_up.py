# SPDX-License-Identifier: Apache-2.0
"""gate_up [M, 2F] = gate | up in e4m3, as it may be kept until backward.

256 columns of a row of gate and the same columns of up share a scale, which their amax gives. One pass that reads them
therefore computes act and writes their bytes as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.numerics.fp8 import E4M3, FP8_MAX, quantize_fp8, scale_of
from lorakernels.values import Scaled

PACKED_COLUMNS = 256  # a warp's, 8 a thread


def packed_scales(rows: int, cols: int) -> tuple[int, int]:
    """Shape of the scale_inv of gate_up's bytes [M, 2F]: one for 256 columns of a row of gate and of up."""
    return rows, -(-(cols // 2) // PACKED_COLUMNS)


def packed(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [M, 2F] of a plain gate_up and their scale_inv fp32 [M, ⌈F / 256⌉]."""
    rows, scales = packed_scales(*gate_up.shape)
    width, padded = gate_up.shape[1] // 2, scales * PACKED_COLUMNS
    values = gate_up.new_zeros(rows, 2, padded)
    values[:, :, :width] = gate_up.reshape(rows, 2, width)
    values = values.view(rows, 2, scales, PACKED_COLUMNS)
    scale = scale_of(values.abs().amax((1, 3)).float(), FP8_MAX[E4M3])
    bytes_ = quantize_fp8(values, scale[:, None, :, None], E4M3).view(torch.uint8)
    data = bytes_.view(rows, 2, padded)[:, :, :width].reshape(gate_up.shape)
    return data, torch.ones_like(scale) / scale


def halves(gate_up: Scaled) -> tuple[Tensor, Tensor]:
    """gate and up in fp32 [M, F], of a plain gate_up or of its bytes."""
    data, scale_inv = gate_up
    if scale_inv is None:
        gate, up = data.float().chunk(2, 1)
        return gate, up
    gate, up = data.view(E4M3).float().chunk(2, 1)
    factor = scale_inv.repeat_interleave(PACKED_COLUMNS, 1)[:, : gate.shape[1]]
    return gate * factor, up * factor
