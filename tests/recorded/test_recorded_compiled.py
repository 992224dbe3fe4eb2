# SPDX-License-Identifier: Apache-2.0
"""The ops of a compiled layer launch by recordings what they launch without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels import BlockScaling, DelayedScaling, LoRAConfig, LoRALinear, batch_adapters
from lorakernels.autograd import Adapter
from lorakernels.autograd.linear.recorded import ways_of_kinds
from lorakernels.modules.linear.dora import DoRALinear
from lorakernels.recorded.node import RECORDINGS
from lorakernels.recorded.routing import without_recordings
from tests.dry_cuda import dry_cuda
from tests.recorded.recorded_layers import launches

K, N, M = 256, 384, 96
BF16 = torch.bfloat16
OPTIONS: dict[str, dict[str, Any]] = {
    "dropout": {"lora_dropout": 0.1},
    "no dropout": {"lora_dropout": 0.0},
    "rank 64": {"r": 64},
    "two adapters in one batch": {"lora_dropout": 0.0},
    "blocks": {"fp8": BlockScaling()},
    "blocks, e5m2 dy, no dropout": {"fp8": BlockScaling("HYBRID", True), "lora_dropout": 0.0},
}


def layer(name: str, device: str = "cpu") -> LoRALinear:
    torch.manual_seed(0)
    config = LoRAConfig(**{"r": 16, "lora_alpha": 32, "lora_dropout": 0.1, **OPTIONS[name]})
    made = LoRALinear.from_linear(nn.Linear(K, N, bias=False, dtype=BF16, device=device), config)
    if name.startswith("two"):
        batch_adapters(nn.ModuleDict({"only": made}), ["fr", "de"])
    nn.init.normal_(made.lora_B)
    made.site = 3
    return made


def rows(name: str) -> int:
    """csrc multiplies 128 rows of each adapter of a batch."""
    return 256 if name.startswith("two") else M


def step(
    module: LoRALinear, x: Tensor, slot: Tensor | None, needs_dx: bool = True
) -> list[Tensor | None]:
    """What a compiled layer runs in a step: y, dx unless `needs_dx` is False, dA and dB."""
    module.zero_grad()
    x = x.detach().requires_grad_(needs_dx)
    drawn = slot if module.lora_dropout else None
    y = module.traced(x, Adapter(module.lora_A, module.lora_B), drawn)
    y.backward(torch.cos(torch.arange(y.numel(), device=y.device)).view_as(y).to(y.dtype))
    return [y.detach(), x.grad, module.lora_A.grad, module.lora_B.grad]


@pytest.mark.parametrize("needs_dx", [True, False], ids=["dx", "no dx"])
@pytest.mark.parametrize("name", OPTIONS)
def test_recordings_launch_what_the_ops_launch(name: str, needs_dx: bool) -> None:
    """A model's first layers get an x that needs no gradient."""
    module, x, slot = layer(name), torch.randn(rows(name), K, dtype=BF16), torch.tensor([5, 6])
    with dry_cuda() as recorded:
        state = module.fp8_state
        if state is not None:
            recorded.name(state_x=state.forward, state_dy=state.backward)
        recorded.name(slot=slot, **module._buffers)
        recorded.name(**{name: p.data for name, p in module.named_parameters()})
        recorded.name(weight=module.stored)
        with without_recordings():
            step(module, x, slot, needs_dx)
        by_ops = launches(recorded.calls)
        assert not recorded.runs
        for _ in range(2):
            recorded.calls.clear()
            step(module, x, slot, needs_dx)
            assert launches(recorded.calls) == by_ops
        assert recorded.runs == 4 and len(RECORDINGS) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("needs_dx", [True, False], ids=["dx", "no dx"])
@pytest.mark.parametrize("name", OPTIONS)
def test_recordings_compute_what_the_ops_compute(name: str, needs_dx: bool) -> None:
    module = layer(name, "cuda")
    x, slot = (
        torch.randn(rows(name), K, dtype=BF16, device="cuda"),
        torch.tensor([5, 6], device="cuda"),
    )
    state = module.fp8_state
    before = None if state is None else state.save()
    with without_recordings():
        by_ops = step(module, x, slot, needs_dx)
    if state is not None:
        state.restore(before)
    by_recording = step(module, x, slot, needs_dx)
    for ours, theirs in zip(by_recording, by_ops, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def dora(p: float, fp8: DelayedScaling | BlockScaling, device: str = "cpu") -> DoRALinear:
    """With magnitudes, B and a bias of random values."""
    torch.manual_seed(0)
    base = nn.Linear(K, N, dtype=BF16, device=device)
    config = LoRAConfig(r=16, lora_alpha=32, lora_dropout=p, use_dora=True, fp8=fp8)
    made = DoRALinear.from_linear(base, config)
    nn.init.normal_(made.lora_B)
    nn.init.uniform_(made.lora_magnitude_vector, 0.5, 2.0)
    return made.train()


def dora_step(module: DoRALinear, x: Tensor) -> list[Tensor | None]:
    module.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(1)
    y = module(x)
    y.backward(torch.cos(torch.arange(y.numel(), device=y.device)).view_as(y).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


DORA = {
    "no dropout": (0.0, DelayedScaling()),
    "dropout": (0.1, DelayedScaling()),
    "blocks": (0.1, BlockScaling()),
}


@pytest.mark.parametrize("name", DORA)
def test_products_with_a_magnitude_launch_by_recordings_what_they_launch_without(name: str) -> None:
    """With dropout, the product of x - D(x) has a recording, too."""
    module, x = dora(*DORA[name]), torch.randn(2, M // 2, K, dtype=BF16)
    with dry_cuda() as recorded:
        state = module.fp8_state
        if state is not None:
            recorded.name(state_x=state.forward, state_dy=state.backward)
        recorded.name(**module._buffers, **{name: p.data for name, p in module.named_parameters()})
        with without_recordings():
            dora_step(module, x)
        by_ops = [call for call in launches(recorded.calls) if call[0] != "dropout_mask"]
        assert not recorded.runs
        for _ in range(2):
            recorded.calls.clear()
            dora_step(module, x)
            found = [call for call in launches(recorded.calls) if call[0] != "dropout_mask"]
            assert found == by_ops
        assert recorded.runs == (4 if name == "no dropout" else 8)
        assert module.eager_ways(ways_of_kinds()) == [""]


@pytest.mark.gpu
@pytest.mark.parametrize("name", DORA)
def test_products_with_a_magnitude_compute_by_recordings_what_they_compute_without(
    name: str,
) -> None:
    module = dora(*DORA[name], device="cuda")
    x, state = torch.randn(2, M // 2, K, dtype=BF16, device="cuda"), module.fp8_state
    before = None if state is None else state.save()
    with without_recordings():
        by_ops = dora_step(module, x)
    if state is not None:
        state.restore(before)
    by_recording = dora_step(module, x)
    for ours, theirs in zip(by_recording, by_ops, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    assert module.eager_ways(ways_of_kinds()) == [""]
