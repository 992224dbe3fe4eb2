# SPDX-License-Identifier: Apache-2.0
"""Fused layers replayed by GraphManager: two layers, two microbatches, equal bits to the eager fused layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lorakernels import DelayedScaling, PhiloxState, fuse
from tests.fusion.fused_models import ATTENTION, LINEARS, VOCABULARY, adapted, an_adapter
from tests.graphs.layers import managed

STEPS, WARMUP = 3, 2


def parts(model: nn.Module) -> tuple:
    projection = an_adapter(model)
    return projection.fp8_state, projection.rng_state


def iteration(model: nn.Module, batches: torch.Tensor, nested: bool, optimizer) -> list:
    """Everything that one update's forward and backward computed."""
    losses, found = [], []
    for x in batches:
        losses.append(model(x, labels=x, use_cache=False).loss)
        found.append(losses[-1].detach().clone())
        if not nested:
            losses.pop().backward()
    for loss in reversed(losses):
        loss.backward()
    found += [p.grad.clone() for p in model.parameters() if p.requires_grad]
    optimizer.step()
    optimizer.zero_grad()
    fp8, rng = parts(model)
    fp8.reduce_and_update()
    return [*found, fp8.forward.clone(), fp8.backward.clone(), rng.tensor.clone()]


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True], ids=["one by one", "both in flight"])
@pytest.mark.parametrize(
    ("family", "save", "targets", "shared"),
    [
        ("Llama", "recompute", ATTENTION, True),
        ("Llama", "recompute", LINEARS, False),
        ("Llama", "full", LINEARS, True),
        ("Llama", "fp8", LINEARS, True),
        ("Llama", "checkpoint", LINEARS, True),
        ("Phi3", "recompute", ATTENTION, True),
        ("Phi3", "fp8", LINEARS, True),
        ("Phi3", "checkpoint", LINEARS, False),
        ("Granite", "recompute", ATTENTION, True),
        ("SmolLM3", "recompute", LINEARS, True),
        ("Olmo2", "recompute", LINEARS, True),
        ("Gemma2", "checkpoint", ATTENTION, True),
    ],
    ids=lambda v: v if isinstance(v, str) else str(v if isinstance(v, bool) else len(v)),
)
def test_replay_is_bit_equal(
    device: torch.device, family: str, save: str, targets, shared: bool, nested: bool
) -> None:
    rng = PhiloxState(11, device)
    model = adapted(
        family,
        targets,
        model={"hidden_size": 64, "intermediate_size": 96},
        device=device,
        dtype=torch.bfloat16,
        fp8=DelayedScaling(amax_history_len=4),
        lora_dropout=0.1,
        rng_state=rng,
    )
    # The math backend: the others' backward adds with atomics, whose bits differ from run to run
    attention = "auto" if family == "Gemma2" else "math"  # its capped scores have one formula
    fuse(model, save=save, shared_dropout=shared, attention=attention)
    twin = copy.deepcopy(model)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
        for m in (model, twin)
    ]
    manager = managed(
        model.model.layers,
        device,
        num_microbatches=2,
        warmup_steps=WARMUP,
        fp8_state=parts(model)[0],
        rng_states=[rng],
    )
    for step in range(WARMUP + STEPS):
        replaying = manager.phase == "replaying"
        batches = torch.randint(VOCABULARY, (2, 2, 16), device=device)
        start = torch.get_rng_state()
        found = iteration(model, batches, nested, optimizers[0])
        torch.set_rng_state(start)
        if not replaying:
            expected = iteration(twin, batches, nested, optimizers[1])
        else:
            expected = replayed(twin, batches, nested, optimizers[1], manager)
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(a, b), (step, index, len(found))
        manager.end_iteration()
    assert manager.phase == "replaying"
    manager.close()


def replayed(twin: nn.Module, batches: torch.Tensor, nested: bool, optimizer, manager) -> list:
    """What a replay draws: from the CPU generator as it was at capture, once per captured block."""
    if nested:
        torch.set_rng_state(manager.cpu_rng_at_capture)
        found = iteration(twin, batches, nested, optimizer)
        parts(twin)[1].advance()
        found[-1] = parts(twin)[1].tensor.clone()
        return found
    found, losses = [], []
    for x in batches:
        torch.set_rng_state(manager.cpu_rng_at_capture)
        losses.append(twin(x, labels=x, use_cache=False).loss)
        losses[-1].backward()
        parts(twin)[1].advance()
    found = [loss.detach().clone() for loss in losses]
    found += [p.grad.clone() for p in twin.parameters() if p.requires_grad]
    optimizer.step()
    optimizer.zero_grad()
    fp8, rng = parts(twin)
    fp8.reduce_and_update()
    return [*found, fp8.forward.clone(), fp8.backward.clone(), rng.tensor.clone()]
