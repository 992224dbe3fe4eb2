# SPDX-License-Identifier: Apache-2.0
"""What a sharded base refuses, on every rank and before the model changes; reading it, and giving the weights back."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import DelayedScaling, FrozenFP8Linear, fuse, merge_lora, unfuse, unload
from lorakernels.fusion import rewire
from lorakernels.modules.marks import is_held
from lorakernels.parallel import shard_base
from lorakernels.parallel.base.offload import HostShards
from lorakernels.parallel.ranks import comm
from tests.distributed.sharded_models import Way, batches, loss_of, make
from tests.fusion.fused_models import ATTENTION, LINEARS, adapted
from tests.processes import SHARED, on_ranks

WORLD, CPU = 2, torch.device("cpu")
FP8 = DelayedScaling()


def fp8_model() -> nn.Module:
    torch.manual_seed(0)  # equal on all ranks
    return adapted(targets=LINEARS, fp8=FP8)


def merged(rank: int) -> nn.Module:
    model = fp8_model()
    if rank == 1:
        merge_lora(model)
    return model


def tied(rank: int) -> nn.Module:
    model = fp8_model()
    first, second = (model.model.layers[i].mlp.down_proj for i in (0, 1))
    second._parameters["weight"].data = first._parameters["weight"].data
    return model


def differing(rank: int) -> nn.Module:
    return adapted(targets=LINEARS, fp8=FP8, model={"intermediate_size": 48 + 16 * rank})


Refused = tuple[Callable[[int], nn.Module], dict[str, Any], str]


def with_another(path: str) -> Callable[[int], nn.Module]:
    """On rank 1 the last element of a frozen tensor is another one."""

    def made(rank: int) -> nn.Module:
        model = fp8_model()
        where, _, name = path.rpartition(".")
        module = model.get_submodule(where)
        x = {**module._parameters, **module._buffers}[name]
        assert x is not None
        flat = x.data.view(-1)
        if rank:
            flat = flat.view(torch.uint8) if x.element_size() == 1 else flat
            flat[-1] = flat[-1] + 1
        return model

    return made


def differ(path: str) -> Refused:
    return (
        with_another(path),
        {},
        f"the values of {re.escape(path)} differ between rank 0 and rank 1",
    )


REFUSED: dict[str, Refused] = {
    "plain weights": (lambda rank: adapted(targets=LINEARS), {}, r"q_proj holds .* not FP8"),
    "nn.Linears": (
        lambda rank: adapted(targets=ATTENTION, fp8=FP8), {}, r"gate_proj is an nn\.Linear",
    ),
    "merged on one rank": (merged, {}, r"rank 1: model\.layers\.0\.self_attn\.q_proj is merged"),
    "tied": (tied, {}, r"1\.mlp\.down_proj shares its memory with model\.layers\.0"),
    "no decoder layer": (lambda rank: nn.Linear(2, 2), {}, "Linear has no decoder layer"),
    "models that differ": (differing, {}, r"models differ: model\.layers\.0 has .* ranks 0 and 1"),
    "a weight that differs": differ("model.layers.1.mlp.down_proj.weight"),
    "a scale that differs": differ("model.layers.1.mlp.down_proj.weight_scale_inv"),
    "a norm that differs": differ("model.layers.0.input_layernorm.weight"),
    "a head that differs": differ("lm_head.weight"),
    "no slot": (lambda rank: fp8_model(), {"slots": 0}, "slots must be .* at least 1, found 0"),
    "a mesh of another device": (
        lambda rank: fp8_model().to("meta"), {}, "of the model's device, meta, found cpu",
    ),
    "a model elsewhere on one rank": (
        lambda rank: fp8_model().to("meta") if rank else fp8_model(), {}, "rank 1: mesh must be of the model's",
    ),
    "slots that differ": (
        lambda rank: fp8_model(), {"slots": lambda rank: 2 + rank}, "slots differs: 2 on rank 0, 3 on rank 1",
    ),
    "offload that differs": (
        lambda rank: fp8_model(), {"offload": lambda rank: 0.3 * rank}, "offload differs: 0.0 on rank 0, 0.3 on",
    ),
    "prefetch": (lambda rank: fp8_model(), {"prefetch": 2}, "less than slots = 2, found 2"),
    "unknown transport": (lambda rank: fp8_model(), {"transport": "tcp"}, "one of .* found 'tcp'"),
    "peer on a CPU": (lambda rank: fp8_model(), {"transport": "peer"}, "'peer' needs GPUs"),
    "a mesh of two axes": (lambda rank: fp8_model(), {"mesh": "both"}, "one axis, found 2"),
}  # fmt: skip


def state_of(model: nn.Module) -> list[Any]:
    """What a change would show in: addresses and hooks."""
    addresses = [p.data_ptr() for p in model.parameters()]
    return [addresses, [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]]


def refused(rank: int, mesh: Any, case: Refused) -> str:
    """The error's text, or what is wrong besides."""
    make_model, options, _ = case
    model = make_model(rank)
    before = state_of(model)
    options = {name: value(rank) if callable(value) else value for name, value in options.items()}
    given = {"mesh": mesh["dp_shard"], **options}
    if given["mesh"] == "both":
        given["mesh"] = mesh
    try:
        shard_base(model, **given)
    except ValueError as error:
        return str(error) if state_of(model) == before else "the model has changed"
    return "no error"


def raises(kind: type[Exception], match: str, call: Callable[[], Any]) -> bool:
    with pytest.raises(kind, match=match):
        call()
    return True


def held(rank: int, mesh: Any) -> dict[str, bool]:
    """What a model answers while its base is sharded, and after."""
    model, whole = make(Way("recompute"), CPU), make(Way("recompute"), CPU)
    base = shard_base(model, mesh["dp_shard"])
    linears = {n: m for n, m in whole.named_modules() if isinstance(m, FrozenFP8Linear)}
    ours = dict(model.named_modules())
    saved, expected = model.state_dict(), whole.state_dict()
    with base.gathered("model.layers.3") as weights:
        gathered = {name: weight.clone() for name, weight in weights.items()}
    layer, up_proj = whole.model.layers[3], model.model.layers[3].mlp.up_proj
    address = up_proj.weight.data_ptr()
    found = {
        "state_dict": saved.keys() == expected.keys()
        and all(torch.equal(saved[k].float(), v.float()) for k, v in expected.items()),
        "dequantized": all(
            torch.equal(ours[n].dequantized_weight(), m.dequantized_weight())
            for n, m in linears.items()
        ),
        "gathered": len(gathered) == 7
        and all(torch.equal(w, layer.get_submodule(n).weight) for n, w in gathered.items()),
        "load": raises(RuntimeError, "unshard", lambda: model.load_state_dict(expected)),
        "merge": raises(RuntimeError, "merge into a weight", lambda: merge_lora(model)),
        "unfuse": raises(RuntimeError, "unfuse a weight", lambda: unfuse(model)),
        "copy": raises(RuntimeError, "cannot be copied", lambda: copy.deepcopy(model)),
        "move": raises(RuntimeError, "move a weight", lambda: model.model.layers[3].to("meta")),
        "new memory": raises(RuntimeError, "move a weight", lambda: up_proj.to_empty(device="cpu")),
        "float keeps the bytes": is_held(up_proj.float()) and up_proj.weight.data_ptr() == address,
        "no such layer": raises(
            ValueError, "layer must be one of", lambda: base.gathered(9).__enter__()
        ),
        "report": "over 2 ranks" in str(base) and "transport gloo" in str(base),
    }
    base.unshard()
    merge_lora(model)
    merge_lora(whole)
    ids = next(batches(CPU))
    found["unsharded, then merged"] = torch.equal(loss_of(model, ids), loss_of(whole, ids))
    found["no hooks left"] = state_of(model)[1] == state_of(whole)[1]
    return found


def unload_refused(rank: int, mesh: Any) -> bool:
    """A model that is not fused stays as it is, and can be unsharded and unloaded after."""
    model = fp8_model()
    base = shard_base(model, mesh["dp_shard"])
    before = state_of(model)
    refused = raises(RuntimeError, "unload a weight", lambda: unload(model))
    unchanged = state_of(model) == before
    base.unshard()
    unload(model)
    return (
        refused and unchanged and not any(isinstance(m, FrozenFP8Linear) for m in model.modules())
    )


def fused_later(rank: int, mesh: Any) -> bool:
    """`fuse` over a sharded base, in which the slots hold other layers than the one that is fused."""
    torch.manual_seed(0)
    model = fp8_model()
    whole = copy.deepcopy(model)
    base = shard_base(model, mesh["dp_shard"])
    losses = []
    for one in (model, whole):
        fuse(one, attention="math")
        torch.manual_seed(1)
        loss = loss_of(one, next(batches(CPU)))
        loss.backward()
        losses.append([loss.detach(), *(p.grad for p in one.parameters() if p.requires_grad)])
    slots = {p.untyped_storage().data_ptr() for p in [base.slots.memory]}
    joined = model.model.layers[1].lorakernels.fused.qkv.call()[0].weight
    in_slot = joined.untyped_storage().data_ptr() in slots
    return in_slot and all(map(torch.equal, *losses))


def fuse_that_fails(rank: int, mesh: Any) -> bool:
    """The weights stay in their slots, and the layers compute what they did before."""
    torch.manual_seed(0)
    model = adapted(targets=LINEARS, fp8=FP8, model={"num_hidden_layers": 4}).eval()
    ids = next(batches(CPU))
    expected = loss_of(model, ids)
    base = shard_base(model, mesh["dp_shard"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewire, "fuse_norm", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            fuse(model, attention="math")
    found = loss_of(model, ids)
    base.unshard()
    return torch.equal(found, expected) and torch.equal(loss_of(model, ids), expected)


def full_on_one_rank(rank: int, mesh: Any, embeddings: bool) -> dict[str, bool]:
    """Rank 1 lacks memory while the base is sharded, and while it is made whole again. Neither waits for the other."""
    torch.manual_seed(0)
    model = make(Way("recompute"), CPU).eval()
    ids, before = next(batches(CPU)), state_of(model)
    expected, said = loss_of(model, ids), "no memory" if rank else "rank 1: no memory"
    kind = torch.OutOfMemoryError if rank else ValueError

    def full(at: int) -> Callable[..., Any]:
        """Raises at the call of that number."""
        calls, real = iter(range(10**6)), torch.empty_like

        def empty_like(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == at and rank:
                raise torch.OutOfMemoryError("no memory")
            return real(*args, **kwargs)

        return empty_like

    def write(*_: Any) -> None:
        if rank:
            raise torch.OutOfMemoryError("no memory")

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lorakernels.parallel.base.shard.write", write)
        shard = partial(shard_base, model, mesh["dp_shard"], embeddings=embeddings)
        found["sharding"] = raises(kind, said, shard) and state_of(model) == before
    base = shard()
    for at in (0, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty_like", full(at))
            found[f"at layer {at}"] = raises(kind, said, base.unshard)
        found[f"still sharded, at layer {at}"] = all(
            is_held(m) for m in model.modules() if isinstance(m, FrozenFP8Linear)
        ) and torch.equal(loss_of(model, ids), expected)
    if embeddings:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(base.vocabulary), "_room", lambda *_: write())
            found["at the embedding"] = raises(kind, said, base.unshard)
        found["still sharded, at the embedding"] = torch.equal(loss_of(model, ids), expected)
    base.unshard()
    found["whole again"] = torch.equal(loss_of(model, ids), expected)
    return found


def pinned_one_after_the_other(rank: int, mesh: Any) -> bool:
    """The host has just what all ranks need, and rank 1 looks when rank 0 has had the time to take its part."""
    store = dist.distributed_c10d._get_default_store()

    def check(needed: int, given: int | None) -> None:
        time.sleep(0.3 * rank)
        if store.add("taken", 0):
            raise ValueError("another rank has begun to take memory")

    class Taken(HostShards):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            store.add("taken", self.memory.numel())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lorakernels.parallel.base.offload.check_host_memory", check)
        patch.setattr("lorakernels.parallel.base.stores.HostShards", Taken)
        shard_base(fp8_model(), mesh["dp_shard"], offload=0.3).unshard()
    return store.add("taken", 0) > 0


def chosen(mesh: Any) -> dict[str, bool]:
    """Two ranks on one GPU cannot read each other's memory by peer copies, unless torch is told to let them."""
    group, gpu = mesh["dp_shard"].get_group(), torch.device("cuda", 0)
    name, reason = comm.choose("auto", group, gpu)
    found = {"auto": name == "nccl" and "not all ranks are on one host, with a GPU each" in reason}
    choose = partial(comm.choose, "peer", group, gpu)
    with mock.patch.dict("os.environ", SHARED):
        found["shared"] = choose()[0] == "peer"
    return found | {"peer": raises(RuntimeError, "'peer': no peer access: rank 0 says", choose)}


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp_replicate", "dp_shard"))
    texts = {name: refused(rank, mesh, case) for name, case in REFUSED.items()}
    texts["chosen"] = chosen(mesh)
    texts["full"] = {e: full_on_one_rank(rank, mesh, e) for e in (False, True)}
    texts["pinned"] = pinned_one_after_the_other(rank, mesh)
    texts["unload"] = unload_refused(rank, mesh)
    texts["fuse that fails"] = fuse_that_fails(rank, mesh)
    return {**texts, "held": held(rank, mesh), "fused later": fused_later(rank, mesh)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(worker, WORLD, "gloo")


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert re.search(REFUSED[name][2], found[name]), found[name]


def test_a_model_while_its_base_is_sharded_and_after(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert [name for name, right in found["held"].items() if not right] == []


def test_ranks_without_peer_access(ranks: list[dict[str, Any]]) -> None:
    assert all(found["chosen"] == {"auto": True, "peer": True, "shared": True} for found in ranks)


def test_fused_after_it_was_sharded(ranks: list[dict[str, Any]]) -> None:
    assert all(found["fused later"] for found in ranks)


def test_a_fuse_that_fails_leaves_the_sharded_base(ranks: list[dict[str, Any]]) -> None:
    assert all(found["fuse that fails"] for found in ranks)


def test_unload_of_a_sharded_base(ranks: list[dict[str, Any]]) -> None:
    assert all(found["unload"] for found in ranks)


@pytest.mark.parametrize("embeddings", [False, True], ids=["", "embeddings"])
def test_a_rank_that_lacks_memory_leaves_none_waiting(
    ranks: list[dict[str, Any]], embeddings: bool
) -> None:
    for found in ranks:
        assert [k for k, right in found["full"][embeddings].items() if not right] == []


def test_no_rank_takes_memory_before_all_have_looked(ranks: list[dict[str, Any]]) -> None:
    assert all(found["pinned"] for found in ranks)
