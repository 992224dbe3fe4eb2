# SPDX-License-Identifier: Apache-2.0
"""A sharded base computes what the whole one does, bit for bit: losses, gradients, adapters, FP8 scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import BlockScaling, DelayedScaling, FrozenFP8Linear, LoRAConfig, apply_lora
from lorakernels.parallel import Offload, shard_base
from tests.distributed.sharded_models import LAYERS, STEPS, Way, compare
from tests.fusion.fused_models import model_of
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
OFFLOAD = {"offload": Offload(0.3, 2**34)}
FUSED = {f"fused {save}": Way(save) for save in ("recompute", "full", "fp8", "checkpoint")}
WAYS = {
    **FUSED,
    "unfused": Way(),
    "Phi3": Way("recompute", family="Phi3"),
    "checkpointed": Way(checkpoint=False),
    "checkpointed reentrantly": Way(checkpoint=True),
    "fused checkpointed": Way("recompute", checkpoint=False),
    "fused checkpointed reentrantly": Way("full", checkpoint=True),
    "compiled by layers": Way(compiled=True, poison=True),
    "in DDP": Way("recompute", ddp=True),
    "poisoned": Way("checkpoint", poison=True),
    "poisoned checkpointed": Way(checkpoint=True, poison=True),
    "delayed": Way("recompute", delayed=True),
    "two forwards": Way("recompute", step="two forwards"),
    "interrupted": Way("recompute", step="interrupted"),
    "interrupted poisoned": Way(step="interrupted", poison=True),
    "three slots": Way("recompute", options={"slots": 3, "prefetch": 2}),
    "one slot": Way("recompute", options={"slots": 1, "prefetch": 0}),
    "offloaded": Way("recompute", options=OFFLOAD),
    "offloaded poisoned": Way(checkpoint=True, poison=True, options=OFFLOAD),
    "more slots than layers": Way("recompute", options={"slots": LAYERS + 1}),
}
SPLIT = {"embeddings": True}
EMBEDDINGS = {
    "embeddings": Way("recompute", options=SPLIT),
    "embeddings, chunked loss": Way("recompute", step="chunked", options=SPLIT),
    "embeddings, tied": Way(tied=True, step="chunked", options=SPLIT),
    "embeddings, checkpointed reentrantly, poisoned": Way(
        checkpoint=True, poison=True, options=SPLIT
    ),
    "embeddings, two forwards": Way("recompute", step="two forwards", tied=True, options=SPLIT),
    "embeddings, interrupted": Way("recompute", step="interrupted", options=SPLIT),
    "embeddings, in DDP": Way("recompute", ddp=True, options=SPLIT),
    "embeddings, delayed": Way("recompute", delayed=True, options=SPLIT),
    "embeddings, compiled by layers": Way(compiled=True, options=SPLIT),
    "embeddings, offloaded": Way("recompute", options={**OFFLOAD, **SPLIT}),
    "embeddings of Gemma 3": Way(family="Gemma3", tied=True, options=SPLIT),
    "embeddings, one slot": Way("full", options={"slots": 1, "prefetch": 0, **SPLIT}),
}
BLOCKS = {"recipe": BlockScaling(), "sizes": {"hidden_size": 256, "intermediate_size": 384}}
HYBRID = {**BLOCKS, "recipe": BlockScaling("HYBRID", power_2_scale=True)}
IN_BLOCKS = {
    "blocks": Way(**BLOCKS),
    "blocks of a ragged size": Way(recipe=BlockScaling()),
    "blocks fused": Way("recompute", **HYBRID),
    "blocks fused poisoned": Way("full", poison=True, **BLOCKS),
    "blocks offloaded": Way("recompute", options=OFFLOAD, **BLOCKS),
    "blocks offloaded, unfused, poisoned": Way(poison=True, options=OFFLOAD, **BLOCKS),
    "blocks compiled by layers": Way(compiled=True, poison=True, **BLOCKS),
}
SOME = ("fused recompute", "checkpointed reentrantly")
SOME_EMBEDDINGS = ("embeddings, chunked loss", "embeddings, two forwards")
WORLDS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "1 rank": ((1,), (*SOME, *SOME_EMBEDDINGS)),
    "2 ranks": ((2,), tuple(WAYS)),
    "2 ranks in blocks": ((2,), tuple(IN_BLOCKS)),
    "2 ranks, embeddings": ((2,), tuple(EMBEDDINGS)),
    "4 ranks": ((4,), (*SOME, *SOME_EMBEDDINGS)),
    "2 x 4 ranks": ((2, 4), (*SOME, *SOME_EMBEDDINGS)),
}
Compared = dict[str, tuple[list[str], list[int]]]


def worker(
    rank: int, device: torch.device, shape: tuple[int, ...], names: tuple[str, ...]
) -> Compared:
    mesh = init_device_mesh(
        device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :]
    )
    return {
        name: compare((WAYS | EMBEDDINGS | IN_BLOCKS)[name], mesh["dp_shard"], rank, device)
        for name in names
    }


_ran: dict[str, list[Compared]] = {}


def results(world: str) -> list[Compared]:
    """Of every rank. The ranks of one world run all its ways."""
    if world not in _ran:
        shape, names = WORLDS[world]
        _ran[world] = on_ranks(worker, torch.tensor(shape).prod().item(), "gloo", shape, names)
    return _ran[world]


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world, (_, names) in WORLDS.items() for name in names]
)
def test_bits_are_those_of_the_whole_base(world: str, name: str) -> None:
    for rank, found in enumerate(results(world)):
        assert found[name][0] == [], (rank, found[name][0][:5])


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("fused recompute", 2),
        ("fused checkpoint", 2),
        ("checkpointed", 2),
        ("checkpointed reentrantly", 2),
        ("three slots", 3),
        ("one slot", 1),
        ("more slots than layers", LAYERS),
    ],
)
def test_the_last_layers_stay_at_both_turns(name: str, slots: int) -> None:
    per_step = 2 * (LAYERS - slots)
    for found in results("2 ranks"):
        assert found[name][1] == [LAYERS + per_step // 2, *[per_step] * (STEPS - 1)]


def test_a_base_of_two_recipes_is_offloaded_as_it_is() -> None:
    """Layer 0 was in blocks before, and is no target: each layer keeps its recipe, and its bits."""

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = model_of("Llama", hidden_size=64, intermediate_size=96)
        for module in list(model.model.layers[0].modules()):
            for name, linear in list(module.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(module, name, FrozenFP8Linear.from_linear(linear, BlockScaling()))
        config = LoRAConfig(r=4, target_modules=r".*layers\.1\..*(q_proj|down_proj)")
        return model, apply_lora(model, config, frozen="fp8")

    (away, report), (whole, _) = make(), make()
    shown = {row.name: row.reason for row in report.modules}
    assert shown["model.layers.0.mlp.up_proj"].endswith("e4m3 in blocks")
    recipes = [layer.mlp.up_proj.recipe for layer in away.model.layers]
    assert recipes == [BlockScaling(), DelayedScaling()]
    shard_base(away, offload=Offload(0.5, 2**34))
    ids, found = torch.arange(16).view(2, 8), []
    for model in (away, whole):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == 5 and all(map(torch.equal, *found))
