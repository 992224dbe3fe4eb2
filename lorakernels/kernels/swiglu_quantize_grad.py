# SPDX-License-Identifier: Apache-2.0
"""dup = dact ⊙ silu(gate), dgate = dact ⊙ up ⊙ σ (1 + gate (1 − σ)), d8 = sat((dgate · m₀ | dup · m₁) · scale) on CUDA.

dact [M, F], gate_up [M, 2F] as it was or as e4m3 bytes, multiplier m fp32 [2], dgate_up [M, 2F] in dact's dtype, d8
[M, 2F] bytes. One kernel (triton/swiglu.py) reads both once and writes what is asked for: 8MF bytes for d8 alone in
bf16, 6MF from bytes. A second kernel in front takes the amax where the state has no scale yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import checks_layer as checks
from lorakernels import reference_layer
from lorakernels.kernels.ladder import why_not_layer_kernel


def swiglu_quantize_grad(
    dact: Tensor,
    gate_up: Tensor,
    gate_up_scale_inv: Tensor | None,
    multiplier: Tensor,
    state_dy: Tensor | None,
    column: int,
    delayed: bool,
    fp8_dtype: torch.dtype,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference_layer.swiglu_quantize_grad`; dgate_up within fp32's rounding, d8 that of dgate_up bit for bit."""
    checks.swiglu_grad(dact, gate_up, gate_up_scale_inv, multiplier, state_dy)
    tensors = {"dact": dact, "gate_up": gate_up, "gate_up_scale_inv": gate_up_scale_inv}
    if why_not_layer_kernel(**tensors, multiplier=multiplier):
        return reference_layer.swiglu_quantize_grad(
            dact,
            gate_up,
            gate_up_scale_inv,
            multiplier,
            state_dy,
            column,
            delayed,
            fp8_dtype,
            keep,
        )
    from lorakernels.kernels.triton import swiglu

    with torch.cuda.device(dact.device):
        return swiglu.swiglu_quantize_grad(
            dact,
            gate_up,
            gate_up_scale_inv,
            multiplier,
            state_dy,
            column,
            delayed,
            fp8_dtype,
            keep,
        )
