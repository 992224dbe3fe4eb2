# SPDX-License-Identifier: Apache-2.0
"""The ops of each forward and backward, and the tensors saved in between; nothing else."""

from lorakernels.autograd.bias_dropout_add import bias_dropout_add, get_bias_dropout_add
from lorakernels.autograd.compiled.linear import (
    compiled_linear,
    is_compiling,
)
from lorakernels.autograd.compiled.traced_slot import traced_slot
from lorakernels.autograd.linear.lora_linear import lora_linear
from lorakernels.autograd.linear.values import Adapter, Call, LoRASpec, check_input
from lorakernels.autograd.loss import linear_cross_entropy, quantize_head
from lorakernels.lazy import offer_submodules

offer_submodules(__name__)

__all__ = [
    "Adapter",
    "Call",
    "LoRASpec",
    "bias_dropout_add",
    "check_input",
    "compiled_linear",
    "get_bias_dropout_add",
    "is_compiling",
    "linear_cross_entropy",
    "lora_linear",
    "quantize_head",
    "traced_slot",
]
