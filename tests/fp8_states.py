# SPDX-License-Identifier: Apache-2.0
"""States and models that the FP8State tests share."""

from __future__ import annotations

import torch

from lorakernels import (
    DelayedScaling,
    FP8State,
    LoRAConfig,
    apply_lora,
)


def small(names=("a", "b"), seed=0, **options):
    """A state of history length 4 after three iterations."""
    state = FP8State(names, DelayedScaling(amax_history_len=4), **options)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        rows = torch.rand(2, len(names), generator=generator)
        state.forward[0], state.backward[0] = rows.to(state.device)
        state.reduce_and_update()
    return state


def tensors(state):
    return torch.stack((state.forward, state.backward)).clone()


def addresses(state):
    return state.forward.data_ptr(), state.backward.data_ptr()


def two_layers(**options):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    report = apply_lora(model, LoRAConfig(r=4, target_modules=["0", "2"], **options))
    for layer in (model[0], model[2]):
        torch.nn.init.normal_(layer.lora_B, std=0.1)
    return model, report
