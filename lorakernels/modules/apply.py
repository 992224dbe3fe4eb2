# SPDX-License-Identifier: Apache-2.0
"""apply_lora: replace a model's linear layers by LoRALinear, in place, and freeze the rest."""

from __future__ import annotations

import torch
from torch import nn

from lorakernels.config import LoRAConfig
from lorakernels.fp8 import FP8State
from lorakernels.kernels.ladder import implementations
from lorakernels.modules.convert import base_kind, to_lora
from lorakernels.modules.lora import LoRALinear
from lorakernels.modules.report import LoRAReport, ModuleReport
from lorakernels.modules.saved import mark_saved
from lorakernels.philox import PhiloxState, PhiloxStates
from lorakernels.targets import match_saved, match_targets


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
        ValueError: no module matches, the targets are on several devices, or a weight is not finite.
        TypeError: a target is not a linear layer. Nothing is changed before targets and devices are checked.
    """
    paths = match_targets(model, config)
    saved = match_saved(model, config)
    device = _one_device(model, paths)
    _check_finite(model, paths, config)
    fp8_state = None if config.fp8 is None else FP8State(paths, config.fp8, device)
    model.requires_grad_(False)
    kinds = {}
    for site, path in enumerate(paths):
        old = model.get_submodule(path)
        kinds[path] = base_kind(old)
        new = to_lora(old, config, name=path, adapter_dtype=adapter_dtype, fp8_state=fp8_state)
        new.site, new.rng_state = site, rng_state
        _replace(model, old, new)
    for path in saved:
        mark_saved(model.get_submodule(path))
    _train_biases(model, config)
    return _report(model, config, fp8_state, saved, kinds, rng_state)


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


def _check_finite(model: nn.Module, paths: list[str], config: LoRAConfig) -> None:
    for path in paths if config.fp8 is not None else ():
        weight = model.get_submodule(path).weight
        assert isinstance(weight, torch.Tensor)
        if weight.is_meta or weight.element_size() == 1:
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
    """PEFT's `bias`: "all" trains every bias of the model, "lora_only" those of adapted layers (done by LoRALinear)."""
    if config.bias == "all":
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.requires_grad_(True)


def _report(
    model: nn.Module,
    config: LoRAConfig,
    fp8_state: FP8State | None,
    saved: list[str],
    kinds: dict[str, str],
    rng_state: PhiloxState | PhiloxStates | None,
) -> LoRAReport:
    rows = []
    for path, module in model.named_modules():
        if isinstance(module, LoRALinear):
            rows.append(_lora_row(path, module, kinds.get(path, "plain")))
        elif path in saved:
            rows.append(ModuleReport(path, "saved", "in modules_to_save", type(module).__name__))
        elif any(True for _ in module.parameters(recurse=False)):
            rows.append(_other_row(path, module))
    parameters = list(model.parameters())
    return LoRAReport(
        config=config,
        modules=rows,
        fp8_state=fp8_state,
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        total_parameters=sum(p.numel() for p in parameters),
        dropout_source="torch's generator" if rng_state is None else type(rng_state).__name__,
    )


def _lora_row(path: str, module: LoRALinear, kind: str) -> ModuleReport:
    device = module.lora_A.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    kind_of_device = device.type if device.type in ("cpu", "cuda") else "cpu"
    ladder = implementations(kind_of_device, capability)
    base = "e4m3" if module.weight_scale_inv is not None else str(module.weight.dtype)[6:]
    reason = "matches target_modules"
    if kind != "plain" and base == "e4m3":
        reason += "; requantized to one scale" if kind == "block FP8" else "; FP8 bytes kept"
    return ModuleReport(
        path,
        "lora",
        reason,
        type(module).__name__,
        module.in_features,
        module.out_features,
        module.r,
        module.scaling,
        module.lora_dropout,
        base,
        {op: impl for op, (impl, _) in ladder.items() if op != "bias_dropout_add"},
    )


def _other_row(path: str, module: nn.Module) -> ModuleReport:
    trained = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
    if trained:
        reason = f"trained: {', '.join(trained)}"
        return ModuleReport(path, "bias", reason, type(module).__name__)
    return ModuleReport(path or "(root)", "frozen", "not a target", type(module).__name__)
