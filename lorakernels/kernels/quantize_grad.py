# SPDX-License-Identifier: Apache-2.0
"""dy8 = sat(dy · scale), ds = scaling · dy B, dB = scaling · dyᵀ s on CUDA, in PyTorch's kernels.

dy [M, N], B [N, R], s [M, R], ds [M, R], dB [N, R]. Both products run in dy's dtype with fp32 accumulation and
are rounded once; dB is then widened to B's dtype. fp16, whose range ends at 65504, sums dB in fp32: there loss
scaling makes it large.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import reference
from lorakernels.kernels.product import product


def quantize_grad(
    dy: Tensor,
    lora_B: Tensor | None,
    s: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    scaling: float,
    fp8_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.quantize_grad`."""
    dy8, scale_inv = reference.quantize(dy, state, column, delayed, fp8_dtype)
    if lora_B is None:
        return dy8, scale_inv, dy.new_empty(0), dy.new_empty(0)
    ds = product(dy, lora_B.to(dy.dtype), scaling)
    if s is None:
        return dy8, scale_inv, ds, dy.new_empty(0)
    if dy.dtype == torch.float16:
        dy = dy.float()
    return dy8, scale_inv, ds, product(dy.t(), s.to(dy.dtype), scaling).to(lora_B.dtype)
