# SPDX-License-Identifier: Apache-2.0
"""attach under DistributedDataParallel: scales are everybody's, masks each rank's, replays as eager ranks compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import DelayedScaling, LoRAConfig, apply_lora, attach
from lorakernels.modules.linear import frozen
from lorakernels.parallel import parallelize
from tests.fusion.fused_models import LINEARS, VOCABULARY, adapted
from tests.graphs.layers import backend_for
from tests.processes import on_ranks

pytestmark = pytest.mark.slow

WORLD, STEPS, WIDTH = 2, 7, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(rank: int, device: torch.device, graphs: bool, dropout: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16)
    recipe = DelayedScaling(amax_history_len=4)
    lora = LoRAConfig(
        r=8, lora_dropout=dropout, target_modules=["layers.0.0", "layers.1.0"], fp8=recipe
    )
    state = apply_lora(model, lora).fp8_state
    wrapped = nn.parallel.DistributedDataParallel(model.train())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    attached = attach(wrapped, optimizer, graphs=graphs, backend=backend_for(device))
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(STEPS):
        x = torch.randn(32, WIDTH, generator=generator).to(device, torch.bfloat16) * (1 + rank)
        wrapped(x).float().square().mean().backward()
        if step != 1:  # left out on every rank
            optimizer.step()
        optimizer.zero_grad()
    assert attached.replaying is graphs and attached.replayed == (3 if graphs else 0)
    found = {
        "adapters": [p.detach().float().cpu() for p in trained],
        "scales": [state.forward.cpu().clone(), state.backward.cpu().clone()],
        "seeds": [s.seed for s in attached.rng_states],
    }
    attached.detach()
    return found


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        frozen.STORAGE = torch.uint8  # gloo broadcasts no FP8
    return {
        "eager": train(rank, device, False, 0.0),
        "replayed": train(rank, device, True, 0.0),
        "dropout": train(rank, device, True, 0.3),
    }


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def found(request: Any) -> list[dict[str, Any]]:
    if request.param == "nccl" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs, found {torch.cuda.device_count()}")
    return on_ranks(worker, WORLD, request.param)


def test_replays_are_what_eager_ranks_compute(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for what in ("adapters", "scales"):
            pairs = zip(rank["eager"][what], rank["replayed"][what], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), what


@pytest.mark.parametrize("how", ["eager", "replayed", "dropout"])
def test_adapters_and_scales_are_equal_on_all_ranks(found: list[dict[str, Any]], how: str) -> None:
    adapters = zip(found[0][how]["adapters"], found[1][how]["adapters"], strict=True)
    assert all(torch.equal(a, b) for a, b in adapters)
    for one, other in zip(found[0][how]["scales"], found[1][how]["scales"], strict=True):
        assert one[-1].any() and torch.equal(one[1:], other[1:])


def test_masks_are_each_ranks_own(found: list[dict[str, Any]]) -> None:
    seeds = [rank["dropout"]["seeds"] for rank in found]
    assert len(seeds[0]) == len(seeds[1]) == 1 and seeds[0] != seeds[1]
    assert all(rank["replayed"]["seeds"] == [] for rank in found)


def split(rank: int, device: torch.device) -> dict[str, Any]:
    """Seeds, and A of a column layer, which all ranks hold whole, after a step of a model that is split over them."""
    model = adapted("Llama", LINEARS, lora_dropout=0.5)
    parallelize(model, init_device_mesh("cpu", (WORLD,)), sequence_parallel=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    attached = attach(model.train(), optimizer, graphs=True, backend=backend_for(device))
    ids = torch.arange(24).view(2, 12) % VOCABULARY
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    lora_A = model.model.layers[0].self_attn.q_proj.lora_A.detach().clone()
    found = {"seeds": [s.seed for s in attached.rng_states], "A": lora_A}
    attached.detach()
    return found


def test_ranks_that_hold_layers_together_draw_one_mask() -> None:
    """Masks of its own would give each rank another gradient of an A that all hold whole."""
    first, second = on_ranks(split, WORLD, "gloo")
    assert first["seeds"] and first["seeds"] == second["seeds"]
    assert torch.equal(first["A"], second["A"])
