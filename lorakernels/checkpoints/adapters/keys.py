# SPDX-License-Identifier: Apache-2.0
"""The tensors of an adapter file, by key, and their places in a model. R is the rank, a layer's weight is [N, K].

base_model.model.<path>.lora_A.weight [R, K]    base_model.model.<path>.lora_B.weight [N, R]
base_model.model.<owner>.lora_A.weight [E R, K]   base_model.model.<owner>.lora_B.weight [N, R E]
                                                of the last adapted one of an owner's stacked parameters of E experts;
                                                of the one before, <owner>.base_layer
base_model.model.<path>.lora_magnitude_vector [N]   with use_dora
base_model.model.<path>.base_layer.bias         a trained bias under an adapter
base_model.model.<path>.bias                    any other trained bias
base_model.model.<path>.<name>                  the tensors of modules_to_save
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lorakernels.config import LoRAConfig, clean_path
from lorakernels.modules.experts.layer import Stack, experts_of, named_parameters, stacks
from lorakernels.modules.linear.dora import DoRALinear
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.model.merge import lora_modules
from lorakernels.modules.model.targets import match_saved, match_targets
from lorakernels.modules.model.trained_parts import saved_modules

PREFIX = "base_model.model."
ADAPTER_ENDS = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
_SHOWN = 6
_VALUES = (torch.float32, torch.bfloat16, torch.float16)


_WIDEST_FIRST = ("all", "lora_only", "none")


class ExpectedTensor(NamedTuple):
    """The shape and dtype that the model expects of one tensor of the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def adapter_tensors(model: nn.Module, bias: str | None = None) -> dict[str, Tensor]:
    """{PEFT's key: tensor of `model`} for all adapters, trained biases and saved modules, not copied.

    `bias` says which biases are among them, as in LoRAConfig; None reads it from the layers.
    Each expert's adapter has a key of its own, `….gate_up_proj.3`; `stacks_of` says how a file joins them.
    """
    tensors: dict[str, Tensor] = {}
    layers = lora_modules(model)
    bias = bias or bias_mode(layers.values())
    for name, layer in layers.items():
        key = PREFIX + clean_path(name)
        tensors[f"{key}.lora_A.weight"] = layer.lora_A
        tensors[f"{key}.lora_B.weight"] = layer.lora_B
        if isinstance(layer, DoRALinear):
            tensors[f"{key}.lora_magnitude_vector"] = layer.lora_magnitude_vector
        if bias != "none" and layer.bias is not None:
            tensors[f"{key}.base_layer.bias"] = layer.bias
    for name, module in saved_modules(model).items():
        tensors.update(
            (PREFIX + clean_path(f"{name}.{key}"), value)
            for key, value in module.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        )
    if bias == "all":
        below = {f"{name}.bias" for name in layers}
        for name, parameter in model.named_parameters():
            if name not in below and name.rpartition(".")[2] == "bias":
                tensors.setdefault(PREFIX + clean_path(name), parameter)
    return tensors


def stacks_of(model: nn.Module, config: LoRAConfig | None = None) -> list[Stack]:
    """How PEFT's file holds the adapters of experts: of LoRAExperts, or of experts that `config` will adapt."""
    if config is None:
        experts = experts_of(model, lambda layer: isinstance(layer, LoRALinear))
    else:
        named = named_parameters(model, config)
        experts = {clean_path(path): shape[0] for path, shape in named.items()}
    return stacks(experts, PREFIX)


def bias_mode(layers: Iterable[LoRALinear]) -> str:
    """The widest `bias` of the layers' configs. With it a file has room for every bias that any layer trains."""
    modes = {layer.config.bias for layer in layers}
    return next((bias for bias in _WIDEST_FIRST if bias in modes), "none")


def as_expected(tensors: Mapping[str, Tensor]) -> dict[str, ExpectedTensor]:
    return {key: ExpectedTensor(tuple(value.shape), value.dtype) for key, value in tensors.items()}


def expected_tensors(model: nn.Module, config: LoRAConfig) -> dict[str, ExpectedTensor]:
    """The keys, shapes and dtypes that `adapter_tensors` will have once `config` is applied to `model`."""
    expected: dict[str, ExpectedTensor] = {}
    for path, (experts, n, k) in named_parameters(model, config).items():
        r = config.rank_for(f"{path}.0")
        for number in range(experts):
            key = f"{PREFIX}{clean_path(path)}.{number}"
            expected[f"{key}.lora_A.weight"] = ExpectedTensor((r, k), torch.float32)
            expected[f"{key}.lora_B.weight"] = ExpectedTensor((n, r), torch.float32)
    only_experts = config.target_parameters and not config.target_modules
    paths = [] if only_experts else match_targets(model, config)
    for path in paths:
        module, r, key = model.get_submodule(path), config.rank_for(path), clean_path(path)
        n, k = int(module.out_features), int(module.in_features)  # type: ignore[arg-type]
        expected[f"{PREFIX}{key}.lora_A.weight"] = ExpectedTensor((r, k), torch.float32)
        expected[f"{PREFIX}{key}.lora_B.weight"] = ExpectedTensor((n, r), torch.float32)
        if config.use_dora:
            expected[f"{PREFIX}{key}.lora_magnitude_vector"] = ExpectedTensor((n,), torch.float32)
        if config.bias != "none" and module.bias is not None:
            expected[f"{PREFIX}{key}.base_layer.bias"] = ExpectedTensor((n,), torch.float32)
    for path in match_saved(model, config):
        held = as_expected(model.get_submodule(path).state_dict())
        expected.update(
            (PREFIX + clean_path(f"{path}.{key}"), entry) for key, entry in held.items()
        )
    if config.bias == "all":
        below = {f"{path}.bias" for path in paths}
        for name, parameter in model.named_parameters():
            if name not in below and name.rpartition(".")[2] == "bias":
                entry = ExpectedTensor(tuple(parameter.shape), parameter.dtype)
                expected.setdefault(PREFIX + clean_path(name), entry)
    return expected


def keys_of(model: nn.Module, config: LoRAConfig) -> list[str]:
    """The keys that a file with `config` has for the adapted layers of `model`, whatever their own config says."""
    keys = list(adapter_tensors(model, config.bias))
    if not config.use_dora:
        return keys
    magnitudes = [
        f"{PREFIX}{clean_path(name)}.lora_magnitude_vector" for name in lora_modules(model)
    ]
    return [*keys, *(key for key in magnitudes if key not in keys)]


def check_complete(
    file: Path, config: LoRAConfig, keys: Iterable[str], tensors: Container[str]
) -> None:
    """Raise ValueError, listing them, if `tensors` of `file` lack some of the `keys` that its `config` says it has."""
    if missing := [key for key in keys if key not in tensors]:
        says = f"use_dora={config.use_dora} and bias={config.bias!r}"
        lines = _listed("missing", missing)
        raise ValueError("\n".join([f"{file} has not what its config says, {says}:", *lines]))


def check_keys(
    file: Path, expected: Mapping[str, ExpectedTensor], tensors: dict[str, Tensor]
) -> None:
    """Raise ValueError, listing every misfit, if `tensors` of `file` do not fit `expected`.

    Misfits are missing and unexpected keys, other shapes, other dtypes, and inf or NaN in an adapter.
    """
    shared = sorted(expected.keys() & tensors.keys())
    wrong = {
        "missing": [key for key in expected if key not in tensors],
        "unexpected": [key for key in tensors if key not in expected],
        "of another shape": [
            f"{key}: {tuple(tensors[key].shape)}, expected {expected[key].shape}"
            for key in shared
            if tuple(tensors[key].shape) != expected[key].shape
        ],
        "not float32, bfloat16 or float16": [
            f"{key}: {tensors[key].dtype}"
            for key in shared
            if expected[key].dtype.is_floating_point
            and tensors[key].dtype not in (*_VALUES, expected[key].dtype)
        ],
        "of another dtype": [
            f"{key}: {tensors[key].dtype}, expected {expected[key].dtype}"
            for key in shared
            if not expected[key].dtype.is_floating_point
            and tensors[key].dtype != expected[key].dtype
        ],
        "with inf or NaN": [key for key in shared if _is_broken(key, tensors[key])],
    }
    lines = [line for what, items in wrong.items() for line in _listed(what, items)]
    if lines:
        raise ValueError("\n".join([f"{file} does not fit this model:", *lines]))


def _is_broken(key: str, tensor: Tensor) -> bool:
    is_adapter = key.endswith(ADAPTER_ENDS)
    return is_adapter and tensor.dtype in _VALUES and not bool(tensor.isfinite().all())


def _listed(what: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = [f"    … and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"  {len(items)} {what}:", *(f"    {item}" for item in items[:_SHOWN]), *more]


def without_peft_copies(tensors: dict[str, Tensor], saved: list[str]) -> dict[str, Tensor]:
    """`tensors` without the copies that PEFT writes with bias="all".

    PEFT then also saves the biases inside its wrapper of a saved module, under the wrapper's own names.
    """
    copies = tuple(
        f"{PREFIX}{path}.{inner}."
        for path in saved
        for inner in ("original_module", "modules_to_save")
    )
    return {key: value for key, value in tensors.items() if not (copies and key.startswith(copies))}
