# SPDX-License-Identifier: Apache-2.0
"""The layers that hold parameters, and the calls that put them into a model. autograd/ and ops/ compute."""

from lorakernels.lazy import offer_submodules
from lorakernels.modules.apply import apply_lora
from lorakernels.modules.batch import AdapterBatch, batch_adapters
from lorakernels.modules.dora import DoRALinear
from lorakernels.modules.experts import LoRAExperts
from lorakernels.modules.frozen import FrozenFP8Linear
from lorakernels.modules.group import GroupedLoRALinear, LoRALinearGroup
from lorakernels.modules.grouping import group_projections
from lorakernels.modules.lora import LoRALinear
from lorakernels.modules.merge import (
    disable_lora,
    lora_modules,
    merge_lora,
    training_state_dict,
    unmerge_lora,
)
from lorakernels.modules.report import LoRAReport, ModuleReport

offer_submodules(__name__)

__all__ = [
    "AdapterBatch",
    "DoRALinear",
    "FrozenFP8Linear",
    "GroupedLoRALinear",
    "LoRAExperts",
    "LoRALinear",
    "LoRALinearGroup",
    "LoRAReport",
    "ModuleReport",
    "apply_lora",
    "batch_adapters",
    "disable_lora",
    "group_projections",
    "lora_modules",
    "merge_lora",
    "training_state_dict",
    "unmerge_lora",
]
