# SPDX-License-Identifier: Apache-2.0
"""CUDA implementations of the ops in ops.py, one op per file; `ladder.py` says which one a device takes and why."""

from lorakernels.kernels.block_diagonal import block_diagonal, block_diagonal_parts
from lorakernels.kernels.fp8_grad_input import fp8_grad_input
from lorakernels.kernels.fp8_linear_lora import fp8_linear_lora
from lorakernels.kernels.lora_grad_a import lora_grad_a
from lorakernels.kernels.quantize_grad import quantize_grad, quantize_grad_and_mask
from lorakernels.kernels.transpose_fp8 import transpose_fp8

__all__ = [
    "block_diagonal",
    "block_diagonal_parts",
    "fp8_grad_input",
    "fp8_linear_lora",
    "lora_grad_a",
    "quantize_grad",
    "quantize_grad_and_mask",
    "transpose_fp8",
]
