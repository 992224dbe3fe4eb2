# SPDX-License-Identifier: Apache-2.0
"""load_quantized(mesh=): the shards of load_quantized and shard_base, without the whole base on any rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import BlockScaling, apply_lora, fuse, load_quantized
from lorakernels.modules.marks import is_held
from lorakernels.parallel import shard_base
from lorakernels.parallel.base import stores
from lorakernels.parallel.ranks import comm
from lorakernels.recipes import Recipe
from lorakernels.train.model.model import reproducible
from tests.checkpoints.test_loading_memory import Counting, Live
from tests.checkpoints.test_loading_refusals import damage
from tests.processes import on_ranks
from tests.small_checkpoints import LORA, block_fp8, config, write_checkpoint

LAYERS = 5


def mesh(kind: str = "cpu") -> Any:
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))[
        "dp_shard"
    ]


def load(folder: Path, **options: Any) -> Any:
    torch.manual_seed(5)
    return load_quantized(folder, progress=False, **{"device": "cpu", "lora": LORA, **options})


def step(loaded: Any) -> dict[str, Tensor]:
    """Loss, gradients and FP8 state of a training step, and the logits of an evaluation after it."""
    model = loaded.model.train()
    torch.manual_seed(7)
    ids = torch.arange(24, device=model.device).view(2, 12)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found["loss"] = loss.detach()
    if loaded.fp8_state is not None:
        loaded.fp8_state.reduce_and_update()
        found["forward"] = loaded.fp8_state.forward.clone()
    with torch.no_grad():
        return found | {"evaluated": model.eval()(input_ids=ids).logits}


def compare(
    rank: int,
    device: torch.device,
    folder: Path,
    fused: bool,
    recipe: Recipe | None = None,
    embeddings: bool = False,
) -> dict[str, Any]:
    """What a step gives with a base that was loaded into shards, sharded after loading, and not sharded."""
    with reproducible(True):
        options: dict[str, Any] = {
            "device": device,
            "attn_implementation": "sdpa" if fused else "eager",
            "lora": LORA if recipe is None else replace(LORA, fp8=recipe),
        }
        into = load(folder, mesh=mesh(device.type), embeddings=embeddings, **options)
        after, whole = load(folder, **options), load(folder, **options)
        if fused:
            for loaded in (into, after, whole):
                fuse(loaded.model, attention="math")
        base = shard_base(after.model, mesh(device.type), embeddings=embeddings)
        assert embeddings == ("lm_head: " in str(base))
        equal = [
            torch.equal(base.shards.memory, into.sharded.shards.memory),
            base.shards.blocks == into.sharded.shards.blocks,
            str(base) == str(into.sharded),
            list(after.model.state_dict()) == list(into.model.state_dict()),
        ]
        steps = [step(loaded) for loaded in (into, after, whole)]
    different = [n for n in steps[2] for s in steps[:2] if not torch.equal(s[n], steps[2][n])]
    return {"equal": equal, "different": different, "count": [len(s) for s in steps]}


def check(found: dict[str, Any]) -> None:
    assert found["equal"] == [True] * 4 and found["different"] == []
    assert found["count"][0] == found["count"][2] > 8


@pytest.mark.parametrize(
    ("world", "fused", "fp8"),
    [(2, True, False), (3, False, True)],
    ids=["2 ranks, fused", "3 ranks, unfused, block-FP8"],
)
def test_equal_to_sharding_what_was_loaded_and_to_the_whole_base(
    world: int, fused: bool, fp8: bool, tmp_path: Path
) -> None:
    if fp8:
        block_fp8(tmp_path, False)
    else:
        write_checkpoint(tmp_path, config(num_hidden_layers=LAYERS), shard_bytes=300_000)
    for found in on_ranks(compare, world, "gloo", tmp_path, fused):
        check(found)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_blocks_are_sharded_as_the_checkpoint_has_them(fused: bool, tmp_path: Path) -> None:
    if fused:  # whole blocks of each of q, k and v
        sizes = {"hidden_size": 256, "intermediate_size": 384, "num_key_value_heads": 2}
        write_checkpoint(tmp_path, config(**sizes, num_attention_heads=4))
    else:
        block_fp8(tmp_path, False)
    for found in on_ranks(compare, 2, "gloo", tmp_path, fused, BlockScaling()):
        check(found)


@pytest.mark.parametrize("tied", [False, True], ids=["two weights", "tied"])
def test_embedding_and_head_are_split_behind_the_layers(tied: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config(tie_word_embeddings=tied), shard_bytes=300_000)
    for found in on_ranks(compare, 2, "gloo", tmp_path, not tied, None, True):
        check(found)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_the_same_on_two_gpus(fused: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS}
    write_checkpoint(tmp_path, config(**sizes), shard_bytes=1_000_000)
    for found in on_ranks(compare, 2, "nccl", tmp_path, fused, None, fused):
        check(found)


def peaks(rank: int, device: torch.device, folder: Path) -> dict[str, int]:
    """Bytes: all that ops allocated at one time, this rank's part, its slots, all parts, and what is whole here."""
    live = Live()
    source = Counting(folder, live)
    with live:
        made = config(num_hidden_layers=12)
        loaded = load(source, config=made, lora=None, mesh=mesh())
    base, state = loaded.sharded, loaded.fp8_state
    held = {id(m._parameters["weight"]) for m in loaded.model.modules() if is_held(m)}
    whole = [p for p in loaded.model.parameters() if id(p) not in held]
    whole += [state.forward, state.backward]
    return {
        "peak": live.peak,
        "part": base.shards.memory.nbytes,
        "slots": base.slots.memory.nbytes,
        "base": sum(block.size for block in base.shards.blocks),
        "whole": sum(tensor.nbytes for tensor in whole),
        "open": source.most_open,
    }


def test_no_rank_holds_the_whole_base(tmp_path: Path) -> None:
    """While it reads: its part, memory that stands for weights, and a matrix that is being quantized (2 + 12 bytes
    an element, as without a mesh). Afterwards: its part and the slots."""
    write_checkpoint(tmp_path, config(num_hidden_layers=12), shard_bytes=300_000)
    largest = 144 * 272
    for found in on_ranks(peaks, 2, "gloo", tmp_path):
        while_reading = found["part"] + (1 + 2 + 12) * largest
        afterwards = found["part"] + found["slots"] + largest
        assert found["peak"] <= found["whole"] + max(while_reading, afterwards) + 50_000
        assert found["part"] * 2 == found["base"] and found["open"] == 1


def refusal(rank: int, device: torch.device, folders: list[Path], options: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        load(folders[rank], **{"mesh": mesh(), **options})
    dist.barrier()  # nobody waits for a rank that has raised
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frozen": "plain"}, "self_attn.k_proj stays plain, but a sharded base is in FP8"),
        ({"embeddings": True, "mesh": None}, "embeddings=True needs a mesh, found None"),
    ],
    ids=["plain weights", "embeddings of one process"],
)
def test_what_cannot_be_sharded_is_refused_on_all_ranks(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, config())
    for said in on_ranks(refusal, 2, "gloo", [tmp_path] * 2, options):
        assert message in said


@pytest.mark.parametrize("how", ["truncated shard", "not finite"])
def test_all_ranks_say_which_file_one_cannot_read(how: str, tmp_path: Path) -> None:
    """The other ranks have whole files."""
    folders = [tmp_path / "whole", tmp_path / "broken", tmp_path / "whole"]
    for folder in folders[:2]:
        write_checkpoint(folder, config(), shard_bytes=400_000)
    expected = damage(folders[1], how)
    said = on_ranks(refusal, 3, "gloo", folders, {})
    assert expected in said[1] and said[0] == said[2] == f"rank 1: {said[1]}"


def full(rank: int, device: torch.device, folder: Path, where: str) -> str:
    """What the first allocation for shards, or for slots, says where one rank's GPU is full."""

    def allocate(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            owner, name = {
                "shards": (comm.Collective, "allocate"),
                "slots": (stores, "Slots"),
            }[where]
            patch.setattr(owner, name, allocate)
        with pytest.raises((ValueError, torch.OutOfMemoryError)) as caught:
            load(folder, mesh=mesh())
    dist.barrier()  # nobody waits for a rank that has raised
    return str(caught.value)


@pytest.mark.parametrize("where", ["shards", "slots"])
def test_a_rank_whose_gpu_is_full_ends_the_loading_on_all_ranks(where: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config())
    assert on_ranks(full, 2, "gloo", tmp_path, where) == ["rank 1: out of memory", "out of memory"]


def test_ranks_with_other_models_are_refused(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    write_checkpoint(folders[0], config())
    write_checkpoint(folders[1], config(intermediate_size=288))
    for said in on_ranks(refusal, 2, "gloo", folders, {}):
        assert (
            "the models differ: model.layers.0 has weights" in said and "on ranks 0 and 1" in said
        )


def two_axes(rank: int, device: torch.device, folder: Path) -> str:
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    with pytest.raises(ValueError, match="mesh must have one axis, found 2") as caught:
        load(folder, mesh=both)
    return str(caught.value)


def test_a_mesh_of_two_axes_is_refused(tmp_path: Path) -> None:
    (said,) = on_ranks(two_axes, 1, "gloo", tmp_path)
    assert "('dp_replicate', 'dp_shard'); pass one of them" in said


def adapters_later(rank: int, device: torch.device, folder: Path) -> tuple[str, bool]:
    model = load(folder, mesh=mesh(), lora=None).model
    before = list(model.modules())
    with pytest.raises(RuntimeError) as caught:
        apply_lora(model, LORA)
    return str(caught.value), list(model.modules()) == before


def test_adapters_come_before_the_base_is_sharded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config())
    ((said, unchanged),) = on_ranks(adapters_later, 1, "gloo", tmp_path)
    assert unchanged and "q_proj is in a sharded base: cannot put an adapter over a weight" in said
