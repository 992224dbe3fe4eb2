# SPDX-License-Identifier: Apache-2.0
"""What one does with an adapted model: list its layers, merge and unmerge, switch the adapter off for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lorakernels.modules.apply import tied_pointers
from lorakernels.modules.entries import apart
from lorakernels.modules.lora import LoRALinear
from lorakernels.modules.saved import swap_originals


def lora_modules(model: nn.Module) -> dict[str, LoRALinear]:
    """{path: layer} of every LoRALinear in `model`, in module order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def _layers(model: nn.Module) -> dict[str, LoRALinear]:
    layers = lora_modules(model)
    if not layers:
        raise ValueError(f"model has no LoRALinear: {type(model).__name__}; call apply_lora first")
    return layers


def merge_lora(model: nn.Module) -> None:
    """Fold every adapter into its base weight. If one layer fails, those before it are unmerged again.

    `model.state_dict()` is the merged model's from then on, and `model.save_pretrained` writes a model that transformers
    loads; see `training_state_dict`, `merge_and_unload`, `export_model` for the other forms. A plain weight that is tied
    to another module gets memory of its own, so that only this layer changes.

    Raises:
        ValueError: no LoRALinear in `model`, or a merged weight would not be finite.
    """
    done: list[LoRALinear] = []
    layers = _layers(model)
    tied = tied_pointers(model)
    for layer in layers.values():
        try:
            if not layer.merged:
                _untie(layer, tied)
                layer.merge()
                done.append(layer)
        except BaseException:
            for merged in done:
                merged.unmerge()
            raise


def _untie(layer: LoRALinear, tied: set[int]) -> None:
    weight = layer._parameters["weight"]
    if layer.weight_scale_inv is None and weight is not None and weight.data_ptr() in tied:
        layer._parameters["weight"] = nn.Parameter(weight.detach().clone(), requires_grad=False)


def training_state_dict(model: nn.Module, **options: Any) -> dict[str, Any]:
    """`model.state_dict(**options)` with base and adapter apart, also of merged layers: what a run needs to go on.

    The same entries, bit for bit, as of the unmerged model, without unmerging it. They load into an unmerged one.
    """
    with apart():
        state: dict[str, Any] = model.state_dict(**options)
    return state


def unmerge_lora(model: nn.Module) -> None:
    """Restore every base weight byte for byte. ValueError if there is no LoRALinear in `model`."""
    for layer in _layers(model).values():
        layer.unmerge()


@contextmanager
def disable_lora(model: nn.Module) -> Iterator[nn.Module]:
    """Inside the context `model` is its base: adapters off (merged ones unmerged), trained biases and
    `modules_to_save` as they were before training. Nests."""
    layers = list(_layers(model).values())
    before = [(layer, layer.disable_adapters, layer.merged) for layer in layers]
    swapped: list[nn.Module] = []
    try:
        for layer in layers:
            layer.unmerge()
            layer.disable_adapters = True
        swapped = swap_originals(model, show=True)
        yield model
    finally:
        for module in swapped:
            swap_originals(module, show=False)
        for layer, disabled, merged in before:
            layer.disable_adapters = disabled
            if merged:
                layer.merge()
