# SPDX-License-Identifier: Apache-2.0
"""x8 = sat(x · scale), s = D(x) Aᵀ on CUDA, in PyTorch's kernels.

x [M, K], A [R, K], x8 [M, K] e4m3 bytes, s [M, R]. s is one product in x's dtype on the tensor cores with fp32
accumulation; the dropout factor rides in its alpha, so that s is rounded once. Not fused: x is read once for its
amax, once to be quantized and once for s.
"""

from __future__ import annotations

from torch import Tensor

from lorakernels import reference
from lorakernels.kernels.product import product


def quantize_lora_down(
    x: Tensor,
    lora_A: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    slot: Tensor | None,
    p: float,
    site: int,
    row0: int = 0,
    col0: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.quantize_lora_down`."""
    x8, scale_inv = reference.quantize(x, state, column, delayed, reference.E4M3)
    if lora_A is None:
        return x8, scale_inv, x.new_empty(0)
    xd, factor = reference.masked(x, slot, p, site, row0, col0)
    return x8, scale_inv, product(xd, lora_A.to(x.dtype).t(), factor)
