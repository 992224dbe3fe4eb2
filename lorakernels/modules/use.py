# SPDX-License-Identifier: Apache-2.0
"""What one does with an adapted model: list its layers, merge and unmerge, switch the adapter off for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

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

    Raises:
        ValueError: no LoRALinear in `model`, or a merged weight would not be finite.
    """
    done: list[LoRALinear] = []
    for layer in _layers(model).values():
        try:
            if not layer.merged:
                layer.merge()
                done.append(layer)
        except BaseException:
            for merged in done:
                merged.unmerge()
            raise


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
