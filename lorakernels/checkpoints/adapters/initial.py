# SPDX-License-Identifier: Apache-2.0
"""Adapters of OLoRA and PiSSA in a file: plain ones of rank 2 R, over the base as it was before the initialisation.

W′ = W − s · B0 A0 is what the layer holds. W′ + s · B A = W + s · [B, −B0] [A; A0], so the file fits W.
PEFT writes the same with `save_pretrained(path_initial_model_for_weight_conversion=…)`. The scaling s is the same:
`describe` (rules.py) writes the alpha that gives it at the rank 2 R.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lorakernels.checkpoints.adapters.keys import PREFIX, ExpectedTensor
from lorakernels.config import clean_path
from lorakernels.modules.linear.initial import initial_of
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.model.merge import lora_modules

_DIMS = {"lora_A": 0, "lora_B": 1}  # along which a file holds both adapters


def _initials(model: nn.Module) -> dict[str, LoRALinear]:
    layers = {clean_path(name): layer for name, layer in lora_modules(model).items()}
    return {name: layer for name, layer in layers.items() if initial_of(layer) is not None}


def check_scalings(layers: Mapping[str, LoRALinear]) -> None:
    """ValueError if a layer's scaling changed after its initialisation: no one scaling gives both products then."""
    for name, layer in layers.items():
        if initial_of(layer) is not None and layer.scaling != layer.init_scaling:
            raise ValueError(
                f"{name}.scaling must be {layer.init_scaling:g} to be saved, as it was when "
                f"init_lora_weights={layer.config.init_lora_weights!r} changed the weight, found {layer.scaling:g}"
            )


def join_initial(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put A0 and −B0 behind A and B in `tensors`, which are whole and on the CPU."""
    for name, layer in _initials(model).items():
        initial = initial_of(layer)
        assert initial is not None
        for part, value in (("lora_A", initial[0]), ("lora_B", -initial[1])):
            key = f"{PREFIX}{name}.{part}.weight"
            both = (tensors[key], value.detach().to("cpu"))
            tensors[key] = torch.cat(both, _DIMS[part])


def widen(model: nn.Module, expected: dict[str, ExpectedTensor]) -> None:
    """Double the rank of such layers in `expected`."""
    for name in _initials(model):
        for part, dim in _DIMS.items():
            key = f"{PREFIX}{name}.{part}.weight"
            shape = [*expected[key].shape]
            shape[dim] *= 2
            expected[key] = expected[key]._replace(shape=tuple(shape))


def split_initial(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave A and B in `tensors` and return {clean path + ".lora_A_init" or ".lora_B_init": A0 or B0 of the file}.

    A tensor of another shape stays as it is, for `check_keys` to name.
    """
    initial: dict[str, Tensor] = {}
    for name, layer in _initials(model).items():
        for part, dim in _DIMS.items():
            key = f"{PREFIX}{name}.{part}.weight"
            both = tensors.get(key)
            if both is None or both.dim() != 2 or both.shape[dim] != 2 * layer.r:
                continue
            factor, first = both.split(layer.r, dim)
            tensors[key] = factor.contiguous()
            initial[f"{name}.{part}_init"] = first.contiguous() if part == "lora_A" else -first
    return initial


def check_initial_values(model: nn.Module, initial: Mapping[str, Tensor], folder: Path) -> None:
    """ValueError if the file's adapter started from other values than the layers of `model`.

    Their weights lack what the model's own initialisation took, so the file's A and B do not fit them.
    """
    named = {clean_path(name): value for name, value in model.named_buffers()}
    wrong = [
        name
        for name, value in initial.items()
        if name not in named or not torch.equal(value.to(named[name]), named[name])
    ]
    if wrong:
        raise ValueError(
            f"the adapter in {folder} does not fit this model: it started from other initial values in "
            f"{len(wrong)} tensors, e.g. {wrong[0]}. Load it into the plain model, where it has twice the rank"
        )
