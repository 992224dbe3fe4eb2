# SPDX-License-Identifier: Apache-2.0
"""act = silu(gate) ⊙ up, a8 = sat(act · scale) on CUDA.

gate_up [M, 2F] in bf16, fp16 or fp32, or as e4m3 bytes with a scale_inv for every 256 columns of a row; act [M, F], a8
[M, F] e4m3 bytes. One kernel (triton/swiglu.py) reads gate_up once and writes what is asked for: 5MF bytes for a8 alone
in bf16, 7MF with gate_up's own bytes beside it, 3MF from bytes, where an activation, a product and a quantization apart
move 13MF. A second kernel in front takes the amax where the state has no scale yet, and in eval.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import checks_layer as checks
from lorakernels import reference_layer
from lorakernels.kernels.ladder import why_not_layer_kernel


def swiglu_quantize(
    gate_up: Tensor,
    gate_up_scale_inv: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    keep: bool,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference_layer.swiglu_quantize`; act within fp32's rounding, a8 that of act bit for bit."""
    dtype = checks.swiglu(gate_up, gate_up_scale_inv, state, out_dtype)
    arguments = (gate_up, gate_up_scale_inv, state, column, delayed, keep, dtype)
    if why_not_layer_kernel(gate_up=gate_up, gate_up_scale_inv=gate_up_scale_inv):
        return reference_layer.swiglu_quantize(*arguments)
    from lorakernels.kernels.triton import swiglu

    with torch.cuda.device(gate_up.device):
        return swiglu.swiglu_quantize(*arguments)


def swiglu_quantize_and_pack(
    gate_up: Tensor, state: Tensor | None, column: int, delayed: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference_layer.swiglu_quantize_and_pack`, as above; the bytes bit for bit."""
    checks.swiglu(gate_up, None, state, None)
    arguments = (gate_up, state, column, delayed, keep)
    if why_not_layer_kernel(gate_up=gate_up):
        return reference_layer.swiglu_quantize_and_pack(*arguments)
    from lorakernels.kernels.triton import swiglu

    with torch.cuda.device(gate_up.device):
        return swiglu.swiglu_quantize_and_pack(*arguments)
