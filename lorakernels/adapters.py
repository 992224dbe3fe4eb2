# SPDX-License-Identifier: Apache-2.0
"""Adapters in PEFT's file format, both ways: a directory with adapter_config.json (peft_format.py)
and adapter_model.safetensors (adapter_keys.py)."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.adapter_keys import (
    adapter_tensors,
    check_keys,
    clean_path,
    expected_shapes,
    without_peft_copies,
)
from lorakernels.config import DelayedScaling, LoRAConfig
from lorakernels.modules.apply import apply_lora
from lorakernels.modules.frozen import is_sharded
from lorakernels.modules.lora import LoRALinear
from lorakernels.modules.report import LoRAReport
from lorakernels.modules.saved import saved_modules
from lorakernels.modules.use import lora_modules
from lorakernels.peft_format import (
    WEIGHTS_NAME,
    read_config,
    read_weights,
    to_peft_dict,
    write_files,
)
from lorakernels.targets import is_target, match_saved


def save_adapter(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    base_model_name_or_path: str | None = None,
    task_type: str | None = None,
) -> Path:
    """Write the adapter of `model` to the directory `path`; `PeftModel.from_pretrained` reads it.

    A new directory appears with both files at once. Over an existing one each file is written beside
    its place, synced, then renamed over the old: an error, a full disk included, leaves the adapter
    that was there; a crash between the two renames leaves new weights beside the old config. With
    sharded parameters every rank must call this, and rank 0 writes.

    Raises:
        ValueError: no LoRALinear in `model`, or it is inside `disable_lora`.
        OSError: the files could not be written; an adapter already at `path` is untouched.
    """
    model, folder = _unwrap(model), Path(path)
    layers = {clean_path(name): layer for name, layer in lora_modules(model).items()}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no LoRALinear: nothing to save")
    _check_enabled(layers)
    parameters = adapter_tensors(model)
    tensors = {key: _whole(tensor) for key, tensor in parameters.items()}
    if any(map(is_sharded, parameters.values())) and torch.distributed.get_rank() != 0:
        return folder
    kind = type(model)
    config = to_peft_dict(
        next(iter(layers.values())).config,
        base_model_name_or_path=base_model_name_or_path or getattr(model, "name_or_path", None),
        task_type=task_type,
        auto_mapping={"base_model_class": kind.__name__, "parent_library": kind.__module__},
        **_describe(model, layers),
    )
    write_files(folder, config, tensors)
    return folder


def load_adapter(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    fp8: DelayedScaling | None = DelayedScaling(),  # noqa: B008  (frozen)
    weight_layout: str = "single",
    is_trainable: bool = True,
    adapter_dtype: torch.dtype | None = torch.float32,
) -> LoRAReport:
    """Read an adapter that we or PEFT wrote, into a plain model or over the same adapter.

    On a plain model the file's config is applied first, with `fp8`, `weight_layout` and
    `adapter_dtype` (None keeps the file's own). Where LoRALinears are already, shapes and scaling
    must agree and the values are copied in place. `is_trainable=False` freezes the adapter and
    calls `model.eval()`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not valid, uses what we do not have, or does not fit `model`: missing,
            unexpected and mis-shaped tensors are listed. `model` is unchanged then.
    """
    model, folder = _unwrap(model), Path(path)
    config = read_config(folder, fp8, weight_layout)
    tensors = read_weights(folder)
    adapted = bool(lora_modules(model))
    try:
        _check_not_meta(model)
        if adapted:
            _check_unmerged(model)
            shapes = {key: tuple(value.shape) for key, value in adapter_tensors(model).items()}
            saved = [clean_path(name) for name in saved_modules(model)]
        else:
            shapes = expected_shapes(model, config)
            saved = match_saved(model, config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the adapter in {folder} does not fit this model: {error}") from error
    tensors = without_peft_copies(tensors, saved)
    check_keys(folder / WEIGHTS_NAME, shapes, tensors)
    if adapted:
        _check_scaling(model, config, folder)
    else:
        dtypes = (tensor.dtype for key, tensor in tensors.items() if ".lora_A." in key)
        report = apply_lora(model, config, adapter_dtype=adapter_dtype or next(dtypes))
    _copy_values(model, tensors, is_trainable)
    return _report_now(model) if adapted or not is_trainable else report


def _describe(model: nn.Module, layers: dict[str, LoRALinear]) -> dict[str, Any]:
    """Fields that choose exactly `layers`, with their rank and alpha, whatever made them."""
    config = next(iter(layers.values())).config
    paths = [clean_path(name) for name, _ in model.named_modules() if name]
    by_name = replace(
        config,
        target_modules=list(layers),
        exclude_modules=None,
        layers_to_transform=None,
        layers_pattern=None,
    )
    by_regex = replace(by_name, target_modules="|".join(re.escape(path) for path in layers))
    for rules in (config, by_name, by_regex):
        if [path for path in paths if is_target(rules, path)] == list(layers):
            break
    ranks = {path: m.r for path, m in layers.items() if rules.rank_for(path) != m.r}
    alphas = {
        path: m.lora_alpha for path, m in layers.items() if rules.alpha_for(path) != m.lora_alpha
    }
    return {
        "target_modules": rules.target_modules,
        "exclude_modules": rules.exclude_modules,
        "layers_to_transform": rules.layers_to_transform,
        "layers_pattern": rules.layers_pattern,
        "modules_to_save": config.modules_to_save,
        "rank_pattern": _anchored(ranks) | dict(config.rank_pattern),
        "alpha_pattern": _anchored(alphas) | dict(config.alpha_pattern),
    }


def _anchored(values: dict[str, Any]) -> dict[str, Any]:
    return {f"^{re.escape(path)}": value for path, value in values.items()}


def _check_enabled(layers: dict[str, LoRALinear]) -> None:
    if any(layer.disable_adapters for layer in layers.values()):
        raise ValueError("the adapter is disabled: leave disable_lora first")


def _check_not_meta(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device: give the model its weights first")


def _check_unmerged(model: nn.Module) -> None:
    layers = lora_modules(model)
    _check_enabled(layers)
    for name, layer in layers.items():
        if layer.merged:
            raise ValueError(f"{name} is merged: call unmerge_lora first")


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
    for key, own in adapter_tensors(model).items():
        own.copy_(_like(tensors[key], own))
        if not is_trainable:
            own.requires_grad_(False)
    if not is_trainable:
        model.eval()


def _whole(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU, in memory of its own."""
    full = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full.detach().to("cpu", copy=True).contiguous()


def _like(value: Tensor, own: Tensor) -> Tensor:
    if not is_sharded(own):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = own.device_mesh, own.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(own.device, own.dtype), mesh, placements)


def _report_now(model: nn.Module) -> LoRAReport:
    first = next(iter(lora_modules(model).values()))
    reasons = {path: ("saved", "in modules_to_save") for path in saved_modules(model)}
    return LoRAReport(model, first.config, first.fp8_state, reasons)


def _unwrap(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
