# SPDX-License-Identifier: Apache-2.0
"""Parameters and shape of use; no maths."""

from lorakernels.modules.apply import apply_lora
from lorakernels.modules.frozen import FrozenFP8Linear
from lorakernels.modules.fuse import FuseReport, fuse, unfuse
from lorakernels.modules.group import GroupedLoRALinear, LoRALinearGroup, group_projections
from lorakernels.modules.lora import LoRALinear
from lorakernels.modules.report import LoRAReport, ModuleReport
from lorakernels.modules.unload import merge_and_unload, unload
from lorakernels.modules.use import (
    disable_lora,
    lora_modules,
    merge_lora,
    training_state_dict,
    unmerge_lora,
)

__all__ = [
    "FrozenFP8Linear",
    "FuseReport",
    "GroupedLoRALinear",
    "LoRALinear",
    "LoRALinearGroup",
    "LoRAReport",
    "ModuleReport",
    "apply_lora",
    "disable_lora",
    "fuse",
    "group_projections",
    "lora_modules",
    "merge_and_unload",
    "merge_lora",
    "training_state_dict",
    "unfuse",
    "unload",
    "unmerge_lora",
]
