# SPDX-License-Identifier: Apache-2.0
"""`modules_to_save`: modules trained whole beside the adapters. Their originals are kept to show the base again."""

from __future__ import annotations

import copy

from torch import nn

_ORIGINAL = "_lorakernels_original"


def mark_saved(module: nn.Module) -> None:
    """Make every parameter trainable and keep a frozen copy of the module as it is now."""
    original = copy.deepcopy(module).requires_grad_(False)
    module.requires_grad_(True)
    object.__setattr__(module, _ORIGINAL, original)  # not a child: absent from state_dict


def saved_modules(model: nn.Module) -> dict[str, nn.Module]:
    """{path: module} of the modules that `apply_lora` marked."""
    return {name: m for name, m in model.named_modules() if _ORIGINAL in m.__dict__}


def swap_original(module: nn.Module) -> None:
    """Exchange the trained values with the original ones; a second call exchanges them back."""
    original = module.__dict__[_ORIGINAL]
    pairs = zip(module.parameters(), original.parameters(), strict=True)
    for now, then in pairs:
        now.data, then.data = then.data.to(now.device, now.dtype), now.data
