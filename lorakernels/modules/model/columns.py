# SPDX-License-Identifier: Apache-2.0
"""Move frozen FP8 layers to the FP8State of the adapted ones, so that one update renews all scales."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.recipes import Recipe
from lorakernels.state.fp8 import FP8State


def join_state(module: FrozenFP8Linear, name: str, state: FP8State | None) -> None:
    """Move `module` to `state` under `name`, with its scales and amax histories. `in_charge` moves too, unless "auto".

    Nothing happens if `state` is None, or if `module` has no state or has this one already.
    """
    theirs = module.fp8_state
    if state is None or theirs is None or theirs is state:
        return
    module.move_state(state, name)
    if theirs.in_charge != "auto":
        state.in_charge = theirs.in_charge


def joining(
    model: nn.Module, targets: Iterable[str], recipe: Recipe | None, device: torch.device
) -> dict[str, FrozenFP8Linear]:
    """{path: layer} of the FP8 layers outside `targets` that have a state of this recipe and device.

    Raises:
        RuntimeError: the memory of such a layer's own state is pinned.
    """
    layers: dict[str, FrozenFP8Linear] = {}
    others = set(targets)
    for path, module in model.named_modules():
        if not isinstance(module, FrozenFP8Linear) or isinstance(module, LoRALinear):
            continue
        state = module.fp8_state
        if path in others or state is None or (state.recipe, state.device) != (recipe, device):
            continue
        if state.pinned_by:
            raise RuntimeError(
                f"{path} would leave its FP8State, whose memory is pinned by {state.pinned_by}: "
                "apply LoRA before capturing graphs"
            )
        layers[path] = module
    return layers
