# SPDX-License-Identifier: Apache-2.0
"""Projections of other libraries' making, as fused layers take them.

Their class has `lorakernels_projection()`: a LoRALinear over the layer's own parameters, which follows what the library
does with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lorakernels.modules.frozen import FrozenFP8Linear
from lorakernels.modules.lora import LoRALinear
from lorakernels.state.fp8 import FP8State


def projection(module: nn.Module) -> Any:
    """`module`, or what stands for it in a fused layer.

    Raises:
        ValueError: the layer computes what a LoRALinear does not.
    """
    make = getattr(type(module), "lorakernels_projection", None)
    return module if make is None else make(module)


def keep_projection(module: nn.Module) -> Any:
    """`projection`, of which the layer knows that it is in use, until `forget_projections`."""
    found = projection(module)
    if found is not module:
        module.__dict__["fused_projection"] = found
    return found


def is_inside_projection(layer: nn.Module, path: str) -> bool:
    """Whether `path` in `layer` is such a projection, or a part of one, whose own parts its library changes."""
    names = path.split(".")
    above = (layer.get_submodule(".".join(names[:n])) for n in range(1, len(names) + 1))
    return bool(path) and any("fused_projection" in vars(module) for module in above)


def forget_projections(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.pop("fused_projection", None)


def adapted(model: nn.Module) -> Iterator[LoRALinear]:
    """Every adapter of `model` as a LoRALinear. ValueError, with its path, for one that cannot be one."""
    for path, module in model.named_modules():
        try:
            found = projection(module)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if isinstance(found, LoRALinear):
            yield found


def frozen_layers(model: nn.Module) -> dict[str, FrozenFP8Linear]:
    """{path: layer} of those with an FP8State."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, FrozenFP8Linear) and module.fp8_state is not None
    }


def share_state(layers: Mapping[str, FrozenFP8Linear]) -> None:
    """Give layers that were made one by one, each with an FP8State of its own, one for all, with their histories.

    Where they cannot share one (recipes, devices or who is in charge differ, addresses are pinned) nothing happens.
    """
    states = {id(m.fp8_state): m.fp8_state for m in layers.values()}
    found = [state for state in states.values() if state is not None]
    alike = {(s.recipe, s.device, s.in_charge, s.pinned_by, s.check_nan) for s in found}
    if len(found) < 2 or len(alike) > 1 or found[0].pinned_by:
        return
    new = FP8State(list(layers), found[0].recipe, found[0].device, check_nan=found[0].check_nan)
    new.in_charge = found[0].in_charge
    for name, layer in layers.items():
        assert layer.fp8_state is not None
        column = new.column(name)
        new.set_values(column, layer.fp8_state.values(layer._column))
        if layer._column in layer.fp8_state.joint:
            new.joint.add(column)
        layer.fp8_state, layer._column, layer.name = new, column, name
