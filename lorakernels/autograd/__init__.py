# SPDX-License-Identifier: Apache-2.0
"""Which ops run forward and backward, and what is saved in between; nothing else."""

from lorakernels.autograd.lora_linear import LoRASpec, check_input, lora_linear

__all__ = ["LoRASpec", "check_input", "lora_linear"]
