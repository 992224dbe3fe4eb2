# SPDX-License-Identifier: Apache-2.0
"""Functions over an adapted model: list its layers, merge and unmerge them, switch the adapters off for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch import nn

from lorakernels.modules.linear.frozen import is_sharded
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.linear.state_entries import apart
from lorakernels.modules.model.apply import tied_pointers, untie
from lorakernels.modules.model.trained_parts import (
    hidden_originals,
    kept_parameters,
    swap_originals,
)
from lorakernels.modules.order import refuse


def lora_modules(model: nn.Module) -> dict[str, LoRALinear]:
    """{path: layer} of every LoRALinear in `model`, in module order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def _layers(model: nn.Module) -> dict[str, LoRALinear]:
    layers = lora_modules(model)
    if not layers:
        raise ValueError(f"model has no LoRALinear: {type(model).__name__}; call apply_lora first")
    return layers


def merge_lora(model: nn.Module) -> None:
    """Add every adapter to its base weight. If one layer fails, the layers merged before it are unmerged again.

    From then on `model.state_dict()` has merged weights, and `model.save_pretrained` writes a model that transformers
    loads. `training_state_dict`, `merge_and_unload` and `export_model` write other forms. A plain weight that is tied
    to another module gets memory of its own, so that only this layer changes.

    Raises:
        ValueError: no LoRALinear in `model`, it is inside `disable_lora`, or a merged weight would not be finite.
        RuntimeError: parameters are sharded (FSDP2), in a sharded base, or split by `parallelize`.
    """
    done: list[LoRALinear] = []
    layers = _layers(model)
    refuse(model, "merge_lora", layers)
    tied = tied_pointers(model)
    for layer in layers.values():
        try:
            if not layer.merged:
                untie(layer, tied)
                layer.merge()
                done.append(layer)
        except BaseException:
            _take_all([merged.unmerge for merged in done])
            raise


def training_state_dict(model: nn.Module, **options: Any) -> dict[str, Any]:
    """`model.state_dict(**options)` with base and adapter apart, also for merged layers. Use it to resume training.

    The entries equal the unmerged model's bit for bit, but nothing is unmerged. Load them into an unmerged model.
    """
    with apart():
        state: dict[str, Any] = model.state_dict(**options)
    return state


def unmerge_lora(model: nn.Module) -> None:
    """Restore every base weight byte for byte. If a layer raises, the rest are unmerged before the exception leaves.

    Raises:
        ValueError: there is no LoRALinear in `model`.
    """
    _take_all([layer.unmerge for layer in _layers(model).values()])


@contextmanager
def disable_lora(model: nn.Module) -> Iterator[nn.Module]:
    """Inside the context, `model` computes as it did before training.

    Adapters are off and merged ones unmerged; biases and `modules_to_save` have their original values. May be nested.

    Raises:
        ValueError: there is no LoRALinear in `model`.
        RuntimeError: FSDP2 shards a bias or a module that was trained. It would go on with the trained values.
    """
    layers = list(_layers(model).values())
    before = [(layer, layer.disable_adapters) for layer in layers]
    hidden = hidden_originals(model)
    if any(is_sharded(p) for m in hidden for p in kept_parameters(m)):
        raise RuntimeError(
            "biases and modules_to_save that FSDP2 shards cannot show their original values: leave them out of it by "
            "fully_shard(..., ignored_params={...}), and average their gradients yourself"
        )
    merged: list[LoRALinear] = []
    try:
        for layer in layers:
            if layer.merged:
                merged.append(layer)
                layer.unmerge()
            layer.disable_adapters = True
        for module in hidden:
            swap_originals(module, show=True)
        yield model
    finally:
        for layer, disabled in before:
            layer.disable_adapters = disabled
        back = [partial(swap_originals, module, show=False) for module in hidden]
        _take_all([*back, *(partial(_merge_again, layer) for layer in merged)])


def _merge_again(layer: LoRALinear) -> None:
    layer.unmerge()  # in case an earlier unmerge failed half way
    layer.merge()


def _take_all(steps: Sequence[Callable[[], object]]) -> None:
    """Take every step, in order. Failed steps are tried again at the end; then the first exception is raised."""
    failed: list[tuple[Callable[[], object], BaseException]] = []
    for step in steps:
        try:
            step()
        except BaseException as error:
            failed.append((step, error))
    for step, _ in failed:
        with suppress(Exception):
            step()
    if failed:
        raise failed[0][1]
