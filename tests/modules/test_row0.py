# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold rows of one tensor draw their rows of one mask, whichever way a layer runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lorakernels import (
    BlockScaling,
    DelayedScaling,
    LoRAConfig,
    LoRALinear,
    PhiloxState,
    apply_lora,
    fuse,
)
from lorakernels.parallel.context.attention import Chunks
from lorakernels.recipes import Recipe
from tests.fusion.fused_models import model_of

SPLIT = 32


RECIPES = (DelayedScaling(), BlockScaling())


def linear(device: torch.device, fp8: Recipe) -> nn.Module:
    torch.manual_seed(0)
    layer = LoRALinear(64, 48, config=LoRAConfig(r=8, lora_dropout=0.4, fp8=fp8), device=device)
    nn.init.normal_(layer.lora_B, std=0.2)
    layer.rng_state = PhiloxState(3, device)
    return layer


def compiled(device: torch.device, fp8: Recipe) -> nn.Module:
    layer = linear(device, fp8)
    layer.compile(fullgraph=True, backend="aot_eager")
    return layer


def adapters(model: nn.Module) -> list[LoRALinear]:
    return [m for m in model.modules() if isinstance(m, LoRALinear)]


def run(model: nn.Module, x: Tensor, row0: int, chunks: tuple[int, ...] = ()) -> dict[str, Tensor]:
    for adapter in adapters(model):
        adapter.row0, adapter.chunks = row0, chunks
    torch.manual_seed(5)  # nonces
    x = x.clone().requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return {"y": y.detach(), "dx": grad}


@pytest.mark.parametrize("make", [linear, compiled])
@pytest.mark.parametrize("fp8", RECIPES, ids=["delayed", "blocks"])
def test_parts_of_the_rows_have_the_masks_of_all(
    fp8: Recipe, make: Callable[[torch.device, Recipe], nn.Module], device: torch.device
) -> None:
    """FP8 with scales that an update has set, or blocks', so that parts are cast as the whole."""
    model = make(device, fp8).train()
    x = torch.randn(2 * SPLIT, 64, device=device)
    run(model, x, 0)
    for adapter in adapters(model):
        if adapter.fp8_state is not None:
            adapter.fp8_state.reduce_and_update()
    whole = run(model, x, 0)
    parts = [run(model, x[:SPLIT], 0), run(model, x[SPLIT:], SPLIT)]
    for name, value in whole.items():
        found = torch.cat([part[name] for part in parts])
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)
    without = run(model, x[SPLIT:], 0)
    assert not torch.allclose(without["y"], whole["y"][SPLIT:], rtol=0.01)
    for rank in (1, 0, 1):  # of two, which share two rows of tokens
        chunks = Chunks(rank, 2, SPLIT // 4)

        def own(rows: Tensor, chunks: Chunks = chunks) -> Tensor:
            return chunks.own(rows.unflatten(0, (2, SPLIT))).flatten(0, 1)

        part = run(model, own(x), 0, chunks)
        half = run(model, own(x)[5:], 5, chunks)
        for name, value in whole.items():
            torch.testing.assert_close(part[name], own(value), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(half[name], own(value)[5:], rtol=1e-5, atol=1e-5)
        without = run(model, own(x), 0)
        assert not torch.allclose(without["y"], part["y"], rtol=0.01)


@pytest.mark.parametrize("fp8", [None, BlockScaling()], ids=["plain", "blocks"])
def test_a_fused_layer_draws_from_its_first_row(fp8: Recipe | None, device: torch.device) -> None:
    """As the layer unfused, whose masks are those of the test above; then from another row, and of chunks.

    Over blocks one rounding of fp32 may turn some of FP8's, of few elements. Other masks change logits by more.
    """
    sizes = {} if fp8 is None else {"hidden_size": 256, "intermediate_size": 128}  # whole blocks
    models = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = model_of("Llama", **sizes).to(device)
        config = LoRAConfig(r=4, lora_dropout=0.4, fp8=fp8, target_modules="all-linear")
        apply_lora(model, config, rng_state=PhiloxState(3, device))
        for adapter in adapters(model):
            nn.init.constant_(adapter.lora_B, 0.1)
        if fused:
            how = "math" if device.type == "cuda" else "auto"
            fuse(model, attention=how, shared_dropout=False)
        models.append(model.train())
    tokens = torch.randint(64, (1, 12), device=device)
    found = []
    for row0, chunks in ((7, ()), (0, ()), (7, ()), (0, (1, 3, 3))):
        logits = []
        for model in models:
            for adapter in adapters(model):
                adapter.row0, adapter.chunks = row0, chunks
            torch.manual_seed(5)
            logits.append(model(tokens, use_cache=False).logits)
        if fp8 is None:
            torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
        assert (logits[1] - logits[0]).norm() < 0.01 * logits[0].norm()
        found.append(logits[1])
    assert torch.equal(found[0], found[2])
    for other in (found[0], found[3]):
        assert (found[1] - other).norm() > 0.05 * other.norm()
