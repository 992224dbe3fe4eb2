# SPDX-License-Identifier: Apache-2.0
"""Wᵀ [K, N] of W's bytes [N, K] on CUDA, by csrc/ops/transpose_fp8: 2NK bytes read and written, 16 at a time where N
and K are multiples of 16 and single bytes otherwise. Where csrc does not run (`ladder.why_not_transpose_fp8`),
PyTorch's strided copy."""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import reference
from lorakernels.device import extension
from lorakernels.kernels import ladder
from lorakernels.kernels.pointers import stream


def transpose_fp8(weight: Tensor) -> Tensor:
    """`reference.transpose_fp8`."""
    if ladder.why_not_transpose_fp8(weight):
        return reference.transpose_fp8(weight)
    return in_one_pass(weight)


def in_one_pass(weight: Tensor) -> Tensor:
    """What `ladder.why_not_transpose_fp8` has no objection to, by csrc."""
    rows, cols = weight.shape
    out = torch.empty(cols, rows, dtype=weight.dtype, device=weight.device)
    extension().transpose_fp8(
        out.data_ptr(),
        weight.data_ptr(),
        rows,
        cols,
        stream(weight.device),
        weight.get_device(),
    )
    return out
