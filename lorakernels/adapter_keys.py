# SPDX-License-Identifier: Apache-2.0
"""The tensors of an adapter file and their place in a model.

base_model.model.<path>.lora_A.weight [R, K]    base_model.model.<path>.lora_B.weight [N, R]
base_model.model.<path>.base_layer.bias         a trained bias under an adapter
base_model.model.<path>.bias                    any other trained bias
base_model.model.<path>.<name>                  the tensors of modules_to_save
"""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor, nn

from lorakernels.config import LoRAConfig
from lorakernels.modules.saved import saved_modules
from lorakernels.modules.use import lora_modules
from lorakernels.targets import match_saved, match_targets

_PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_SHOWN = 6


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """PEFT's key → the tensor of `model` it stands for: adapters, trained biases, saved modules."""
    found: dict[str, Tensor] = {}
    layers = lora_modules(model)
    bias = next(iter(layers.values())).config.bias if layers else "none"
    for name, layer in layers.items():
        key = _PREFIX + clean_path(name)
        found[f"{key}.lora_A.weight"] = layer.lora_A
        found[f"{key}.lora_B.weight"] = layer.lora_B
        if bias != "none" and layer.bias is not None:
            found[f"{key}.base_layer.bias"] = layer.bias
    for name, module in saved_modules(model).items():
        found.update(
            (f"{_PREFIX}{clean_path(name)}.{key}", value)
            for key, value in module.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        )
    if bias == "all":
        below = {f"{name}.bias" for name in layers}
        for name, parameter in model.named_parameters():
            if name not in below and name.rpartition(".")[2] == "bias":
                found.setdefault(_PREFIX + clean_path(name), parameter)
    return found


def expected_shapes(model: nn.Module, config: LoRAConfig) -> dict[str, tuple[int, ...]]:
    """The keys and shapes that `adapter_tensors` will have once `config` is applied to `model`."""
    shapes: dict[str, tuple[int, ...]] = {}
    paths = match_targets(model, config)
    for path in paths:
        module, r = model.get_submodule(path), config.rank_for(path)
        n, k = int(module.out_features), int(module.in_features)  # type: ignore[arg-type]
        shapes[f"{_PREFIX}{path}.lora_A.weight"] = (r, k)
        shapes[f"{_PREFIX}{path}.lora_B.weight"] = (n, r)
        if config.bias != "none" and module.bias is not None:
            shapes[f"{_PREFIX}{path}.base_layer.bias"] = (n,)
    for path in match_saved(model, config):
        for key, value in model.get_submodule(path).state_dict().items():
            shapes[f"{_PREFIX}{path}.{key}"] = tuple(value.shape)
    if config.bias == "all":
        below = {f"{path}.bias" for path in paths}
        for name, parameter in model.named_parameters():
            if name not in below and name.rpartition(".")[2] == "bias":
                shapes.setdefault(_PREFIX + name, tuple(parameter.shape))
    return shapes


def check_keys(file: Path, shapes: dict[str, tuple[int, ...]], tensors: dict[str, Tensor]) -> None:
    shared = shapes.keys() & tensors.keys()
    lines = [
        *_listed("missing", [key for key in shapes if key not in shared]),
        *_listed("unexpected", [key for key in tensors if key not in shared]),
        *_listed(
            "of another shape",
            [
                f"{key}: {tuple(tensors[key].shape)}, expected {shapes[key]}"
                for key in sorted(shared)
                if tuple(tensors[key].shape) != shapes[key]
            ],
        ),
        *_listed(
            "not float32, bfloat16 or float16",
            [
                f"{key}: {tensors[key].dtype}"
                for key in sorted(shared)
                if not _is_value(tensors[key])
            ],
        ),
    ]
    if lines:
        raise ValueError("\n".join([f"{file} does not fit this model:", *lines]))


def _is_value(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or tensor.element_size() > 1


def _listed(what: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = [f"    … and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"  {len(items)} {what}:", *(f"    {item}" for item in items[:_SHOWN]), *more]


def without_peft_copies(tensors: dict[str, Tensor], saved: list[str]) -> dict[str, Tensor]:
    """PEFT's bias="all" also writes the biases inside its wrapper of a saved module: copies."""
    copies = tuple(
        f"{_PREFIX}{path}.{inner}."
        for path in saved
        for inner in ("original_module", "modules_to_save")
    )
    return {key: value for key, value in tensors.items() if not (copies and key.startswith(copies))}


def clean_path(path: str) -> str:
    """`path` without the names that torch.compile, FSDP1 and checkpoint wrappers put into it."""
    return _WRAPPERS.sub("", path)
