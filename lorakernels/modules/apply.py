# SPDX-License-Identifier: Apache-2.0
"""apply_lora: replace a model's linear layers by LoRALinear, in place, and freeze the rest."""

from __future__ import annotations

import torch
from torch import nn

from lorakernels.config import LoRAConfig
from lorakernels.fp8 import FP8State
from lorakernels.modules.convert import check_fp8_linear, to_lora
from lorakernels.modules.frozen import FrozenFP8Linear
from lorakernels.modules.lora import ADAPTER_DTYPES, LoRALinear
from lorakernels.modules.report import LoRAReport
from lorakernels.modules.saved import keep_original, mark_saved
from lorakernels.philox import PhiloxState, PhiloxStates
from lorakernels.targets import is_fp8_linear, match_saved, match_targets


def apply_lora(
    model: nn.Module,
    config: LoRAConfig,
    *,
    adapter_dtype: torch.dtype | None = torch.float32,
    rng_state: PhiloxState | PhiloxStates | None = None,
) -> LoRAReport:
    """Give the modules that `config` targets an adapter over a frozen base; everything else is frozen too.

    Args:
        model: any nn.Module; changed in place, parameter names outside the targets stay.
        config: what to adapt and how; PEFT's matching rules (targets.py).
        adapter_dtype: of lora_A and lora_B; fp32 as PEFT, or bf16. None takes each layer's own dtype.
        rng_state: where dropout draws from; None follows torch.manual_seed.

    Returns:
        A LoRAReport: every module with parameters, the path it takes and why, and the model's `fp8_state`.

    Raises:
        ValueError: no module matches, the model has adapters already, the targets are on several devices, or a
            weight is not finite.
        TypeError: a target is not a linear layer, or `adapter_dtype` is none. Nothing is changed before all is checked.
    """
    present = [path for path, module in model.named_modules() if isinstance(module, LoRALinear)]
    if present:
        raise ValueError(
            f"model has {len(present)} LoRALinear already (the first is {present[0]!r})"
        )
    if adapter_dtype not in (None, *ADAPTER_DTYPES):
        raise TypeError(
            f"adapter_dtype must be float32, bfloat16 or float16, found {adapter_dtype}"
        )
    paths = match_targets(model, config)
    saved = match_saved(model, config)
    device = _one_device(model, paths)
    _check_weights(model, paths, config)
    tied = _tied(model)
    fp8_state = None if config.fp8 is None else FP8State(paths, config.fp8, device)
    model.requires_grad_(False)
    reasons: dict[str, tuple[str, str]] = {}
    for site, path in enumerate(paths):
        old = model.get_submodule(path)
        new = to_lora(old, config, name=path, adapter_dtype=adapter_dtype, fp8_state=fp8_state)
        new.site, new.rng_state = site, rng_state
        reasons[path] = ("lora", f"matches target_modules{_weight_note(old, new, tied)}")
        _replace(model, old, new)
    for path in saved:
        untied = mark_saved(model.get_submodule(path), tied)
        note = f"; {', '.join(untied)} untied" if untied else ""
        reasons[path] = ("saved", f"in modules_to_save{note}")
    _train_biases(model, config)
    return LoRAReport(model, config, fp8_state, reasons)


def _tied(model: nn.Module) -> set[int]:
    """data_ptr of every parameter that more than one module holds."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:
                pointer = parameter.data_ptr()
                holders[pointer] = holders.get(pointer, 0) + 1
    return {pointer for pointer, count in holders.items() if pointer and count > 1}


def _weight_note(old: nn.Module, new: LoRALinear, tied: set[int]) -> str:
    """What happened to the weight, for the report. A plain weight tied to another module gets its own storage, so that
    merging cannot write into the other."""
    if new.weight_scale_inv is None:
        if new._stored.data_ptr() not in tied:
            return ""
        new._parameters["weight"] = nn.Parameter(new._stored.detach().clone(), requires_grad=False)
        return "; weight untied"
    if is_fp8_linear(old):
        return "; block FP8 held with one scale"
    if not isinstance(old, FrozenFP8Linear):
        return ""
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
            f"the targets must be on one device, found {sorted(devices)}: one FP8State holds the "
            "scales of the whole model. Apply LoRA before the model is spread over devices"
        )
    return torch.device(devices.pop())


def _check_weights(model: nn.Module, paths: list[str], config: LoRAConfig) -> None:
    for path in paths:
        module = model.get_submodule(path)
        if is_fp8_linear(module):
            check_fp8_linear(path, module)
            continue
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        if config.fp8 is None or weight.is_meta or weight.element_size() == 1:
            continue
        if not bool(weight.detach().isfinite().all()):
            raise ValueError(
                f"{path}.weight must be finite to be held in FP8, found inf or NaN in it"
            )


def _replace(model: nn.Module, old: nn.Module, new: LoRALinear) -> None:
    """Put `new` wherever `old` hangs: a module shared by two parents stays shared."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new


def _train_biases(model: nn.Module, config: LoRAConfig) -> None:
    """PEFT's `bias`: "all" trains every bias of the model, "lora_only" those of the adapted layers."""
    for module in model.modules():
        wanted = config.bias == "all" or (
            config.bias == "lora_only" and isinstance(module, LoRALinear)
        )
        if wanted and isinstance(module._parameters.get("bias"), nn.Parameter):
            keep_original(module, ["bias"])
