# SPDX-License-Identifier: Apache-2.0
"""The embedding and head of a sharded base: what they answer between uses, when they take memory, what is refused.

That training over them has the bits of the whole base is in test_sharded_base.py and test_sharded_graphs.py.
"""

from __future__ import annotations

import copy
import re
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import DelayedScaling, linear_cross_entropy, merge_lora, save_adapter
from lorakernels.parallel import shard_base
from lorakernels.parallel.base.vocabulary import DDP, ShardedVocabulary
from lorakernels.parallel.ranks import comm
from tests.distributed.sharded_models import Way, batches, loss_of, make
from tests.distributed.test_sharded_refusals import raises, state_of
from tests.fusion.fused_models import LINEARS, adapted
from tests.processes import backend_on_gpus, on_ranks

pytestmark = pytest.mark.slow

WORLD, CPU = 2, torch.device("cpu")
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
BYTES = 64 * 64 * 2  # of the embedding, and of the head


def two(way: Way, mesh: Any) -> tuple[Any, Any, Any]:
    """(a model with its embedding and head split, the same model whole, the base of the first)."""
    model, whole = make(way, CPU), make(way, CPU)
    return model, whole, shard_base(model, mesh, embeddings=True)


def memory_of(weight: Tensor) -> int:
    return weight.untyped_storage().nbytes()


def held(rank: int, mesh: Any, tied: bool, folder: Path) -> dict[str, bool]:
    """What a model answers while its embedding and head are split, and after."""
    model, whole, base = two(Way("recompute", tied=tied), mesh)
    ids, weights = next(batches(CPU)), (model.model.embed_tokens.weight, model.lm_head.weight)
    saved, expected = model.state_dict(), whole.state_dict()
    vocabulary = base.vocabulary
    with vocabulary.gathered(HEAD) as found:
        gathered = found.clone()
    h = torch.randn(3, 64, dtype=torch.bfloat16)
    loss_alone = partial(linear_cross_entropy, h, labels=ids.flatten()[:3])
    compiled = torch.compile(loss_alone, backend="eager")(weight=model.lm_head.weight)
    save_adapter(model, folder / f"split {rank}")
    save_adapter(whole, folder / f"whole {rank}")
    files = [
        (folder / f"{name} {rank}" / "adapter_model.safetensors").read_bytes()
        for name in ("split", "whole")
    ]
    load = partial(model.load_state_dict, {f"{EMBEDDING}.weight": gathered}, strict=False)
    answers = {
        "no values between uses": all(bool(w.isnan().all()) for w in weights),
        "no memory between uses": all(memory_of(w) == 2 for w in weights),
        "shape and dtype": weights[0].shape == (64, 64) and weights[0].dtype == torch.bfloat16,
        "half of the bytes": vocabulary.shards.memory.numel() == (BYTES if not tied else BYTES // 2),
        "still tied": (weights[0] is weights[1]) == tied,
        "state_dict": saved.keys() == expected.keys()
        and all(torch.equal(saved[k].float(), v.float()) for k, v in expected.items()),
        "gathered": torch.equal(gathered, whole.lm_head.weight),
        "in a compiled loss": compiled.equal(loss_alone(weight=whole.lm_head.weight)),
        "adapters' files": files[0] == files[1],
        "no such weight": raises(
            ValueError, "path must be one of .*'lm_head'.*found 'x'",
            lambda: vocabulary.gathered("x").__enter__(),
        ),
        "load": raises(RuntimeError, r"embed_tokens\.weight is in a sharded base", load),
        "cast": raises(RuntimeError, "cannot move or cast the Embedding", model.float),
        "move": raises(RuntimeError, "cast the Linear", lambda: model.lm_head.to("meta")),
        "stays": model.to("cpu") is model and memory_of(weights[0]) == 2,
        "copy": raises(RuntimeError, "cannot be copied", lambda: copy.deepcopy(model)),
        "an error inside": raises(IndexError, "index", lambda: model.model.embed_tokens(ids + 64))
        and model.model.embed_tokens.weight is weights[0],
        "report": re.search(
            r"embed_tokens(=| and )lm_head: .* over 2 ranks: .* at most 8,192 while", str(base)
        )
        is not None,
    }  # fmt: skip

    def full() -> list[Tensor]:
        raise torch.OutOfMemoryError("no memory")

    vocabulary.__dict__["rooms"] = full
    refused = raises(torch.OutOfMemoryError, "no memory", base.unshard)
    del vocabulary.__dict__["rooms"]
    answers["split still where the whole does not fit"] = (
        refused and base.vocabulary is vocabulary and all(bool(w.isnan().all()) for w in weights)
    )
    base.unshard()
    merge_lora(model)
    merge_lora(whole)
    return answers | {
        "unsharded": torch.equal(weights[0], whole.model.embed_tokens.weight)
        and torch.equal(weights[1], whole.lm_head.weight)
        and "_apply" not in vars(model.lm_head)
        and not hasattr(model, DDP),
        "then merged": torch.equal(loss_of(model, ids), loss_of(whole, ids)),
        "no hooks left": state_of(model)[1] == state_of(whole)[1],
    }


class Present:
    """How many whole weights are in memory. A collective of gloo's may refer to one for a moment after its end."""

    def __init__(self, vocabulary: ShardedVocabulary) -> None:
        self._alive: set[int] = set()
        gather = vocabulary._transport.gather
        numbers = iter(range(10**6))

        def counting(index: int, out: Tensor) -> Any:
            number = next(numbers)
            self._alive.add(number)
            weakref.finalize(out.untyped_storage(), self._alive.discard, number)
            return gather(index, out)

        vocabulary._transport.gather = counting  # type: ignore[method-assign]

    def are(self, expected: int) -> bool:
        end = time.monotonic() + 10
        while len(self._alive) != expected and time.monotonic() < end:
            time.sleep(0.01)
        return len(self._alive) == expected


def memory(rank: int, mesh: Any) -> dict[str, bool]:
    """When whole weights are there, and how often they come."""
    model = make(Way("recompute"), CPU)
    base = shard_base(model, mesh, embeddings=True)
    vocabulary = base.vocabulary
    assert vocabulary is not None
    present, ids, found = Present(vocabulary), next(batches(CPU)), {}
    h = model.model(ids, use_cache=False).last_hidden_state
    found["none after the embedding"] = present.are(0) and vocabulary.gathers == 1
    loss = linear_cross_entropy(h, model.lm_head.weight, ids, chunk=4)
    found["none after the loss"] = present.are(0) and vocabulary.gathers == 2
    loss.backward()
    found["none comes for its backward"] = vocabulary.gathers == 2
    logits = model(ids, use_cache=False).logits
    found["the head until its backward"] = present.are(1) and vocabulary.gathers == 4
    logits.float().sum().backward()
    del logits
    found["none after it"] = present.are(0) and vocabulary.gathers == 4
    with torch.no_grad():
        model(ids, use_cache=False)
    found["none after an evaluation"] = present.are(0)
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits
    found["none after inference"] = present.are(0) and not bool(logits.isnan().any())
    base.unshard()
    return found


def trained_head(rank: int, mesh: Any, tied: bool) -> bool:
    """The head trains and stays whole; the embedding is split."""
    grads = []
    for split in (False, True):
        torch.manual_seed(0)
        model = adapted(
            targets=LINEARS, fp8=DelayedScaling(), modules_to_save=["lm_head"],
            model={"tie_word_embeddings": tied}, dtype=torch.bfloat16,
        )  # fmt: skip
        if split:
            base = shard_base(model, mesh, embeddings=True)
            assert base.vocabulary.stay == {HEAD: "is trained"}
            assert "lm_head stays whole, as it is trained" in str(base)
            assert bool(model.model.embed_tokens.weight.isnan().all())
        torch.manual_seed(1)
        loss = loss_of(model, next(batches(CPU)))
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    return model.lm_head.weight.grad is not None and all(map(torch.equal, *grads))


def fp8_model(**model: Any) -> Any:
    torch.manual_seed(0)
    return adapted(targets=LINEARS, fp8=DelayedScaling(), model=model)


def all_trained(rank: int) -> nn.Module:
    model = fp8_model()
    model.model.embed_tokens.requires_grad_(rank == 0)
    model.lm_head.requires_grad_(rank == 0)
    return model


def three_owners(rank: int) -> nn.Module:
    model = fp8_model()
    model.model.extra = nn.Linear(32, 64, bias=False)
    model.model.extra.weight = model.lm_head.weight
    return model


def trained_on_one(rank: int) -> nn.Module:
    model = fp8_model()
    model.lm_head.requires_grad_(rank == 1)
    return model


def with_max_norm(rank: int) -> nn.Module:
    model = fp8_model()
    model.model.embed_tokens.max_norm = 1.0
    model.set_output_embeddings(nn.Sequential())
    return model


REFUSED: dict[str, tuple[Callable[[int], nn.Module], dict[str, Any], str]] = {
    "nothing frozen": (
        all_trained, {},
        r"^(rank 0: )?embeddings=True has nothing to split: model\.embed_tokens is trained; lm_head is tr",
    ),
    "a third owner": (three_owners, {}, r"model\.extra\.weight shares its memory with lm_head\.weight"),
    "what differs": (
        trained_on_one, {},
        r"the models differ: embeddings are \['model\.embed_tokens \[64, 32\] .*'lm_head .* on rank 0, .* on rank 1",
    ),
    "other kinds": (
        with_max_norm, {},
        r"embed_tokens has a max_norm, by which .*; lm_head is a Sequential, not an nn\.Linear",
    ),
    "asked on one rank": (
        lambda rank: fp8_model(), {"embeddings": lambda rank: rank == 0},
        "embeddings differs: True on rank 0, False on rank 1",
    ),
    "a rank without memory": (lambda rank: fp8_model(), {"full": True}, "^(rank 1: )?out of memory"),
}  # fmt: skip


def refused(rank: int, mesh: Any, name: str) -> str:
    """The error's text, or what is wrong besides."""
    make_model, options, _ = REFUSED[name]
    model = make_model(rank)
    before = state_of(model)
    asked = options.get("embeddings", lambda rank: True)(rank)
    allocate, calls = comm.Collective.allocate, iter(range(9))

    def full(self: comm.Collective, size: int) -> Tensor:
        if rank == 1 and next(calls) == 1:  # the first is of the layers
            raise torch.OutOfMemoryError("out of memory")
        return allocate(self, size)

    with pytest.MonkeyPatch.context() as patch:
        if "full" in options:
            patch.setattr(comm.Collective, "allocate", full)
        try:
            shard_base(model, mesh, embeddings=asked)
        except (ValueError, torch.OutOfMemoryError) as error:
            return str(error) if state_of(model) == before else "the model has changed"
    return "no error"


def worker(rank: int, device: torch.device, folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp_shard",))["dp_shard"]
    found: dict[str, Any] = {name: refused(rank, mesh, name) for name in REFUSED}
    found["held"] = held(rank, mesh, False, folder)
    found["held, tied"] = held(rank, mesh, True, folder)
    found["memory"] = memory(rank, mesh)
    found["trained head"] = [trained_head(rank, mesh, tied) for tied in (False, True)]
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(worker, WORLD, "gloo", tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank_before_the_model_changes(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for found in ranks:
        assert re.search(REFUSED[name][2], found[name]), found[name]


@pytest.mark.parametrize("name", ["held", "held, tied"])
def test_a_model_while_its_embedding_and_head_are_split_and_after(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for found in ranks:
        assert [what for what, right in found[name].items() if not right] == []


def test_whole_weights_are_there_only_while_they_are_used(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert [what for what, right in found["memory"].items() if not right] == []


def test_what_is_trained_stays_whole(ranks: list[dict[str, Any]]) -> None:
    assert all(found["trained head"] == [True, True] for found in ranks)


ROWS = 100_003  # of a vocabulary whose weights stand out in a GPU's memory


def on_a_gpu(rank: int, device: torch.device, transport: str) -> dict[str, bool]:
    """Bits, and the bytes that torch's allocator has, before, in and after a use of each weight."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": ROWS}
    ids, size = next(batches(device)), ROWS * 64 * 2

    def step(model: Any, chunked: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        if chunked:
            h = model.model(ids, use_cache=False).last_hidden_state
            loss = linear_cross_entropy(h, model.lm_head.weight, ids)
        else:
            loss = loss_of(model, ids)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]

    def bytes_now() -> int:
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)

    whole = make(Way("recompute", sizes=sizes), device)
    expected = [*step(whole, False), *step(whole, True)]
    model: Any = make(Way("recompute", sizes=sizes), device)
    base = shard_base(model, mesh["dp_shard"], transport=transport, embeddings=True)
    found = [*step(model, False), *step(model, True)]
    answers = {"bits": len(found) > 20 and all(map(torch.equal, found, expected))}
    del found, expected
    before = bytes_now()
    with torch.no_grad():
        torch.cuda.reset_peak_memory_stats(device)
        model.model.embed_tokens(ids)
        answers["freed after the embedding"] = bytes_now() < before + size // 8
        peak = torch.cuda.max_memory_allocated(device) - before
        answers["whole in it"] = size <= peak < 2 * size
        h = model.model(ids, use_cache=False).last_hidden_state
        answers["no head before the loss"] = bytes_now() < before + size // 2
        torch.cuda.reset_peak_memory_stats(device)
        loss = linear_cross_entropy(h, model.lm_head.weight, ids, chunk=4)
        answers["freed after the loss"] = bytes_now() < before + size // 2
        peak = torch.cuda.max_memory_allocated(device) - before
        answers["whole in it, too"] = size <= peak < 2 * size
        answers["finite"] = bool(loss.isfinite())
    dist.barrier()
    base.unshard()
    answers["transport"] = base.transport == transport
    return answers


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_on_gpus(world: int, transport: str) -> None:
    backend = backend_on_gpus(world, "it is the transport" if transport == "nccl" else "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        for found in on_ranks(on_a_gpu, world, backend, transport):
            assert [what for what, right in found.items() if not right] == []


def test_one_process_has_nobody_to_share_with() -> None:
    model = fp8_model()
    before = state_of(model)
    with pytest.raises(ValueError, match="embeddings=True needs a mesh, found None"):
        shard_base(model, offload=0.3, embeddings=True)
    assert state_of(model) == before
