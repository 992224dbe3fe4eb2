# SPDX-License-Identifier: Apache-2.0
"""Our side of a model: adapters where they are wanted, every other projection frozen in FP8, one FP8State for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lorakernels import (
    DelayedScaling,
    FP8State,
    FrozenFP8Linear,
    LoRAConfig,
    LoRALinear,
    LoRAReport,
    apply_lora,
)

RANK, ALPHA = 16, 32


def adapt_in_fp8(
    model: nn.Module,
    targets: Iterable[str],
    *,
    p: float,
    rng_state: Any = None,
    adapter_dtype: torch.dtype = torch.float32,
) -> LoRAReport:
    """`apply_lora` with R = 16 and alpha = 32; the decoder layers' other linear layers become FrozenFP8Linear."""
    config = LoRAConfig(
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=p,
        target_modules=list(targets),
        fp8=DelayedScaling(),
    )
    report = apply_lora(model, config, adapter_dtype=adapter_dtype, rng_state=rng_state)
    assert report.fp8_state is not None
    hold_in_fp8(model, report.fp8_state)
    return report


def hold_in_fp8(model: nn.Module, state: FP8State) -> None:
    """Every linear layer of model.model.layers that has no adapter: frozen in FP8, its scales in `state`."""
    layers: Any = model.get_submodule("model.layers")
    for path, old in list(layers.named_modules(prefix="model.layers")):
        if isinstance(old, LoRALinear) or not isinstance(old, (nn.Linear, FrozenFP8Linear)):
            continue
        if isinstance(old, FrozenFP8Linear):
            old.move_state(state, path)
            continue
        state.register(path)
        parent, _, name = path.rpartition(".")
        new = FrozenFP8Linear.from_linear(old, state.recipe, fp8_state=state, name=path)
        setattr(model.get_submodule(parent), name, new)
