# SPDX-License-Identifier: Apache-2.0
"""Frozen layers beside adapted ones: on the model's one FP8State, so that one update serves all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lorakernels.config import DelayedScaling
from lorakernels.modules.frozen import FrozenFP8Linear
from lorakernels.modules.lora import LoRALinear
from lorakernels.state.fp8 import FP8State


def join_state(module: FrozenFP8Linear, name: str, state: FP8State | None) -> None:
    """`module` comes to `state` as `name`, with its histories and whoever is in charge of them."""
    theirs = module.fp8_state
    if state is None or theirs is None or theirs is state:
        return
    column = state.column(name) if name in state.names else state.register(name)
    state.set_values(column, theirs.values(module._column))
    if theirs.in_charge != "auto":
        state.in_charge = theirs.in_charge
    module.fp8_state, module._column, module.name = state, column, name


def joining(
    model: nn.Module, targets: Iterable[str], recipe: DelayedScaling | None, device: torch.device
) -> dict[str, FrozenFP8Linear]:
    """{path: layer} of the FP8 layers that are no `targets` and may come to a state of this recipe and device.

    Raises:
        RuntimeError: the memory of such a layer's own state is pinned.
    """
    found: dict[str, FrozenFP8Linear] = {}
    others = set(targets)
    for path, module in model.named_modules():
        if not isinstance(module, FrozenFP8Linear) or isinstance(module, LoRALinear):
            continue
        own = module.fp8_state
        if path in others or own is None or (own.recipe, own.device) != (recipe, device):
            continue
        if own.pinned_by:
            raise RuntimeError(
                f"{path} would leave its FP8State, whose memory is pinned by {own.pinned_by}: "
                "apply LoRA before capturing graphs"
            )
        found[path] = module
    return found
