# SPDX-License-Identifier: Apache-2.0
"""transformers: block-FP8 checkpoints and Trainer.

    convert_fp8_model(model)                 # FP8Linear → FrozenFP8Linear, layer by layer
    apply_lora(model, LoRAConfig(...))
    model.enable_input_require_grads()       # only for reentrant gradient checkpointing: the
                                             # embeddings are frozen, so nothing else would ask
    Trainer(model, ..., callbacks=[AdapterCallback()]).train()

FP8Linear holds W in e4m3 with one scale_inv per block (128×128). We hold one scale per tensor:
bytes are kept where all blocks agree, else W is requantized from its exact amax. One layer at a
time is in fp32, never the model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from lorakernels.adapters import save_adapter
from lorakernels.config import DelayedScaling
from lorakernels.fp8 import FP8State
from lorakernels.modules.convert import check_fp8_linear, per_tensor_weight
from lorakernels.modules.frozen import FrozenFP8Linear, is_sharded
from lorakernels.targets import is_fp8_linear


def convert_fp8_model(
    model: nn.Module,
    *,
    fp8: DelayedScaling = DelayedScaling(),  # noqa: B008  (frozen)
    weight_layout: str = "single",
) -> list[str]:
    """Replace every FP8Linear of `model` by a FrozenFP8Linear, in place; returns their paths.

    The model then no longer counts as quantized by transformers, so Trainer takes it once it has
    adapters. Scales of the layers' inputs follow `fp8`, in one FP8State.

    Raises:
        ValueError: there is no FP8Linear, or its scales do not fit its weight.
        TypeError: a layer holds FP8 or FP4 in a way we do not have. Nothing is changed before all
            layers are checked.
    """
    _check_recipe(fp8)
    paths = [path for path, module in model.named_modules() if is_fp8_linear(module)]
    if not paths:
        raise ValueError(f"{type(model).__name__} has no FP8Linear: nothing to convert")
    for path, module in model.named_modules():
        _check_module(path, module)
    devices = {_tensor(model.get_submodule(path).weight).device for path in paths}
    state = FP8State(paths, fp8, devices.pop()) if len(devices) == 1 else None
    for path in paths:
        new = frozen_from_fp8_linear(
            model.get_submodule(path), fp8, weight_layout=weight_layout, fp8_state=state, name=path
        )
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, new)
    forget_quantizer(model)
    return paths


def frozen_from_fp8_linear(
    module: nn.Module,
    fp8: DelayedScaling | None,
    *,
    weight_layout: str = "single",
    fp8_state: FP8State | None = None,
    name: str = "",
) -> FrozenFP8Linear:
    """A FrozenFP8Linear with the weight of a transformers FP8Linear; frozen bias, same mode."""
    _check_recipe(fp8)
    _check_module(name or "module", module)
    raw, scale_inv = per_tensor_weight(module)
    new = FrozenFP8Linear.__new__(FrozenFP8Linear)
    nn.Module.__init__(new)
    bias = module.bias if isinstance(module.bias, Tensor) else None
    new._set_base(raw, scale_inv, bias, fp8, weight_layout, fp8_state, name)
    return new.train(module.training)


def forget_quantizer(model: nn.Module) -> None:
    """transformers' own marks of a quantized model come off: it is not any more.

    Trainer refuses a model that `is_quantized` and has no adapters of PEFT's, and `save_pretrained`
    would write a quantization_config that does not describe the weights.
    """
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        module.is_quantized = False
        for name in ("hf_quantizer", "quantization_method"):
            module.__dict__.pop(name, None)
        for name in ("quantization_config", "_is_quantized"):
            module.config.__dict__.pop(name, None)


class AdapterCallback(TrainerCallback):
    """Into each of Trainer's checkpoints, write the adapter in PEFT's format: `adapter/`."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sharded = any(is_sharded(p) for p in kwargs["model"].parameters())
        if state.is_world_process_zero or sharded:  # gathering takes every rank; rank 0 writes
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            save_adapter(kwargs["model"], os.fspath(folder / "adapter"))


def _check_module(path: str, module: nn.Module) -> None:
    kind = type(module)
    if not kind.__module__.startswith("transformers."):
        return
    if not is_fp8_linear(module):
        if kind.__name__ in ("FP8Experts", "FP8GroupedLinear") or kind.__name__.startswith(
            "FbgemmFp8"
        ):
            raise TypeError(
                f"{path} is a {kind.__name__}, which cannot be converted: only FP8Linear can"
            )
        return
    check_fp8_linear(path, module)


def _check_recipe(fp8: DelayedScaling | None) -> None:
    if not isinstance(fp8, DelayedScaling):
        raise TypeError(f"an FP8 checkpoint stays FP8: fp8 must be a DelayedScaling, got {fp8!r}")


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value.detach()
