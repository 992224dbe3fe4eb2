# SPDX-License-Identifier: Apache-2.0
"""apply_lora: replace a model's linear layers by LoRALinear, in place, and freeze the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lorakernels.config import LoRAConfig, clean_path
from lorakernels.modules.experts.layer import match_experts, unstack
from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.modules.linear.initial import check_initial
from lorakernels.modules.linear.lora import LoRALinear, first_plain_dtype
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.linear.weights import check_plain
from lorakernels.modules.model.columns import join_state, joining
from lorakernels.modules.model.convert import check_block_size, check_fp8_linear, to_frozen, to_lora
from lorakernels.modules.model.frozen_targets import frozen_targets
from lorakernels.modules.model.peft_mixtures import unlike_peft
from lorakernels.modules.model.pretrained import guard_saving
from lorakernels.modules.model.report import LoRAReport
from lorakernels.modules.model.targets import (
    is_fp8_linear,
    match_saved,
    match_targets,
    warn_of_unused,
)
from lorakernels.modules.model.trainable import add_counts
from lorakernels.modules.model.trained_parts import keep_original, mark_saved
from lorakernels.modules.model.undo import all_or_nothing
from lorakernels.modules.order import refuse
from lorakernels.ops.hardware import FLOATS
from lorakernels.peft_config import HEADS
from lorakernels.recipes import DelayedScaling
from lorakernels.state.fp8 import FP8State
from lorakernels.state.philox import PhiloxState, PhiloxStates


def apply_lora(
    model: nn.Module,
    config: LoRAConfig | Any,
    *,
    adapter_dtype: torch.dtype | None = torch.float32,
    rng_state: PhiloxState | PhiloxStates | None = None,
    frozen: str = "plain",
) -> LoRAReport:
    """Put an adapter over a frozen base in place of each module that `config` targets. Freeze everything else.

    Biases and `modules_to_save` train where `config` says so. FP8 layers that the model already has move to the
    report's `fp8_state`, with their histories, if their recipe and device are the same. `model` gets PEFT's methods
    `print_trainable_parameters` and `get_nb_trainable_parameters`, until `unload` or `merge_and_unload`.

    Args:
        model: any nn.Module. It is changed in place; parameter names outside the targets stay.
        config: what to adapt and how, by PEFT's matching rules (targets.py). A peft.LoraConfig is taken as
            `LoRAConfig.from_peft(config)`, so with the default `fp8`. The `task_type` of a classifier or of question
            answering adds its head to `modules_to_save`, as in PEFT.
        adapter_dtype: dtype of lora_A and lora_B: float32 (as in PEFT), bfloat16 or float16. None follows each layer:
            its weight's dtype, for an FP8 weight its bias's, else the dtype of the model's other parameters.
        rng_state: the state that dropout draws from. None follows torch.manual_seed.
        frozen: what happens to linear layers without an adapter. "plain" leaves them as they are. "fp8" holds their
            weights in FP8, as `load_quantized` does. The output head, routers, tied weights, `modules_to_save` and
            layers that are not a plain `nn.Linear` stay as they are, and the report says why.

    Returns:
        A LoRAReport: every module with parameters, the implementations it runs and why, and the model's `fp8_state`.

    Raises:
        ValueError: no module matches, the model has adapters already, the layers are on several devices, a weight is
            not finite, or `context_parallel` has seen the model. With "olora" and "pissa": a rank is larger than a
            side of its weight. `frozen` is neither "plain" nor "fp8", or is "fp8" with `config.fp8=None`.
        TypeError: `config` is of another kind, a target is not a linear layer, or `adapter_dtype` is not float32,
            bfloat16 or float16. A parameter is not of experts that LoRAExperts computes. With "olora" and "pissa": a
            weight is held in FP8 already.
        RuntimeError: a graph holds the memory of an FP8 layer's state, or a weight is in a sharded base.

    All of this is checked before anything is changed. A later exception, such as a full device, restores the model:
    replaced layers are held until the call ends. They move to the host if the device is full.
    """
    config = config if isinstance(config, LoRAConfig) else LoRAConfig.from_peft(config)
    config = _with_head(model, config)
    refuse(model, "apply_lora", ())
    options = adapter_dtype, rng_state, frozen
    if not config.target_parameters:
        return _apply(model, config, *options)
    with all_or_nothing(model):
        unstack(model, config)
        return _apply(model, config, *options)


def _with_head(model: nn.Module, config: LoRAConfig) -> LoRAConfig:
    """`config` with the head of its task in modules_to_save, as in PEFT. The head of a new task has random weights."""
    names = tuple(config.modules_to_save or ())
    paths = [clean_path(path) for path, _ in model.named_modules()]
    heads = (name for name in HEADS.get(config.task_type or "", ()) if name not in names)
    there = [name for name in heads if any(path.endswith(name) for path in paths)]
    return replace(config, modules_to_save=(*names, *there)) if there else config


def _apply(
    model: nn.Module,
    config: LoRAConfig,
    adapter_dtype: torch.dtype | None,
    rng_state: PhiloxState | PhiloxStates | None,
    frozen: str,
) -> LoRAReport:
    """apply_lora once each expert has layers of its own."""
    if adapter_dtype not in (None, *FLOATS):
        raise TypeError(
            f"adapter_dtype must be float32, bfloat16 or float16, found {adapter_dtype}"
        )
    _check_frozen(frozen, config)
    paths = match_targets(model, config)
    warn_of_unused(model, config, paths)
    dtypes = [adapter_dtype or _own_dtype(model, path) for path in paths]
    saved = match_saved(model, config)
    rest, stays = frozen_targets(model, paths, saved) if frozen == "fp8" else ([], {})
    device = _one_device(model, [*paths, *rest])
    _check_weights(model, [*paths, *rest], config)
    for path in paths:
        check_initial(path, _weight_of(model, path), config)
    moved = joining(model, paths, config.fp8, device)
    unadapted = {*rest, *moved}
    frozen_paths = [path for path, _ in model.named_modules() if path in unadapted]
    experts = set(match_experts(model, config))
    peft = unlike_peft(model, config, {path: config.rank_for(path) for path in paths})
    reasons = {path: ("frozen", f"not a target, stays plain: {why}") for path, why in stays.items()}
    with all_or_nothing(model) as before:
        names = [*paths, *frozen_paths]
        delayed = config.fp8 if isinstance(config.fp8, DelayedScaling) else None
        fp8_state = None if delayed is None else FP8State(names, delayed, device)
        tied, parents = tied_pointers(model), parents_of(model)
        model.requires_grad_(False)
        for site, path in enumerate(paths):
            options: dict[str, Any] = {
                "name": path,
                "adapter_dtype": dtypes[site],
                "fp8_state": fp8_state,
            }
            old = model.get_submodule(path)
            new = before.patiently(partial(to_lora, old, config, **options))
            new.site, new.rng_state = site, rng_state
            field = "target_parameters" if path in experts else "target_modules"
            reasons[path] = ("lora", f"matches {field}{_weight_note(old, new, tied)}")
            replace_module(parents, old, new)
        for path in rest:
            old, spec = model.get_submodule(path), FrozenSpec(config.fp8, fp8_state, path)
            replace_module(parents, old, before.patiently(partial(to_frozen, old, spec)))
            reasons[path] = ("frozen", "not a target, held in FP8")
        for path, layer in moved.items():
            join_state(layer, path, fp8_state)
        reasons |= _train(model, config, saved, tied)
        guard_saving(model)
        add_counts(model)
    return LoRAReport(model, config, fp8_state, reasons, peft)


def _train(
    model: nn.Module, config: LoRAConfig, saved: list[str], tied: set[int]
) -> dict[str, tuple[str, str]]:
    """Make the modules `saved` and the configured biases trainable. Returns {saved path: (action, reason)}."""
    reasons: dict[str, tuple[str, str]] = {}
    for path in saved:
        untied = mark_saved(model.get_submodule(path), tied)
        note = f"; {', '.join(untied)} untied" if untied else ""
        reasons[path] = ("saved", f"in modules_to_save{note}")
    _train_biases(model, config)
    return reasons


def _check_frozen(frozen: str, config: LoRAConfig) -> None:
    if frozen not in ("plain", "fp8"):
        raise ValueError(f'frozen must be "plain" or "fp8", found {frozen!r}')
    if frozen == "fp8" and config.fp8 is None:
        raise ValueError(
            'frozen="fp8" needs a DelayedScaling or a BlockScaling in config.fp8 for the layers to follow, found None'
        )


def _own_dtype(model: nn.Module, path: str) -> torch.dtype:
    """The dtype of an adapter that follows its layer. FP8 weights and their scales do not count.

    Raises:
        TypeError: the dtype is not float32, bfloat16 or float16.
    """
    module = model.get_submodule(path)
    named = model.named_parameters()
    others = (p for name, p in named if "scale" not in name.rpartition(".")[2])
    dtype = first_plain_dtype((module.weight, module.bias, *others)) or torch.get_default_dtype()
    if dtype not in FLOATS:
        raise TypeError(
            f"adapter_dtype=None: {path} is {dtype}, expected float32, bfloat16 or float16"
        )
    return dtype


def tied_pointers(model: nn.Module) -> set[int]:
    """The data_ptr of every parameter that more than one module holds."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:
                pointer = parameter.data_ptr()
                holders[pointer] = holders.get(pointer, 0) + 1
    return {pointer for pointer, count in holders.items() if pointer and count > 1}


def untie(layer: LoRALinear, tied: set[int]) -> bool:
    """Give a plain weight whose `data_ptr` is in `tied` memory of its own. Returns whether it did."""
    if layer.holds_fp8 or layer.stored.data_ptr() not in tied:
        return False
    layer._parameters["weight"] = nn.Parameter(layer.stored.detach().clone(), requires_grad=False)
    return True


def _weight_note(old: nn.Module, new: LoRALinear, tied: set[int]) -> str:
    """The report's note about the weight.

    A plain weight that is tied to another module gets its own storage here, so that merging cannot write into that one.
    """
    if new.config.changes_base:
        return f"; weight less its initial adapter ({new.config.init_lora_weights})"
    if not new.holds_fp8:
        return "; weight untied" if untie(new, tied) else ""
    if is_fp8_linear(old):
        kept = new.block_scaling is not None
        return "; block FP8 kept" if kept else "; block FP8 held with one scale"
    if not isinstance(old, FrozenFP8Linear) or not old.holds_fp8:
        return ""
    if old.block_scaling is not None and new.block_scaling is None:
        return "; block FP8 held with one scale"
    theirs, ours = old.fp8_state, new.fp8_state
    if theirs is None or ours is None or theirs.recipe == ours.recipe:
        return "; FP8 bytes and scales kept"
    return f"; FP8 bytes kept, scales dropped: they follow {theirs.recipe}"


def _one_device(model: nn.Module, paths: list[str]) -> torch.device:
    devices = {
        str(p.device) for path in paths for p in model.get_submodule(path).parameters(recurse=False)
    }
    if len(devices) != 1:
        raise ValueError(
            f"the layers must be on one device, found {sorted(devices)}: one FP8State holds the "
            "scales of all that it serves. Apply LoRA to the part of the model on each device"
        )
    return torch.device(devices.pop())


def _weight_of(model: nn.Module, path: str) -> torch.Tensor:
    weight = model.get_submodule(path).weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _check_weights(model: nn.Module, paths: list[str], config: LoRAConfig) -> None:
    for path in paths:
        module = model.get_submodule(path)
        if is_fp8_linear(module):
            check_fp8_linear(path, module)
            check_block_size(path, module, config.fp8)
            continue
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        if isinstance(module, nn.Linear):
            check_plain(f"{path}.weight", weight)
        if config.fp8 is None or weight.is_meta or weight.element_size() == 1:
            continue
        if not bool(weight.detach().isfinite().all()):
            raise ValueError(
                f"{path}.weight must be finite to be held in FP8, found inf or NaN in it"
            )


Parents = dict[
    int, list[tuple[nn.Module, str]]
]  # {id of a module: its parents, and its names there}


def parents_of(model: nn.Module) -> Parents:
    """The parents of each module of `model`. A shared module has several."""
    parents: Parents = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            parents.setdefault(id(child), []).append((parent, name))
    return parents


def replace_module(parents: Parents, old: nn.Module, new: nn.Module) -> None:
    """Put `new` in place of `old` under every parent, so that a shared module stays shared."""
    parents[id(new)] = parents.pop(id(old))
    for parent, name in parents[id(new)]:
        parent._modules[name] = new


def _train_biases(model: nn.Module, config: LoRAConfig) -> None:
    """Follow PEFT's `bias`: "all" trains every bias of the model, "lora_only" the biases of adapted layers."""
    for module in model.modules():
        wanted = config.bias == "all" or (
            config.bias == "lora_only" and isinstance(module, LoRALinear)
        )
        if wanted and isinstance(module._parameters.get("bias"), nn.Parameter):
            keep_original(module, ["bias"])
