# SPDX-License-Identifier: Apache-2.0
"""LoRA fine-tuning over a frozen FP8 base, from custom kernels up: the public names.

A name is imported when it is asked for, so that `lorakernels --help` does not wait for torch. With the first name that
needs torch come the ops, `torch.ops.lorakernels.*`. `import lorakernels.ops` brings them alone.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import lorakernels.installed  # noqa: F401  (first: a source tree without graphs and _C ends here)
from lorakernels.lazy import submodule

if TYPE_CHECKING:  # what _HOMES says at run time
    from lorakernels.autograd.bias_dropout_add import bias_dropout_add, get_bias_dropout_add
    from lorakernels.autograd.loss import linear_cross_entropy, quantize_head
    from lorakernels.checkpoints import Exported, check_export, export_model
    from lorakernels.checkpoints.adapters.files import load_adapter, read_adapter, save_adapter
    from lorakernels.checkpoints.base.files import BaseFiles
    from lorakernels.checkpoints.loading.load import Loaded, load_quantized
    from lorakernels.config import LoRAConfig
    from lorakernels.fusion.fuse import FuseReport, fuse, unfuse
    from lorakernels.fusion.unload import merge_and_unload, unload
    from lorakernels.loops.attached import Attached, attach
    from lorakernels.loops.rehearsal import rehearsal
    from lorakernels.modules import (
        AdapterBatch,
        FrozenFP8Linear,
        LoRAExperts,
        LoRALinear,
        LoRAReport,
        apply_lora,
        batch_adapters,
        disable_lora,
        merge_lora,
        training_state_dict,
        unmerge_lora,
    )
    from lorakernels.modules.model.angles import angles_by_document
    from lorakernels.modules.model.logits import change_of_logits
    from lorakernels.parallel import (
        ContextParallel,
        Microbatch,
        PipelineParallel,
        TensorParallel,
        VocabularyHead,
        context_parallel,
        parallelize,
        pipeline_parallel,
        shard_base,
    )
    from lorakernels.parallel.base.offload import Offload
    from lorakernels.planner.axes import PlanAxes
    from lorakernels.planner.plan import ShardPlan
    from lorakernels.recipes import BlockScaling, DelayedScaling, MMParams
    from lorakernels.state.fp8 import FP8State
    from lorakernels.state.philox import PhiloxState, PhiloxStates, model_parallel_states
    from lorakernels.values import LogitChange

__version__ = "0.1.0"

_HOMES = {  # {module: the public names that are imported from it}
    "autograd.bias_dropout_add": "bias_dropout_add get_bias_dropout_add",
    "autograd.loss": "linear_cross_entropy quantize_head",
    "checkpoints": "Exported check_export export_model",
    "checkpoints.adapters.files": "load_adapter read_adapter save_adapter",
    "checkpoints.base.files": "BaseFiles",
    "checkpoints.loading.load": "Loaded load_quantized",
    "config": "LoRAConfig",
    "recipes": "BlockScaling DelayedScaling MMParams",
    "fusion.fuse": "FuseReport fuse unfuse",
    "fusion.unload": "merge_and_unload unload",
    "loops.attached": "Attached attach",
    "loops.rehearsal": "rehearsal",
    "modules": "AdapterBatch FrozenFP8Linear LoRAExperts LoRALinear LoRAReport apply_lora "
    "batch_adapters disable_lora merge_lora training_state_dict unmerge_lora",
    "modules.model.angles": "angles_by_document",
    "modules.model.logits": "change_of_logits",
    "parallel": "ContextParallel Microbatch PipelineParallel TensorParallel VocabularyHead context_parallel "
    "parallelize pipeline_parallel shard_base",
    "parallel.base.offload": "Offload",
    "planner.axes": "PlanAxes",
    "planner.plan": "ShardPlan",
    "state.fp8": "FP8State",
    "state.philox": "PhiloxState PhiloxStates model_parallel_states",
    "values": "LogitChange",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def _find(name: str) -> Any:
    """The `__getattr__` of this module (PEP 562): imports a public name or a submodule."""
    if name in _HOME_OF:
        return _import(name)
    module = submodule(__name__, name)
    if module is None:
        raise _unknown(name, asked_by=sys._getframe(1).f_code.co_name)
    return module


def _import(name: str) -> Any:
    try:
        attribute = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        if "torch" in sys.modules:
            import_module(f"{__name__}.autograd")  # it registers the ops
    except AttributeError as error:  # `from lorakernels import ...` would drop its text
        raise ImportError(f"cannot import {name!r} from {__name__!r}: {error}") from error
    globals()[name] = attribute
    return attribute


def _unknown(name: str, asked_by: str) -> Exception:
    """An error that says the right name for one that differs in its capitals, as PEFT's LoraConfig does."""
    meant = next((public for public in __all__ if public.casefold() == name.casefold()), None)
    text = f"module {__name__!r} has no attribute {name!r}"
    if meant is not None:
        text += f": here it is {meant}"
    if name == "LoraConfig":
        text += ". apply_lora takes a peft.LoraConfig, too"
    # `from lorakernels import ...` asks from here, and would drop the text of an AttributeError
    importing = asked_by == "_handle_fromlist"
    return (ImportError if importing and meant is not None else AttributeError)(text)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a type checker would take any name for one that is there
    __getattr__ = _find

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
