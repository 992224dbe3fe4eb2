# SPDX-License-Identifier: Apache-2.0
"""The layers that hold parameters, and the calls that put them into a model. autograd/ and ops/ compute."""

from lorakernels.lazy import offer_submodules
from lorakernels.modules.batch.batch import AdapterBatch, batch_adapters
from lorakernels.modules.experts.layer import LoRAExperts
from lorakernels.modules.linear.dora import DoRALinear
from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.model.apply import apply_lora
from lorakernels.modules.model.merge import (
    disable_lora,
    lora_modules,
    merge_lora,
    training_state_dict,
    unmerge_lora,
)
from lorakernels.modules.model.report import LoRAReport, ModuleReport

offer_submodules(__name__)

__all__ = [
    "AdapterBatch",
    "DoRALinear",
    "FrozenFP8Linear",
    "LoRAExperts",
    "LoRALinear",
    "LoRAReport",
    "ModuleReport",
    "apply_lora",
    "batch_adapters",
    "disable_lora",
    "lora_modules",
    "merge_lora",
    "training_state_dict",
    "unmerge_lora",
]
