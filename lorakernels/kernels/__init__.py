# SPDX-License-Identifier: Apache-2.0
"""CUDA implementations of the ops in ops.py, one op per file; `ladder.py` says which one a device takes and why."""

from lorakernels.kernels.amax_and_scale_update import amax_and_scale_update
from lorakernels.kernels.bias_dropout_add import (
    bias_dropout_add,
    bias_dropout_add_,
    bias_dropout_add_backward,
)
from lorakernels.kernels.block_diagonal import block_diagonal, block_diagonal_parts
from lorakernels.kernels.cross_entropy import cross_entropy_
from lorakernels.kernels.lora_grad_a import lora_grad_a
from lorakernels.kernels.quantize_grad import quantize_grad, quantize_grad_and_mask
from lorakernels.kernels.rms_norm_backward import rms_norm_backward
from lorakernels.kernels.rms_norm_quantize import rms_norm_quantize
from lorakernels.kernels.rope_qkv import rope_qkv_, rope_qkv_backward
from lorakernels.kernels.swiglu_quantize import swiglu_quantize, swiglu_quantize_and_pack
from lorakernels.kernels.swiglu_quantize_grad import swiglu_quantize_grad

__all__ = [
    "block_diagonal",
    "block_diagonal_parts",
    "amax_and_scale_update",
    "bias_dropout_add",
    "bias_dropout_add_",
    "bias_dropout_add_backward",
    "cross_entropy_",
    "lora_grad_a",
    "quantize_grad",
    "quantize_grad_and_mask",
    "rms_norm_backward",
    "rms_norm_quantize",
    "rope_qkv_",
    "rope_qkv_backward",
    "swiglu_quantize",
    "swiglu_quantize_and_pack",
    "swiglu_quantize_grad",
]
