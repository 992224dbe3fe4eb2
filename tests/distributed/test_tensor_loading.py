# SPDX-License-Identifier: Apache-2.0
"""load_quantized(tp=…): a rank reads its parts alone, and has the bits of a whole load that `parallelize` cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import BlockScaling, LoRAConfig, PhiloxState, fuse, load_quantized
from lorakernels.checkpoints.base.shards import Directory
from lorakernels.parallel import parallelize
from tests.checkpoints.test_loading_memory import Live
from tests.processes import on_ranks
from tests.small_checkpoints import LORA, config, write_checkpoint

pytestmark = pytest.mark.slow
DROPS = replace(LORA, target_modules="all-linear")
IN_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
ONE_BLOCK = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64}
BLOCKS = replace(DROPS, fp8=BlockScaling())
CUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj", "down_proj")


@dataclass(frozen=True)
class Way:
    """How a model is written, loaded and split. `scales`: of a block-FP8 checkpoint, "equal", "unequal" or "" """

    name: str
    lora: LoRAConfig = DROPS
    fused: bool = False
    scales: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)


ROWS = {"vocabulary": True}
WAYS = (
    Way("rows split, vocabulary", fused=True, split=ROWS),
    Way("rows of tokens", fused=True, load=ROWS, split=ROWS),
    Way(
        "rows of tokens, tied, with both names",
        model={"tie_word_embeddings": True},
        load=ROWS | {"frozen": "plain"},
        split=ROWS,
    ),
    Way("rows whole", split={"sequence_parallel": False}),
    Way(
        "biases, some plain, tied",
        lora=replace(LORA, bias="lora_only"),
        model={"attention_bias": True, "tie_word_embeddings": True},
        load={"frozen": "plain"},
    ),
    Way("blocks", BLOCKS, True, model=IN_BLOCKS),
    Way("blocks that were kept", BLOCKS, True, "unequal", IN_BLOCKS),
    Way("blocks that get one scale", scales="unequal", model=IN_BLOCKS),
    Way("blocks of one scale", scales="equal", model=IN_BLOCKS, fused=True),
    Way("a part is one block", scales="unequal", model=ONE_BLOCK),
)


class Noted(Directory):
    """Notes how many elements of each tensor are read; `fails` raises where it is read."""

    drawn: Tensor

    def __init__(self, path: Path, fails: str = "") -> None:
        super().__init__(path)
        self.read: dict[str, int] = {}
        self.size, self.fails = 0, fails

    @contextmanager
    def open(self, shard: str) -> Iterator[Callable[..., Tensor]]:
        with super().open(shard) as read:

            def noted(name: str, part: Any = None) -> Tensor:
                if name == self.fails:
                    raise OSError(f"cannot read {name}")
                found = read(name, part)
                self.read[name] = self.read.get(name, 0) + found.numel()
                self.size += found.numel() * found.element_size()
                return found

            yield noted


def small(way: Way) -> Any:
    return config(**way.model)


def write(folder: Path, way: Way) -> None:
    write_checkpoint(folder, small(way), shard_bytes=300_000, block_fp8=bool(way.scales))
    if way.name.endswith("both names"):
        write_both_names(folder)
    for path in folder.glob("*.safetensors") if way.scales == "unequal" else ():
        part = load_file(path)
        for name in part:
            if name.endswith("_scale_inv"):
                generator = torch.Generator().manual_seed(len(name))
                part[name] = part[name] * torch.rand(part[name].shape, generator=generator)
        save_file(part, path, {"format": "pt"})


def write_both_names(folder: Path) -> None:
    """Some checkpoints have a tied head, too."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = index["weight_map"]["lm_head.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))
    tensors = load_file(folder / shard)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / shard, {"format": "pt"})


def loaded(folder: Path, way: Way, tp: Any, device: torch.device) -> tuple[Any, Noted, int]:
    """(the result, what was read, the largest sum of bytes that ops had made at a time)."""
    torch.manual_seed(5)
    source, live = Noted(folder), Live()
    options: dict[str, Any] = {"lora": way.lora, "tp": tp, **way.load}
    if tp is None:
        options.pop("vocabulary", None)
    options["rng_state"] = PhiloxState(11, device)
    with live:
        found = load_quantized(
            source, config=small(way), device=device, progress=False, dtype=torch.float32, **options
        )
    source.drawn = torch.get_rng_state()
    return found, source, live.peak


def numbers(found: Any, way: Way, mesh: Any) -> dict[str, Any]:
    """All tensors of the split model, and loss, gradients and scales of a step."""
    model = found.model.train()
    if way.fused:
        fuse(model)
    split = parallelize(model, mesh, **way.split)
    got = {n: x.detach().clone() for n, x in (*model.named_parameters(), *model.named_buffers())}
    torch.manual_seed(9)
    tokens = torch.randint(96, (2, 8), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(next(model.parameters()).device)
    if way.split.get("vocabulary"):
        loss = split.loss(tokens, input_ids=tokens)
    else:
        loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    got |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    if found.fp8_state is not None:
        found.fp8_state.reduce_and_update()
        got |= {"scales of x": found.fp8_state.forward, "of dy": found.fp8_state.backward}
    return got | {"loss": loss.detach(), "said": str(split)}


def same(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, Tensor):
        return bool(ours == theirs)
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (ours, theirs)))


def compare(device: torch.device, folder: Path, way: Way, mesh: Any) -> dict[str, Any]:
    whole, all_of_it, most = loaded(folder, way, None, device)
    part, own, peak = loaded(folder, way, mesh, device)
    tokens = torch.arange(16, device=device).view(2, 8)
    with torch.no_grad():
        alone = whole.model(tokens).logits
        near = (part.model(tokens).logits - alone).norm() / alone.norm()
    expected, found = numbers(whole, way, mesh), numbers(part, way, mesh)
    return {
        "read": (own.read, all_of_it.read),
        "said": (part.bytes, own.size, part.peak_host_bytes, whole.peak_host_bytes),
        "drawn": torch.equal(own.drawn, all_of_it.drawn),
        "peaks": (peak, most),
        "near": float(near),
        "names": expected.keys() == found.keys(),
        "unequal": [n for n, x in expected.items() if not same(found[n], x)],
    }


def worker(rank: int, device: torch.device, folder: Path, ways: tuple[Way, ...]) -> dict[str, Any]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))["tp"]
    return {way.name: compare(device, folder / way.name, way, mesh) for way in ways}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tp")
    for way in WAYS:
        write(folder / way.name, way)
    return on_ranks(worker, 2, "gloo", folder, WAYS)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_parts_that_were_read_are_those_of_the_whole(way: Way, results: Any) -> None:
    for each in results:
        found = each[way.name]
        assert found["names"] and found["unequal"] == [] and found["drawn"]
        own, everything = found["read"]
        assert own.keys() == everything.keys()
        tokens = ("embed_tokens", "lm_head") if way.load.get("vocabulary") else ()
        cut = (*CUT, *tokens)
        halves = {n for n in own if n.endswith(".weight") and n.split(".")[-2] in cut}
        assert len(halves) == 14 + len(tokens)
        assert all(2 * own[n] == everything[n] for n in halves), "a weight was read twice or whole"
        assert all(own[n] == everything[n] for n in own.keys() - halves)
        said, size, host, whole_host = found["said"]
        assert said == size and host < whole_host
        part, whole = found["peaks"]
        held = sum(everything[n] for n in halves)
        largest = max(everything[n] for n in halves)
        # half of the bytes, but for the block that stands for all of them, which grew once
        assert whole - part >= held / 2 - 2 * largest
        # FP8 over ranks turns single roundings of x and of sums
        assert found["near"] < 2.0**-3


def test_four_parts(tmp_path: Path) -> None:
    way = replace(WAYS[0], model={"num_key_value_heads": 4})
    write(tmp_path / way.name, way)
    for each in on_ranks(worker, 4, "gloo", tmp_path, (way,)):
        found = each[way.name]
        assert found["names"] and found["unequal"] == [] and found["drawn"]
        own, everything = found["read"]
        assert sum(4 * own[n] == everything[n] for n in own) == 14


@pytest.mark.gpu
def test_parts_on_two_gpus(tmp_path: Path) -> None:
    """What is loaded. Sums by atomics may have another order in the step."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for way in WAYS:
        write(tmp_path / way.name, way)
    computed = ("gradient of", "scales of x", "of dy", "loss")
    for each in on_ranks(worker, 2, "nccl", tmp_path, WAYS):
        for way in WAYS:
            found = each[way.name]
            assert found["names"] and found["drawn"] and found["near"] < 2.0**-3
            assert [n for n in found["unequal"] if not n.startswith(computed)] == []
            own, everything = found["read"]
            halves = 16 if way.load.get("vocabulary") else 14
            assert sum(2 * own[n] == everything[n] for n in own) == halves


def refused(work: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, TypeError, RuntimeError, OSError)) as error:
        work()
    return f"{type(error.value).__name__}: {error.value}"


def refusals(rank: int, device: torch.device, folder: Path) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]

    def load(lora: Any = LORA, tp: Any = mesh, source: Any = None, **options: Any) -> Any:
        torch.manual_seed(5)
        name = options.pop("folder", "plain")
        given = {"config": config(), "device": "cpu", "progress": False} | options
        return load_quantized(source or folder / name, lora=lora, tp=tp, **given)

    reads = [Noted(folder / name) for name in ("one key head", "plain", "plain")]
    sizes = config(**IN_BLOCKS)
    found = {
        "no adapters": refused(lambda: load(None)),
        "DoRA": refused(lambda: load(replace(LORA, use_dora=True))),
        "sharded": refused(lambda: load(mesh=mesh)),
        "offloaded": refused(lambda: load(offload=0.5)),
        "stages": refused(lambda: load(stages=mesh)),
        "heads": refused(lambda: load(source=reads[0], config=config(num_key_value_heads=1))),
        "plan": refused(lambda: load(tp=(mesh, {"*.wq": "column"}), source=reads[1])),
        "block": refused(lambda: load(folder="in blocks")),
        "recipe": refused(lambda: load(replace(LORA, fp8=BlockScaling()), source=reads[2])),
        "not finite": refused(lambda: load(folder="not finite")),
        "no read": refused(
            lambda: load(
                source=Noted(folder / "plain", "model.layers.1.mlp.up_proj.weight" if rank else "")
            )
        ),
        "another": refused(
            lambda: load(folder="wide" if rank else "plain", config=sizes if rank else config())
        ),
    }
    found["another choice"] = refused(
        lambda: load(source=reads[1], frozen="plain" if rank else "fp8")
    )
    rows = {"vocabulary": True, "source": reads[1]}
    found["rows without tp"] = refused(lambda: load(tp=None, **rows))
    found["rows by a plan"] = refused(lambda: load(tp=(mesh, {"*.q_proj": "column"}), **rows))
    found["rows that train"] = refused(
        lambda: load(replace(LORA, target_modules=["lm_head"]), **rows)
    )
    found["rows of one rank"] = refused(lambda: load(source=reads[1], vocabulary=bool(rank)))
    assert not any(source.read for source in reads)
    lora = replace(LORA, lora_dropout=0.0, target_modules="all-linear")
    part = load(lora).model
    found["other plan"] = refused(lambda: parallelize(part, mesh, {"*.q_proj": "column"}))
    found["other mesh"] = refused(lambda: parallelize(part, other))
    torch.manual_seed(5)
    read = load(lora, vocabulary=True).model
    found["rows left whole"] = refused(lambda: parallelize(read, mesh))
    one = part if rank else load(lora, None).model
    found["one rank alone"] = refused(lambda: parallelize(one, mesh))
    fuse(part)
    found["fused"] = refused(lambda: part(torch.zeros(1, 2, dtype=torch.int64)))
    parallelize(part, mesh)
    found["again"] = refused(lambda: parallelize(part, mesh))
    return found


def test_what_is_refused_is_refused_on_all_ranks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", config())
    write_checkpoint(tmp_path / "one key head", config(num_key_value_heads=1))
    write_checkpoint(tmp_path / "wide", config(**IN_BLOCKS))
    write_checkpoint(tmp_path / "in blocks", config(), block_fp8=True)
    write_checkpoint(tmp_path / "not finite", config())
    name = "model.layers.1.self_attn.k_proj.weight"
    path = tmp_path / "not finite" / Directory(tmp_path / "not finite").tensors[name].shard
    tensors = load_file(path)
    tensors[name][-1, 0] = torch.inf  # in rank 1's part
    save_file(tensors, path, {"format": "pt"})
    said = {
        "no adapters": "tp needs lora",
        "DoRA": "use_dora=True needs whole weights",
        "sharded": "call shard_base after parallelize",
        "offloaded": "call shard_base after parallelize",
        "stages": "tp does not go with stages",
        "heads": "num_key_value_heads must be a multiple of the 2 ranks, found 1",
        "plan": "plan['*.wq'] matches no linear layer",
        "block": "q_proj.weight_scale_inv has a scale for each 128 of 144: a part of 72 would end inside a block",
        "recipe": "which must be a multiple of 2 ranks · 128",
        "not finite": "layers.1.self_attn.k_proj.weight: weight must be finite",
        "no read": "cannot read model.layers.1.mlp.up_proj.weight",
        "another": "the checkpoint of rank 1 must be as on rank 0",
        "another choice": "the layers in FP8 of rank 1 must be as on rank 0",
        "rows without tp": "vocabulary=True needs tp",
        "rows by a plan": "vocabulary=True needs a model of transformers",
        "rows that train": "vocabulary=True takes a frozen embedding and head, lm_head is to be trained",
        "rows of one rank": "vocabulary of rank 1 must be as on rank 0",
        "rows left whole": "vocabulary must be True, as for load_quantized(tp=…)",
        "other plan": "plan must be the one that load_quantized(tp=…) was given",
        "other mesh": "mesh must be the one that load_quantized(tp=…) was given",
        "one rank alone": "the ways of loading them differ",
        "fused": "call parallelize before it runs",
        "again": "is split over tensor-parallel ranks (and 13 more): call parallelize once",
    }
    for rank, found in enumerate(on_ranks(refusals, 2, "gloo", tmp_path)):
        assert found.keys() == said.keys()
        for name, text in said.items():
            assert text in found[name], (rank, name, found[name])
        told = ("not finite", "no read")
        assert all(("rank 1: " in found[name]) == (rank == 0) for name in told)
