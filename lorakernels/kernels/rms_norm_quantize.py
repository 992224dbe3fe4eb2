# SPDX-License-Identifier: Apache-2.0
"""rstd = 1 / √(mean(x²) + ε), normed = weight ⊙ (x · rstd), x8 = sat(normed · scale) on CUDA.

x, normed [M, K], weight [K], rstd fp32 [M], x8 [M, K] e4m3 bytes. One kernel (triton/rms_norm.py) reads x once and
writes what is asked for: 3MK bytes for x8 alone in bf16, 5MK with normed, where a norm and a quantization after it move
7MK. A second kernel in front takes the amax where the state has no scale yet, and in eval.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import checks_layer as checks
from lorakernels import reference_layer
from lorakernels.kernels.ladder import why_not_norm_kernel


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    state: Tensor | None,
    column: int,
    delayed: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference_layer.rms_norm_quantize`; rstd's sum in another, fixed order, x8 that of normed bit for bit."""
    checks.rms_norm(x, weight, state)
    arguments = (x, weight, eps, state, column, delayed, keep)
    if why_not_norm_kernel(x, weight=weight):
        return reference_layer.rms_norm_quantize(*arguments)
    from lorakernels.kernels.triton import rms_norm

    with torch.cuda.device(x.device):
        return rms_norm.rms_norm_quantize(*arguments)
