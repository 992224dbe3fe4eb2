# SPDX-License-Identifier: Apache-2.0
"""CUDA implementations of the ops in ops.py, one op per file; `ladder.py` says which one a device takes and why."""

from lorakernels.kernels.block_diagonal import block_diagonal, block_diagonal_parts
from lorakernels.kernels.fp8_grad_input import fp8_grad_input
from lorakernels.kernels.fp8_linear_lora import fp8_linear_lora
from lorakernels.kernels.lora_grad_a import lora_grad_a
from lorakernels.kernels.quantize_grad import quantize_grad, quantize_grad_and_mask
from lorakernels.kernels.rms_norm_backward import rms_norm_backward
from lorakernels.kernels.rms_norm_quantize import rms_norm_quantize
from lorakernels.kernels.swiglu_quantize import swiglu_quantize, swiglu_quantize_and_pack
from lorakernels.kernels.swiglu_quantize_grad import swiglu_quantize_grad
from lorakernels.kernels.transpose_fp8 import transpose_fp8

__all__ = [
    "block_diagonal",
    "block_diagonal_parts",
    "fp8_grad_input",
    "fp8_linear_lora",
    "lora_grad_a",
    "quantize_grad",
    "quantize_grad_and_mask",
    "rms_norm_backward",
    "rms_norm_quantize",
    "swiglu_quantize",
    "swiglu_quantize_and_pack",
    "swiglu_quantize_grad",
    "transpose_fp8",
]
