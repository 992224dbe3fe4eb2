# SPDX-License-Identifier: Apache-2.0
"""Which ops run forward and backward, and what is saved in between; nothing else."""

from lorakernels.autograd.bias_dropout_add import bias_dropout_add, get_bias_dropout_add
from lorakernels.autograd.compiled_linear import (
    compiled_linear,
    is_compiling,
    quantize_input,
    rows_of,
)
from lorakernels.autograd.linear import quantize_in_blocks
from lorakernels.autograd.linear_cross_entropy import linear_cross_entropy, quantize_head
from lorakernels.autograd.linear_values import Adapter, AdapterNumbers, Call, LoRASpec, check_input
from lorakernels.autograd.lora_linear import lora_linear
from lorakernels.autograd.shared_input import SharedInput, share_input, shared_linear
from lorakernels.autograd.traced_slot import traced_slot
from lorakernels.lazy import offer_submodules

offer_submodules(__name__)

__all__ = [
    "Adapter",
    "AdapterNumbers",
    "Call",
    "LoRASpec",
    "SharedInput",
    "bias_dropout_add",
    "check_input",
    "compiled_linear",
    "get_bias_dropout_add",
    "is_compiling",
    "linear_cross_entropy",
    "lora_linear",
    "quantize_head",
    "quantize_in_blocks",
    "quantize_input",
    "rows_of",
    "share_input",
    "shared_linear",
    "traced_slot",
]
