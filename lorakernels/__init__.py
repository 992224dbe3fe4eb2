# SPDX-License-Identifier: Apache-2.0
"""LoRA fine-tuning over a frozen FP8 base, from custom kernels up: the public names."""

import sys
from typing import NoReturn

import lorakernels.installed  # noqa: F401  (first: a source tree without graphs and _C ends here)
from lorakernels.autograd import (
    bias_dropout_add,
    get_bias_dropout_add,
    linear_cross_entropy,
    quantize_head,
)
from lorakernels.checkpoints import Exported, check_export, export_model
from lorakernels.checkpoints.adapters import load_adapter, read_adapter, save_adapter
from lorakernels.checkpoints.base_files import BaseFiles
from lorakernels.checkpoints.loading import Loaded, load_quantized
from lorakernels.config import BlockScaling, DelayedScaling, LoRAConfig, MMParams
from lorakernels.fusion.fuse import FuseReport, fuse, unfuse
from lorakernels.fusion.unload import merge_and_unload, unload
from lorakernels.loops import Attached, attach, rehearsal
from lorakernels.modules import (
    AdapterBatch,
    FrozenFP8Linear,
    LoRAExperts,
    LoRALinear,
    LoRALinearGroup,
    LoRAReport,
    apply_lora,
    batch_adapters,
    disable_lora,
    group_projections,
    merge_lora,
    training_state_dict,
    unmerge_lora,
)
from lorakernels.modules.angles import angles_by_document
from lorakernels.modules.logits import change_of_logits
from lorakernels.parallel import (
    ContextParallel,
    Microbatch,
    PipelineParallel,
    PlanAxes,
    ShardPlan,
    TensorParallel,
    VocabularyHead,
    context_parallel,
    parallelize,
    pipeline_parallel,
    shard_base,
)
from lorakernels.parallel.offload import Offload
from lorakernels.state.fp8 import FP8State
from lorakernels.state.philox import PhiloxState, PhiloxStates, model_parallel_states
from lorakernels.values import LogitChange

__version__ = "0.1.0"


def __getattr__(name: str) -> NoReturn:
    """Say the right name for one that differs in its capitals, as PEFT's LoraConfig does."""
    meant = next((known for known in __all__ if known.casefold() == name.casefold()), None)
    text = f"module {__name__!r} has no attribute {name!r}"
    if meant is not None:
        text += f": here it is {meant}"
    if name == "LoraConfig":
        text += ". apply_lora takes a peft.LoraConfig, too"
    # `from lorakernels import ...` asks from here, and would drop the text of an AttributeError
    importing = sys._getframe(1).f_code.co_name == "_handle_fromlist"
    raise (ImportError if importing and meant is not None else AttributeError)(text)


__all__ = [
    "AdapterBatch",
    "Attached",
    "BlockScaling",
    "ContextParallel",
    "DelayedScaling",
    "Exported",
    "FP8State",
    "FrozenFP8Linear",
    "FuseReport",
    "LoRAConfig",
    "BaseFiles",
    "Loaded",
    "LoRAExperts",
    "LoRALinear",
    "LoRALinearGroup",
    "LoRAReport",
    "LogitChange",
    "MMParams",
    "Offload",
    "PhiloxState",
    "PhiloxStates",
    "ShardPlan",
    "TensorParallel",
    "VocabularyHead",
    "angles_by_document",
    "apply_lora",
    "attach",
    "batch_adapters",
    "bias_dropout_add",
    "change_of_logits",
    "context_parallel",
    "disable_lora",
    "check_export",
    "export_model",
    "fuse",
    "get_bias_dropout_add",
    "group_projections",
    "linear_cross_entropy",
    "load_adapter",
    "read_adapter",
    "rehearsal",
    "load_quantized",
    "merge_and_unload",
    "merge_lora",
    "parallelize",
    "model_parallel_states",
    "quantize_head",
    "save_adapter",
    "shard_base",
    "training_state_dict",
    "unfuse",
    "unload",
    "unmerge_lora",
    "Microbatch",
    "PipelineParallel",
    "PlanAxes",
    "pipeline_parallel",
]
