# SPDX-License-Identifier: Apache-2.0
"""Save and load adapters in PEFT's file format.

An adapter is a directory with adapter_config.json (peft_format.py) and adapter_model.safetensors (keys.py).
"""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.checkpoints.adapters.embeddings import (
    check_embeddings,
    local_part,
    put_embeddings,
    resized_embeddings,
    take_embeddings,
)
from lorakernels.checkpoints.adapters.initial import (
    check_initial_values,
    check_scalings,
    join_initial,
    split_initial,
    widen,
)
from lorakernels.checkpoints.adapters.keys import (
    ADAPTER_ENDS,
    PREFIX,
    adapter_tensors,
    as_expected,
    check_complete,
    check_keys,
    expected_tensors,
    keys_of,
    stacks_of,
    without_peft_copies,
)
from lorakernels.checkpoints.adapters.peft_format import (
    WEIGHTS_NAME,
    read_config,
    read_weights,
    to_peft_dict,
    write_files,
)
from lorakernels.checkpoints.adapters.rules import describe, warn_of_peft
from lorakernels.config import LoRAConfig, clean_path
from lorakernels.modules.linear.frozen import is_sharded
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.marks import SplitModule
from lorakernels.modules.model.apply import apply_lora
from lorakernels.modules.model.merge import lora_modules
from lorakernels.modules.model.report import LoRAReport
from lorakernels.modules.model.targets import match_saved
from lorakernels.modules.model.trained_parts import saved_modules
from lorakernels.modules.model.undo import all_or_nothing
from lorakernels.modules.order import refuse
from lorakernels.parallel import ContextParallel, PipelineParallel
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.tensor.whole import PartPlace, check_alike, group_of, places
from lorakernels.peft_config import TASK_TYPES
from lorakernels.recipes import DelayedScaling, Recipe


def save_adapter(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    base_model_name_or_path: str | None = None,
    task_type: str | None = None,
) -> Path:
    """Write the adapter of `model` to the directory `path`, for `PeftModel.from_pretrained` to read.

    A new directory appears with both files at once. In an existing directory, each file is written under a temporary
    name, synced, and renamed over the old one. An error, such as a full disk, leaves the old adapter in place. A
    crash between the two renames leaves new weights with the old config. With sharded parameters, and after
    `parallelize` or `pipeline_parallel`, every rank must call this. Rank 0 writes whole values, so that the files
    equal the files of one process.

    Layers of several configs fit into one file: their scaling is written as their alpha. If `task_type` is None, it is
    the config's, or else "CAUSAL_LM" for a causal LM of transformers. After "olora" and "pissa" the file has twice the
    rank and fits the unchanged base (initial.py).

    After `resize_token_embeddings` the file also has the embedding and the head, as PEFT's, and a warning says so. The
    base's vocabulary is looked up in its config.json, in a directory or the Hub's cache.

    Raises:
        ValueError: `model` has no LoRALinear or is inside `disable_lora`, `task_type` is not one of PEFT's, or a
            layer's scaling is not a positive number, or not that of its initialisation from the weight. Or embeddings
            of a resized vocabulary are held by other ranks.
        OSError: the files could not be written; an adapter already at `path` is untouched. After `parallelize` the
            other ranks of rank 0's group raise ValueError then, as where another rank's model cannot be saved.
    """
    model, folder = _unwrap(model), Path(path)
    stages = PipelineParallel.of(model)
    if stages is not None:
        values = stages.whole_values()
        with stages.together(), stages.whole(values):
            if stages.writes:
                _save(model, folder, base_model_name_or_path, task_type)
        return folder
    return _save(model, folder, base_model_name_or_path, task_type)


def _save(model: nn.Module, folder: Path, base: str | None, task_type: str | None) -> Path:
    group = group_of(model)
    with comm.together(group):
        layers = _layers_to_save(model)
        if task_type not in (None, *TASK_TYPES):
            raise ValueError(f"task_type must be None or one of {TASK_TYPES}, got {task_type!r}")
        rules = describe(model, layers)
        warn_of_peft(model, layers, rules)
        parameters = adapter_tensors(model)
        base = base or getattr(model, "name_or_path", None)
        parameters |= resized_embeddings(model, base, parameters)
    place_of = places(model)
    tensors = {key: _whole(tensor, place_of.get(id(tensor))) for key, tensor in parameters.items()}
    join_initial(model, tensors)
    for stack in stacks_of(model):
        stack.join(tensors)
    kind = type(model)
    of_layers = rules.pop("task_type")
    config = to_peft_dict(
        next(iter(layers.values())).config,
        base_model_name_or_path=base,
        task_type=task_type or of_layers or _task_type(model),
        auto_mapping={"base_model_class": kind.__name__, "parent_library": kind.__module__},
        **rules,
    )
    is_shared = group is not None or any(map(is_sharded, parameters.values()))
    with comm.together(group):
        if not is_shared or torch.distributed.get_rank() == 0:
            write_files(folder, config, tensors)
    return folder


def _layers_to_save(model: nn.Module) -> dict[str, LoRALinear]:
    layers = {clean_path(name): layer for name, layer in lora_modules(model).items()}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no LoRALinear: nothing to save")
    refuse(model, "save_adapter")
    check_scalings(layers)
    return layers


def load_adapter(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    fp8: Recipe | None = DelayedScaling(),  # noqa: B008  (frozen)
    is_trainable: bool = True,
    adapter_dtype: torch.dtype | None = torch.float32,
) -> LoRAReport:
    """Read an adapter that lorakernels or PEFT wrote, into a plain model or over the same adapter.

    A plain model first gets the file's config applied, with `fp8` and `adapter_dtype`. None as `adapter_dtype`
    keeps the file's dtype. In a model that has LoRALinears already, shapes and scaling must agree,
    and the values are copied in place. `is_trainable=False` freezes the adapter and calls `model.eval()`. After
    `parallelize`, `pipeline_parallel` or `context_parallel` every rank calls this, reads the files, and takes its part
    of each tensor, its stages' tensors, or all. What the file has of the base's own embedding and head goes into the
    base, as in PEFT.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not valid, uses a feature that lorakernels lacks, or does not fit `model`. The message
            lists missing, unexpected, mis-shaped and mis-typed tensors, and adapters with inf or NaN. `model` is
            unchanged then. All ranks of a split model raise together, also where they read different files. So do all
            ranks that have its stages, or share its rows.
    """
    model, folder = _unwrap(model), Path(path)
    with _together(model):
        config, tensors = read_config(folder, fp8), read_weights(folder)
    _check_alike(model, tensors, str(folder))
    with _together(model):
        tensors, values = _fitting(model, tensors, folder, config)
    adapted, place_of = bool(lora_modules(model)), places(model)

    def like(value: Tensor, parameter: Tensor) -> Tensor:
        return _like(value, parameter, place_of.get(id(parameter)))

    with all_or_nothing(model), put_embeddings(model, values, like):
        if not adapted:
            dtypes = (t.dtype for key, t in tensors.items() if key.endswith(".lora_A.weight"))
            report = apply_lora(model, config, adapter_dtype=adapter_dtype or next(dtypes))
        _copy_values(model, tensors, is_trainable)
    return _report_now(model) if adapted or not is_trainable else report


def _together(model: nn.Module) -> AbstractContextManager[None]:
    """Collective at its end: what one rank raises inside is raised on all of `_groups`."""
    return comm.all_together(_groups(model))


def _groups(model: nn.Module) -> list[Any]:
    """The groups of ranks that hold parts or stages of `model`, or share its rows."""
    stages, context = PipelineParallel.of(model), ContextParallel.of(model)
    held = group_of(model) if stages is None else stages.ranks.group
    return [group for group in (held, context and context.ranks.group) if group is not None]


def _check_alike(model: nn.Module, tensors: dict[str, Tensor], what: str) -> None:
    """Collective: as `check_alike`, of all ranks of `_groups`."""
    groups = _groups(model)
    for i, group in enumerate(groups):
        with comm.all_together(groups[i + 1 :]):
            check_alike(group, tensors, what)


def _fitting(
    model: nn.Module, tensors: dict[str, Tensor], folder: Path, config: LoRAConfig
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`tensors` that were read from `folder`, whole and by key, as they fit `model`, changed in place.

    Returns the adapter's tensors by key, and those of the base's embeddings by path.

    Raises:
        ValueError: as for `load_adapter`.
    """
    place_of = places(model)
    adapted = bool(lora_modules(model))
    try:
        _check_not_meta(model)
        if adapted:
            refuse(model, "load_adapter")
            stages = PipelineParallel.of(model)
            with stages.structure() if stages else nullcontext():
                current = adapter_tensors(model)
                expected = as_expected(current)
                for key in (key for key, tensor in current.items() if id(tensor) in place_of):
                    shape = place_of[id(current[key])].shape(current[key])
                    expected[key] = expected[key]._replace(shape=shape)
                widen(model, expected)
                promised = keys_of(model, config)
                values = take_embeddings(model, expected, tensors)
                check_embeddings(model, values, place_of)
            saved = list(saved_modules(model))
            joined = stacks_of(model)
        else:
            split = (n for n, m in model.named_modules() if isinstance(m, SplitModule))
            refuse(model, "apply_lora", split)
            expected = expected_tensors(model, config)
            promised = []  # `expected` has them
            values = take_embeddings(model, expected, tensors)
            check_embeddings(model, values, place_of)
            saved = match_saved(model, config)
            joined = stacks_of(model, config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the adapter in {folder} does not fit this model: {error}") from error
    tensors = without_peft_copies(tensors, list(map(clean_path, saved)))
    for stack in joined:
        stack.split(tensors)
    check_keys(folder / WEIGHTS_NAME, expected, tensors)
    check_complete(folder / WEIGHTS_NAME, config, promised, tensors)
    if adapted:
        _check_scaling(model, config, folder)
        check_initial_values(model, split_initial(model, tensors), folder)
    return tensors, values


def read_adapter(model: nn.Module, path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """{parameter's name in `model`: tensor} of lora_A, lora_B and lora_magnitude_vector at `path`, on the CPU.

    After "olora" and "pissa" the file's lora_A_init and lora_B_init are there, too. `model` is adapted, and is not
    changed. What the file has of other layers is in the result, too.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: the file is damaged.
    """
    tensors = read_weights(Path(path))
    for stack in stacks_of(model):
        stack.split(tensors)
    initial = split_initial(model, tensors)
    adapters = {
        key.removeprefix(PREFIX).removesuffix(".weight"): tensor
        for key, tensor in tensors.items()
        if key.startswith(PREFIX) and key.endswith(ADAPTER_ENDS)
    }
    return adapters | initial


def _task_type(model: nn.Module) -> str | None:
    """ "CAUSAL_LM" if PEFT's class for causal LMs accepts the model, judged by the class names that transformers
    uses.
    """
    names = (kind.__name__ for kind in type(model).__mro__)
    is_causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    return "CAUSAL_LM" if is_causal and hasattr(model, "prepare_inputs_for_generation") else None


def _check_not_meta(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device: give the model its weights first")


def _check_scaling(model: nn.Module, config: LoRAConfig, folder: Path) -> None:
    for name, layer in lora_modules(model).items():
        expected = config.scaling_for(clean_path(name))
        if not math.isclose(layer.scaling, expected, rel_tol=1e-6):
            raise ValueError(
                f"the adapter in {folder} does not fit this model: {name} has scaling "
                f"{layer.scaling:g}, the file's is {expected:g}"
            )


@torch.no_grad()
def _copy_values(model: nn.Module, tensors: dict[str, Tensor], is_trainable: bool) -> None:
    """Copy all values or none, on all ranks of a model that is split, cut into stages, or has its rows shared.

    The old values are kept on the host and copied back if an exception occurs.
    """
    current, place_of = adapter_tensors(model), places(model)
    before = {
        key: local_part(tensor).detach().to("cpu", copy=True) for key, tensor in current.items()
    }
    try:
        with _together(model):
            for key, tensor in current.items():
                tensor.copy_(_like(tensors[key], tensor, place_of.get(id(tensor))))
    except BaseException:
        for key, tensor in current.items():
            local_part(tensor).copy_(before[key])
        raise
    if not is_trainable:
        for tensor in current.values():
            tensor.requires_grad_(False)
        model.eval()


def _whole(tensor: Tensor, place: PartPlace | None) -> Tensor:
    """A full copy of the tensor on the CPU.

    The copy has its own memory because layers may share memory, and safetensors refuses to write shared memory.
    """
    full = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    full = full if place is None else place.gather(full.detach())
    return full.detach().to("cpu", copy=True).contiguous()


def _like(value: Tensor, parameter: Tensor, place: PartPlace | None) -> Tensor:
    if place is not None:
        return place.part(value)
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(parameter.device, parameter.dtype), mesh, placements)


def _report_now(model: nn.Module) -> LoRAReport:
    first = next(iter(lora_modules(model).values()))
    reasons = {path: ("saved", "in modules_to_save") for path in saved_modules(model)}
    return LoRAReport(model, first.config, first.fp8_state, reasons)


def _unwrap(model: nn.Module) -> nn.Module:
    """The user's model, taken out of DistributedDataParallel, torch.compile and checkpoint wrappers."""
    while True:
        names = ["_orig_mod", "_checkpoint_wrapped_module"]
        if isinstance(model, nn.parallel.DistributedDataParallel):
            names = ["module"]
        inner = next((model._modules[name] for name in names if name in model._modules), None)
        if inner is None:
            return model
        model = inner
