# SPDX-License-Identifier: Apache-2.0
"""Run lorakernels' op inside PEFT: by PEFT's custom-module dispatch, or by patching an existing PeftModel.

config = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
register(config)                                  # before get_peft_model, and again on load
model = peft.get_peft_model(base, config)
print(report(model))

print(patch(peft_model))                          # or in place, with `restore(peft_model)`

`fuse(model)` and `attach(model, optimizer)` may follow, as after `apply_lora`. A fused layer runs one plain adapter:
the active one, while it is neither merged nor switched off.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import peft
import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn

from lorakernels import DelayedScaling, FP8State, FrozenFP8Linear, LoRAConfig
from lorakernels.config import ALL_LINEAR
from lorakernels.integrations._peft_layer import (
    FUSED,
    LoraKernelsLinear,
    is_plain_linear,
    lora_layers,
)
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.linear.weights import check_plain
from lorakernels.modules.marks import became, mark
from lorakernels.modules.model.peft_mixtures import RENAMED
from lorakernels.modules.model.targets import is_fp8_linear, match_targets, quantized_with
from lorakernels.recipes import Recipe


@dataclass(frozen=True)
class PeftRow:
    """One LoRA layer. `path` is "lorakernels" or "peft: <why>"; `base` is the dtype or class of its weight."""

    name: str
    path: str
    base: str


@dataclass(frozen=True)
class PeftReport:
    """Lists which LoRA layers of a PeftModel run our op, and why the others do not."""

    rows: list[PeftRow]
    fp8_state: FP8State | None = None

    @property
    def fused(self) -> list[str]:
        return [row.name for row in self.rows if row.path == FUSED]

    def __str__(self) -> str:
        head = f"{len(self.fused)} of {len(self.rows)} LoRA layers run lorakernels"
        return "\n".join([head, *(f"  {r.name}: {r.path} (base {r.base})" for r in self.rows)])


@dataclass(frozen=True)
class _Make:
    """Called by PEFT's dispatch for an nn.Linear. Returns None to leave the module to PEFT's own classes."""

    fp8: Recipe | None

    def __call__(self, target: nn.Module, adapter_name: str, **kwargs: Any) -> nn.Module | None:
        if is_fp8_linear(target):
            from lorakernels.integrations.transformers import frozen_from_fp8_linear

            target = frozen_from_fp8_linear(target, self.fp8)
        elif not (is_plain_linear(target) or isinstance(target, FrozenFP8Linear)):
            return None
        if kwargs["config"].fan_in_fan_out:
            warnings.warn("fan_in_fan_out=True: an nn.Linear is [N, K], set to False", stacklevel=2)
            kwargs["config"].fan_in_fan_out = False
        return LoraKernelsLinear(target, adapter_name, fp8=self.fp8, **kwargs)


def register(
    config: peft.LoraConfig,
    *,
    fp8: Recipe | None = DelayedScaling(),  # noqa: B008  (frozen)
    model: nn.Module | None = None,
) -> peft.LoraConfig:
    """Let PEFT build our layer for every linear layer that `config` targets. Returns `config`.

    By "all-linear" PEFT means layers of nn.Linear's class, which a base loaded in FP8 does not have. Given the `model`
    that the adapters are for, `register` names its linear layers instead: all but the output head, plain or in FP8.
    Of a mixture it also names what PEFT takes for the stacked experts and the router.

    PEFT does not save the registration. To load, register on `LoraConfig.from_pretrained(path)` and pass it as
    `PeftModel.from_pretrained(model, path, config=config)`. `fp8=None` keeps the base as it is. Layers that are not a
    plain nn.Linear are left to PEFT. `report(model)` lists all layers.

    Raises:
        TypeError: `config` is not a peft.LoraConfig, or `fp8` neither a DelayedScaling nor a BlockScaling.
        ValueError: "all-linear" finds no layer in `model`, or `model` has layers of PEFT's already. Or an adapter needs
            the base in full precision and `fp8` is not None, which is raised when PEFT builds the layer.
    """
    if not isinstance(config, peft.LoraConfig):
        raise TypeError(f"config must be a peft.LoraConfig, got {type(config).__name__}")
    _check_fp8(fp8)
    if model is not None and (there := lora_layers(model)):
        raise ValueError(
            f"model has PEFT's layers already (the first is {next(iter(there))!r}): call register before "
            "get_peft_model, or patch(model) for layers that are there"
        )
    if model is not None and str(config.target_modules).lower() == ALL_LINEAR:
        kind = str(getattr(getattr(model, "config", None), "model_type", None))
        config.target_modules = _all_linear(model, fp8) | set(RENAMED.get(kind, ()))
    make = _Make(fp8)
    config._register_custom_module({nn.Linear: make, FrozenFP8Linear: make})
    return config


def _all_linear(model: nn.Module, fp8: Recipe | None) -> set[str]:
    """The paths of linear layers, except the output head, that PEFT can adapt by our layer, in FP8 or not."""
    paths = match_targets(model, LoRAConfig(target_modules=ALL_LINEAR, fp8=fp8))
    taken = nn.Linear, FrozenFP8Linear
    modules = {path: model.get_submodule(path) for path in paths}
    return {
        p for p, module in modules.items() if isinstance(module, taken) or is_fp8_linear(module)
    }


def patch(
    model: nn.Module,
    *,
    fp8: Recipe | None = None,
    restorable: bool = True,
) -> PeftReport:
    """Run our op in the existing `lora.Linear` layers of `model`. Weights and adapters stay the same tensors.

    With `fp8` the base weights are held in FP8 and share one FP8State. `restorable=True` then keeps the original
    weights too, for `restore`; False frees them.

    Raises:
        TypeError: `fp8` is neither a DelayedScaling nor a BlockScaling. With `fp8`, also if a weight is quantized.
        ValueError: `model` has no LoRA layer of PEFT's. With `fp8`, also if a layer is merged, a variant needs the
            base in full precision, or a weight is not finite.
    """
    _check_fp8(fp8)
    layers = lora_layers(model)
    ready = {
        name: layer
        for name, layer in layers.items()
        if type(layer) is PeftLinear and is_plain_linear(layer.base_layer)
    }
    if not layers:
        raise ValueError(f"{type(model).__name__} has no LoRA layer of PEFT's: nothing to patch")
    merged = [name for name, layer in ready.items() if layer.merged]
    if fp8 is not None:
        _check_bases(ready, merged)
    for layer in ready.values():
        layer.__class__ = LoraKernelsLinear
        layer.start()
    if fp8 is None or not ready:
        return report(model)
    devices = {layer.base_layer.weight.device for layer in ready.values()}
    state = None
    if isinstance(fp8, DelayedScaling) and len(devices) == 1:
        state = FP8State(list(ready), fp8, devices.pop())
    for name, layer in ready.items():
        original = layer.base_layer
        layer.use_fp8_base(FrozenSpec(fp8, state, name))
        mark(layer, original_base=original if restorable else None)
    return report(model)


def restore(model: nn.Module) -> PeftReport:
    """Undo `patch`: PEFT's own classes return over the original base weights. Merged FP8 layers are unmerged first.

    Raises:
        ValueError: a base was not kept (`restorable=False`), or a layer is fused. Nothing is changed then.
    """
    layers = {
        name: layer
        for name, layer in lora_layers(model).items()
        if isinstance(layer, LoraKernelsLinear)
    }
    for name, layer in layers.items():
        if layer.is_fp8 and became(layer).original_base is None:
            raise ValueError(f"{name}: its original weight was not kept, it cannot be restored")
        if became(layer).fused_projection is not None:
            raise ValueError(f"{name} is in a fused layer: call unfuse(model) before restore")
    for layer in layers.values():
        if layer.is_fp8:
            if layer.merged:
                layer.unmerge()
            original = became(layer).original_base
            assert original is not None
            layer.base_layer = original.to(layer.base_layer.weight.device)
            mark(layer, original_base=None)
        layer.stop()
        layer.__class__ = PeftLinear
    return report(model)


def report(model: nn.Module) -> PeftReport:
    """The path that each LoRA layer of `model` takes now."""
    rows, states = [], []
    for name, layer in lora_layers(model).items():
        base = layer.get_base_layer()
        path = getattr(layer, "lorakernels_path", f"peft: a {type(layer).__name__} of PEFT's")
        if isinstance(base, FrozenFP8Linear):
            states.append(base.fp8_state)
        weight = getattr(base, "weight", None)
        held = str(weight.dtype)[6:] if isinstance(weight, torch.Tensor) else type(base).__name__
        rows.append(PeftRow(name, path, held))
    one = states[0] if len({id(state) for state in states}) == 1 else None
    return PeftReport(rows, one)


def _check_fp8(fp8: Recipe | None) -> None:
    if fp8 is not None and not isinstance(fp8, Recipe):
        raise TypeError(f"fp8 must be a DelayedScaling, a BlockScaling or None, got {fp8!r}")


def _check_bases(ready: dict[str, Any], merged: list[str]) -> None:
    if merged:
        raise ValueError(f"{merged[0]} is merged: unmerge before its base becomes FP8")
    for name, layer in ready.items():
        if layer.lora_variant:
            kind = type(next(iter(layer.lora_variant.values()))).__name__
            raise ValueError(
                f"{name} is a {kind}, which needs the base in full precision: fp8=None"
            )
        if scales := quantized_with(layer.base_layer):
            raise TypeError(f"{name}: its weight is quantized, with {', '.join(scales)}: fp8=None")
        check_plain(f"{name}: its weight", layer.base_layer.weight)
        if not bool(layer.base_layer.weight.isfinite().all()):
            raise ValueError(f"{name}: its weight must be finite to be held in FP8")
