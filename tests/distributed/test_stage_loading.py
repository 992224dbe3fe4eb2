# SPDX-License-Identifier: Apache-2.0
"""load_quantized(stages=…): a rank reads its part alone, and trains on as after a load of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import BlockScaling, LoRAConfig, PhiloxState, fuse, load_quantized
from lorakernels.checkpoints.base.shards import Directory
from lorakernels.parallel import pipeline_parallel
from tests.checkpoints.test_loading_memory import Live
from tests.processes import on_ranks
from tests.small_checkpoints import LORA, config, write_checkpoint

pytestmark = pytest.mark.slow
LAYERS, STEPS, LENGTH = 4, 3, 8
DROPS = replace(LORA, target_modules="all-linear")


@dataclass(frozen=True)
class Way:
    """How a model is loaded and runs."""

    name: str
    lora: LoRAConfig = DROPS
    chunks: int = 1
    fused: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)


WAYS = (
    Way("unfused"),
    Way("interleaved, fused", chunks=2, fused=True),
    Way(
        "blocks",
        lora=replace(DROPS, fp8=BlockScaling()),
        fused=True,
        model={"hidden_size": 256, "intermediate_size": 384},
    ),
    Way("tied", model={"tie_word_embeddings": True}),
    Way("biases, some plain", lora=LORA, model={"attention_bias": True}, load={"frozen": "plain"}),
)


class Listed(Directory):
    """Notes the names of the tensors that are read, and where torch's generator stands afterwards."""

    drawn: Tensor

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.names: list[str] = []

    @contextmanager
    def open(self, shard: str) -> Iterator[Callable[[str], Tensor]]:
        with super().open(shard) as read:

            def noted(name: str) -> Tensor:
                self.names.append(name)
                return read(name)

            yield noted


def loaded(folder: Path, way: Way, stages: Any) -> tuple[Any, Listed, int]:
    """(the result, what was read, the largest sum of bytes that ops had made at a time)."""
    torch.manual_seed(5)
    source, live = Listed(folder), Live()
    options: dict[str, Any] = {"lora": way.lora, "stages": stages, **way.load}
    options["rng_state"] = PhiloxState(11, "cpu")
    with live:
        found = load_quantized(
            source, config=small(way), device="cpu", progress=False, dtype=torch.float32, **options
        )
    source.drawn = torch.get_rng_state()
    return found, source, live.peak


def small(way: Way) -> Any:
    return config(num_hidden_layers=LAYERS, **way.model)


def trained(found: Any, way: Way, mesh: Any) -> list[dict[str, Tensor]]:
    """Of each step: loss, gradients, values and scales of all ranks, and where torch's generator stands."""
    model, numbers = found.model.train(), []
    torch.manual_seed(9)
    if way.fused:
        fuse(model)
    cut = pipeline_parallel(model, mesh, microbatches=2, chunks=way.chunks)
    for step in range(STEPS):
        model.zero_grad()
        tokens = torch.randint(96, (4, LENGTH), generator=torch.Generator().manual_seed(step))
        loss = cut.forward_backward(tokens, input_ids=tokens)
        own = {"loss": loss, "generator": torch.get_rng_state()}
        own |= {f"{n}'s gradient": x for n, x in cut.whole_gradients().items()}
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p -= 0.05 * p.grad
        if found.fp8_state is not None:
            found.fp8_state.reduce_and_update(cut.ranks.group)
            own |= {"x": found.fp8_state.forward.clone(), "dy": found.fp8_state.backward.clone()}
            own["joint"] = torch.tensor(sorted(found.fp8_state.joint))
        numbers.append(own | cut.whole_adapters())
    return numbers


def compare(rank: int, device: torch.device, folder: Path, way: Way) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))["pp"]
    whole, all_of_it, most = loaded(folder, way, None)
    part, own, peak = loaded(folder, way, (mesh, way.chunks))
    expected, found = trained(whole, way, mesh), trained(part, way, mesh)
    return {
        "read": (own.names, all_of_it.names),
        "said": (part.tensors, part.bytes, sum(own.tensors[n].bytes for n in own.names)),
        "drawn": torch.equal(own.drawn, all_of_it.drawn),
        "peaks": (peak, most),
        "unequal": [
            f"{n} in step {i}"
            for i, (ours, theirs) in enumerate(zip(found, expected, strict=True))
            for n in ours.keys() | theirs.keys()
            if not torch.equal(ours[n], theirs[n])
        ],
    }


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_rank_reads_its_part_and_trains_to_the_bit_as_after_a_whole_load(
    way: Way, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, small(way), shard_bytes=300_000)
    found = on_ranks(compare, 2, "gloo", tmp_path, way)
    own = [set(rank["read"][0]) for rank in found]
    everything, shapes = set(found[0]["read"][1]), Directory(tmp_path).tensors
    tied = {"model.embed_tokens.weight"} if "tie_word_embeddings" in way.model else set()
    assert own[0] | own[1] == everything and own[0] & own[1] == tied
    stages = {0: (0, 1), 1: (2, 3)} if way.chunks == 1 else {0: (0, 2), 1: (1, 3)}
    for rank, layers in stages.items():
        prefixes = tuple(f"model.layers.{i}." for i in layers)
        inside = {name for name in everything if name.startswith(prefixes)}
        ends = {"model.embed_tokens.weight"} if rank == 0 else {"model.norm.weight", *tied}
        if rank and not tied:
            ends.add("lm_head.weight")
        assert own[rank] == inside | ends
        assert found[rank]["unequal"] == [] and found[rank]["drawn"]
        tensors, size, read = found[rank]["said"]
        assert tensors == len(own[rank]) and size == read
        part, whole = found[rank]["peaks"]
        sizes = [
            i.shape[0] * i.shape[1] for n, i in shapes.items() if is_fp8(n) and n not in own[rank]
        ]
        # a byte each, but for the block that stands for all of them, which grew once
        assert whole - part >= sum(sizes) - 2 * max(sizes)


def is_fp8(name: str) -> bool:
    return name.endswith("_proj.weight")


def refusals(rank: int, device: torch.device, folder: Path) -> dict[str, str]:
    from tests.distributed.test_pipeline import refused

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))["pp"]

    def load(lora: Any = LORA, stages: Any = mesh, **options: Any) -> Any:
        torch.manual_seed(5)
        given = {"config": config(num_hidden_layers=LAYERS), "device": "cpu", "progress": False}
        return load_quantized(folder, lora=lora, stages=stages, **(given | options))

    found = {
        "no adapters": refused(lambda: load(None)),
        "DoRA": refused(lambda: load(replace(LORA, use_dora=True))),
        "sharded": refused(lambda: load(mesh=mesh)),
        "offloaded": refused(lambda: load(offload=0.5)),
        "chunks": refused(lambda: load(stages=(mesh, 0))),
        "layers": refused(lambda: load(stages=(mesh, 3))),
        "saved": refused(lambda: load(replace(LORA, modules_to_save=["lm_head"]))),
        "dropout": refused(load),
    }
    lora = replace(LORA, lora_dropout=0.0)
    part = load(lora).model
    found["other chunks"] = refused(lambda: pipeline_parallel(part, mesh, microbatches=2, chunks=2))
    found["forward"] = refused(lambda: part(torch.zeros(1, 2, dtype=torch.int64)))
    other = load(lora, stages=None).model if rank else part
    found["one rank alone"] = refused(lambda: pipeline_parallel(other, mesh, microbatches=2))
    return found


def test_what_is_refused_is_refused_on_all_ranks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config(num_hidden_layers=LAYERS))
    said = {
        "no adapters": "stages needs lora",
        "DoRA": "use_dora=True needs whole weights",
        "sharded": "neither sharded nor offloaded",
        "offloaded": "neither sharded nor offloaded",
        "chunks": "chunks must be a positive integer, found 0",
        "layers": "4 decoder layers cannot make 6 stages",
        "saved": "trains: outside of the decoder layers",
        "dropout": "only with a PhiloxState",
        "other chunks": "2, 1 stages a rank, found rank",
        "forward": "is on rank",
        "one rank alone": "load_quantized(stages=…)",
    }
    for found in on_ranks(refusals, 2, "gloo", tmp_path):
        assert found.keys() == said.keys()
        for name, text in said.items():
            assert text in found[name], (name, found[name])
