# SPDX-License-Identifier: Apache-2.0
"""The ops, called with values: `ops.quantize_lora_down(x, lora_A, Scaling(state, 0, True), Dropout(slot, p, site))`.

Each is an `Op` with its reference in PyTorch, its implementations on CUDA and the reason why one of them cannot run.
The dispatcher is torch's: `torch.ops.lorakernels.*` has the same ops under flat schemas. Gradients are composed in
autograd/, which calls these ops; to differentiate through one of them raises torch's "no autograd formula".
"""

from lorakernels.lazy import offer_submodules
from lorakernels.ops.amax_and_scale_update import amax_and_scale_update
from lorakernels.ops.bias_dropout_add import (
    bias_dropout_add,
    bias_dropout_add_,
    bias_dropout_add_backward,
)
from lorakernels.ops.block_diagonal import block_diagonal, block_diagonal_parts
from lorakernels.ops.cross_entropy import cross_entropy_, cross_entropy_fp8
from lorakernels.ops.expert_route import expert_route
from lorakernels.ops.expert_sum import expert_sum, expert_sum_backward
from lorakernels.ops.fp8_grad_input import fp8_grad_input
from lorakernels.ops.fp8_linear_lora import fp8_linear_lora
from lorakernels.ops.grouped_grad_input import grouped_grad_input
from lorakernels.ops.grouped_linear_lora import grouped_linear_lora
from lorakernels.ops.grouped_lora_grad_a import grouped_lora_grad_a
from lorakernels.ops.grouped_quantize_grad import grouped_quantize_grad
from lorakernels.ops.grouped_quantize_lora_down import grouped_quantize_lora_down
from lorakernels.ops.lora_grad_a import lora_grad_a
from lorakernels.ops.quantize_blocks import quantize_blocks
from lorakernels.ops.quantize_grad import quantize_grad
from lorakernels.ops.quantize_lora_down import quantize_lora_down
from lorakernels.ops.rms_norm import rms_norm_backward, rms_norm_quantize
from lorakernels.ops.rope_qkv import rope_qkv_, rope_qkv_backward, rope_qkv_backward_quantize
from lorakernels.ops.swiglu import (
    swiglu_quantize,
    swiglu_quantize_and_pack,
    swiglu_quantize_grad,
)
from lorakernels.ops.transpose_fp8 import transpose_fp8
from lorakernels.values import Dropout, Groups, Scaled, Scaling, SideBySide, Up, Weight

offer_submodules(__name__)

__all__ = [
    "Dropout",
    "Groups",
    "Scaled",
    "Scaling",
    "SideBySide",
    "Up",
    "Weight",
    "amax_and_scale_update",
    "bias_dropout_add",
    "bias_dropout_add_",
    "bias_dropout_add_backward",
    "block_diagonal",
    "block_diagonal_parts",
    "cross_entropy_",
    "cross_entropy_fp8",
    "expert_route",
    "expert_sum",
    "expert_sum_backward",
    "fp8_grad_input",
    "fp8_linear_lora",
    "grouped_grad_input",
    "grouped_linear_lora",
    "grouped_lora_grad_a",
    "grouped_quantize_grad",
    "grouped_quantize_lora_down",
    "lora_grad_a",
    "quantize_blocks",
    "quantize_grad",
    "quantize_lora_down",
    "rms_norm_backward",
    "rms_norm_quantize",
    "rope_qkv_",
    "rope_qkv_backward",
    "rope_qkv_backward_quantize",
    "swiglu_quantize",
    "swiglu_quantize_and_pack",
    "swiglu_quantize_grad",
    "transpose_fp8",
]
