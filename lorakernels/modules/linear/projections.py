# SPDX-License-Identifier: Apache-2.0
"""Linear layers of other libraries (PEFT's, say) as projections of fused layers; and sharing one FP8State.

The class of such a layer has a method `lorakernels_projection()`. It returns a LoRALinear over the layer's own
parameters, which follows the library's changes to the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from torch import nn

from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.modules.linear.initial import initial_of
from lorakernels.modules.linear.lora import LoRALinear, refuse_merged_batch
from lorakernels.modules.marks import became, mark
from lorakernels.state.fp8 import FP8State


def projection(module: nn.Module) -> Any:
    """The layer that a fused layer runs for `module`: its `lorakernels_projection()`, or else `module` itself.

    Raises:
        ValueError: a LoRALinear cannot compute the layer.
    """
    make = getattr(type(module), "lorakernels_projection", None)
    return module if make is None else make(module)


def keep_projection(module: nn.Module) -> Any:
    """`projection(module)`. Until `forget_projections`, `module` is marked as in use."""
    layer = projection(module)
    if layer is not module:
        mark(module, fused_projection=layer)
    return layer


def is_inside_projection(layer: nn.Module, path: str) -> bool:
    """Whether `path` in `layer` is a module marked by `keep_projection` or inside one. Its library may change it."""
    names = path.split(".")
    above = (layer.get_submodule(".".join(names[:n])) for n in range(1, len(names) + 1))
    return bool(path) and any(became(module).fused_projection is not None for module in above)


def forget_projections(model: nn.Module) -> None:
    for module in model.modules():
        mark(module, fused_projection=None)


def is_active(layer: FrozenFP8Linear) -> TypeGuard[LoRALinear]:
    """Whether `layer` computes an adapter, which is neither merged nor switched off.

    Raises:
        ValueError: it is switched off in a fused layer, but its weight lacks an initial adapter.
        RuntimeError: it has several adapters, and one of them is merged.
    """
    if not isinstance(layer, LoRALinear):
        return False
    if layer.merged:
        refuse_merged_batch(layer)
        return False
    if layer.disable_adapters and initial_of(layer) is not None:
        raise ValueError(
            f"{layer.name or 'this layer'}: init_lora_weights={layer.config.init_lora_weights!r} has changed the "
            "weight, so a fused layer cannot switch its adapter off: call unfuse first"
        )
    return not layer.disable_adapters


def adapted(model: nn.Module) -> Iterator[LoRALinear]:
    """Yield every adapter of `model` as a LoRALinear.

    Raises:
        ValueError: a LoRALinear cannot compute an adapter; the message has its path.
    """
    for path, module in model.named_modules():
        try:
            layer = projection(module)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if isinstance(layer, LoRALinear):
            yield layer


def frozen_layers(model: nn.Module) -> dict[str, FrozenFP8Linear]:
    """{path: layer} of every FrozenFP8Linear with an FP8State."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, FrozenFP8Linear) and module.fp8_state is not None
    }


def share_state(layers: Mapping[str, FrozenFP8Linear]) -> None:
    """Replace the FP8States of layers that were made one by one with one state for all. Histories are kept.

    Nothing happens if the states differ in recipe, device, `in_charge`, `check_nan` or the ranks that share them, or if
    addresses are pinned.
    """
    by_id = {id(m.fp8_state): m.fp8_state for m in layers.values()}
    states = [state for state in by_id.values() if state is not None]
    alike = {
        (s.recipe, s.device, s.in_charge, s.pinned_by, s.check_nan, s.shared_over) for s in states
    }
    if len(states) < 2 or len(alike) > 1 or states[0].pinned_by:
        return
    new = FP8State(list(layers), states[0].recipe, states[0].device, check_nan=states[0].check_nan)
    new.in_charge, new.shared_over = states[0].in_charge, states[0].shared_over
    for name, layer in layers.items():
        layer.move_state(new, name)
