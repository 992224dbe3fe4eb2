# SPDX-License-Identifier: Apache-2.0
"""CUDA implementations of the ops in ops.py, one op per file; `ladder.py` says which one a device takes and why."""

from lorakernels.kernels.amax_and_scale_update import amax_and_scale_update
from lorakernels.kernels.bias_dropout_add import (
    bias_dropout_add,
    bias_dropout_add_,
    bias_dropout_add_backward,
)
from lorakernels.kernels.fp8_grad_input import fp8_grad_input
from lorakernels.kernels.fp8_linear_lora import fp8_linear_lora
from lorakernels.kernels.lora_grad_a import lora_grad_a, lora_grad_a_and_mask
from lorakernels.kernels.quantize_grad import quantize_grad
from lorakernels.kernels.quantize_lora_down import quantize_lora_down
from lorakernels.kernels.transpose_fp8 import transpose_fp8

__all__ = [
    "amax_and_scale_update",
    "bias_dropout_add",
    "bias_dropout_add_",
    "bias_dropout_add_backward",
    "fp8_grad_input",
    "fp8_linear_lora",
    "lora_grad_a",
    "lora_grad_a_and_mask",
    "quantize_grad",
    "quantize_lora_down",
    "transpose_fp8",
]
