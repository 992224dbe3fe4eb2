# SPDX-License-Identifier: Apache-2.0
"""dx = dresidual + rstd · (g − h · mean(g ⊙ h)), g = dnormed ⊙ weight, h = x · rstd; dweight = Σ dnormed ⊙ h on CUDA.

dnormed, x, dresidual, dx [M, K] of one dtype, weight [K], rstd fp32 [M], dweight fp32 [K]. One kernel
(triton/rms_norm.py) reads dnormed, x and dresidual once and writes dx: 8MK bytes in bf16. dweight, where the norm is
trained, takes two more and another 4MK; its order of summation depends on the shape and the GPU alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import checks_layer as checks
from lorakernels import reference_layer
from lorakernels.kernels.ladder import why_not_norm_kernel


def rms_norm_backward(
    dnormed: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dresidual: Tensor | None,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    """`reference_layer.rms_norm_backward`."""
    checks.rms_norm_backward(dnormed, x, weight, rstd, dresidual)
    arguments = (dnormed, x, weight, rstd, dresidual, weight_grad)
    others = {"dnormed": dnormed, "weight": weight, "rstd": rstd, "dresidual": dresidual}
    if why_not_norm_kernel(x, **others):
        return reference_layer.rms_norm_backward(*arguments)
    from lorakernels.kernels.triton import rms_norm

    with torch.cuda.device(x.device):
        return rms_norm.rms_norm_backward(*arguments)
