# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold rows of one tensor draw their rows of one mask, whichever way a layer runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lorakernels import LoRAConfig, LoRALinear, PhiloxState, apply_lora, fuse, group_projections
from tests.fusion.fused_models import model_of

SPLIT = 32


def linear(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layer = LoRALinear(64, 48, config=LoRAConfig(r=8, lora_dropout=0.4), device=device)
    nn.init.normal_(layer.lora_B, std=0.2)
    layer.rng_state = PhiloxState(3, device)
    return layer


def compiled(device: torch.device) -> nn.Module:
    layer = linear(device)
    layer.compile(fullgraph=True, backend="aot_eager")
    return layer


class Sum(nn.Module):
    def __init__(self, q: nn.Module, k: nn.Module) -> None:
        super().__init__()
        self.q_proj, self.k_proj = q, k

    def forward(self, x: Tensor) -> Tensor:
        both: Tensor = self.q_proj(x) + self.k_proj(x)
        return both


def grouped(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = Sum(nn.Linear(64, 48), nn.Linear(64, 48)).to(device)
    config = LoRAConfig(r=8, lora_dropout=0.4, target_modules=["q_proj", "k_proj"])
    apply_lora(model, config, rng_state=PhiloxState(3, device))
    group_projections(model, [("q_proj", "k_proj")])
    for module in model.modules():
        if isinstance(module, LoRALinear):
            nn.init.normal_(module.lora_B, std=0.2)
    return model


def adapters(model: nn.Module) -> list[LoRALinear]:
    return [m for m in model.modules() if isinstance(m, LoRALinear)]


def run(model: nn.Module, x: Tensor, row0: int) -> dict[str, Tensor]:
    for adapter in adapters(model):
        adapter.row0 = row0
    torch.manual_seed(5)  # nonces
    x = x.clone().requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return {"y": y.detach(), "dx": grad}


@pytest.mark.parametrize("make", [linear, compiled, grouped])
def test_parts_of_the_rows_have_the_masks_of_all(
    make: Callable[[torch.device], nn.Module], device: torch.device
) -> None:
    """FP8 with scales that an update has set, so that parts are cast as the whole."""
    model = make(device).train()
    x = torch.randn(2 * SPLIT, 64, device=device)
    run(model, x, 0)
    for adapter in adapters(model):
        assert adapter.fp8_state is not None
        adapter.fp8_state.reduce_and_update()
    whole = run(model, x, 0)
    parts = [run(model, x[:SPLIT], 0), run(model, x[SPLIT:], SPLIT)]
    for name, value in whole.items():
        found = torch.cat([part[name] for part in parts])
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)
    without = run(model, x[SPLIT:], 0)
    assert not torch.allclose(without["y"], whole["y"][SPLIT:], rtol=0.01)


def test_a_fused_layer_draws_from_its_first_row(device: torch.device) -> None:
    """As the layer unfused, whose masks are those of the test above; then from another row."""
    models = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = model_of("Llama").to(device)
        config = LoRAConfig(r=4, lora_dropout=0.4, fp8=None, target_modules="all-linear")
        apply_lora(model, config, rng_state=PhiloxState(3, device))
        for adapter in adapters(model):
            nn.init.constant_(adapter.lora_B, 0.1)
        if fused:
            how = "math" if device.type == "cuda" else "auto"
            fuse(model, attention=how, shared_dropout=False)
        models.append(model.train())
    tokens = torch.randint(64, (1, 12), device=device)
    found = []
    for row0 in (7, 0, 7):
        logits = []
        for model in models:
            for adapter in adapters(model):
                adapter.row0 = row0
            torch.manual_seed(5)
            logits.append(model(tokens, use_cache=False).logits)
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
        found.append(logits[1])
    assert torch.equal(found[0], found[2]) and not torch.allclose(found[0], found[1], rtol=0.01)
