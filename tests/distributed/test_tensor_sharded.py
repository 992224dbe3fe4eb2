# SPDX-License-Identifier: Apache-2.0
"""A base that is sharded over `dp_shard` beneath split layers: the bits of split layers whose base is whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import BlockScaling, rehearsal
from lorakernels.parallel import Offload, TensorParallel, parallelize, shard_base
from lorakernels.parallel.base.shard import POISON_VARIABLE
from tests.distributed.tensor_layers import relative
from tests.distributed.tensor_models import Way, batch, loss_of, make, train
from tests.fusion.fused_models import LINEARS, adapted, fp8_state
from tests.processes import backend_on_gpus, on_ranks

pytestmark = pytest.mark.slow
WAYS = (
    Way("fused", True, save="recompute", vocabulary=True),
    Way("fused", False, save="checkpoint"),
    Way("unfused", True, automatic=True),
    Way("checkpointed", False, checkpoint=True),
)
ON_GPU = Way("", True, save="recompute", vocabulary=True, dtype=torch.bfloat16)


def bits(model: nn.Module, way: Way, split: TensorParallel) -> dict[str, Tensor]:
    """Everything that the steps compute, and what a rank holds in the end."""
    found = {}
    for step, (values, gradients) in enumerate(
        train(model, way, next(model.parameters()).device, split)
    ):
        found |= {f"{n} before step {step}": x for n, x in values.items()}
        found |= {f"{n} in step {step}": x for n, x in gradients.items()}
    state = fp8_state(model)
    found |= {"scales of x": state.forward.clone(), "of dy": state.backward.clone()}
    return found | {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: x.clone() for n, x in model.state_dict().items() if n.endswith("_proj.weight")}


def unequal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    views = {n: x.view(torch.uint8) if x.element_size() == 1 else x for n, x in theirs.items()}
    return [n for n, x in views.items() if not torch.equal(ours[n].view(x.dtype), x)]


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    found: dict[str, Any] = {}
    for way in WAYS:
        models = make(way, device), make(way, device)
        options = {"sequence_parallel": way.sequence, "vocabulary": way.vocabulary}
        splits = [parallelize(model, mesh["tp"], **options) for model in models]
        whole = sum(x.numel() for x in weights(models[0]).values())
        expected, held = bits(models[0], way, splits[0]), weights(models[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(POISON_VARIABLE, str(int(way.name != "fused")))
            base = shard_base(models[1], mesh["dp_shard"])
        got = {"bytes": base.shards.memory.numel() / whole}
        got["unequal"] = unequal(bits(models[1], way, splits[1]), expected)
        got["saved"] = unequal(weights(models[1]), held)
        dist.barrier()
        base.unshard()
        got["after"] = unequal(weights(models[1]), held)
        with torch.no_grad():
            losses = [loss_of(model.eval(), batch(0, device)) for model in models]
        found[str(way)] = got | {"loss": torch.equal(*losses)}
    found["rehearsed"] = rehearsed(mesh, device)
    found["offloaded"] = offloaded(mesh, device)
    return found | {"blocks": in_blocks(mesh), "said": refusals(mesh, device)}


def rehearsed(mesh: Any, device: torch.device) -> list[str]:
    """What differs after a rehearsal, of a run over ranks. Scales are known to no rank before the first step."""
    found = []
    for first in (False, True):
        model = make(WAYS[0], device)
        split = parallelize(model, mesh["tp"], vocabulary=True)
        if first:
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=0.1)
            with rehearsal(model, optimizer):
                for step in range(2):
                    tokens = batch(50 + step, device)
                    split.loss(tokens, input_ids=tokens).backward()
                    optimizer.step()
                    fp8_state(model).reduce_and_update()
                with torch.no_grad():
                    model.eval()(tokens, use_cache=False)
        found.append(bits(model, WAYS[0], split))
    split.check()
    return unequal(*found)


def offloaded(mesh: Any, device: torch.device) -> list[str]:
    """What differs where a fraction of every part is in the host's memory, beside parts that are whole."""
    found = []
    for fraction in (0.0, 0.3):
        model = make(WAYS[0], device)
        split = parallelize(model, mesh["tp"], vocabulary=True)
        base = None
        if fraction:
            base = shard_base(model, mesh["dp_shard"], offload=Offload(fraction, 2**34))
        found.append(bits(model, WAYS[0], split))
        dist.barrier()
        if base is not None:
            base.unshard()
    return unequal(*found)


def in_blocks(mesh: Any) -> list[str]:
    """Loss and gradients over weights in blocks."""
    losses = []
    for shards in (False, True):
        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4}
        model = adapted("Llama", LINEARS, model=sizes, fp8=BlockScaling(), lora_dropout=0.0).train()
        parallelize(model, mesh["tp"])
        base = shard_base(model, mesh["dp_shard"]) if shards else None
        loss = loss_of(model, batch(0, torch.device("cpu")))
        loss.backward()
        named = model.named_parameters()
        losses.append({"loss": loss, **{n: p.grad for n, p in named if p.grad is not None}})
        dist.barrier()
        if base is not None:
            base.unshard()
    return unequal(*losses)


def refusals(mesh: Any, device: torch.device) -> list[str]:
    way, said = replace(WAYS[0], vocabulary=False), []
    first, vocabulary, plain = (make(way, device) for _ in range(3))
    shard_base(first, mesh["dp_shard"])
    parallelize(vocabulary, mesh["tp"], vocabulary=True)
    parallelize(plain, mesh["tp"])
    for work in (
        lambda: parallelize(first, mesh["tp"]),
        lambda: shard_base(vocabulary, mesh["dp_shard"], embeddings=True),
        lambda: shard_base(plain, mesh["tp"]),
    ):
        with pytest.raises(ValueError) as error:
            work()
        said.append(str(error.value))
    dist.barrier()
    return said


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(worker, 4, "gloo")


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_bits_are_those_of_split_layers_over_a_whole_base(way: Way, results: Any) -> None:
    for each in results:
        found = each[str(way)]
        assert found["unequal"] == [] and found["saved"] == [] and found["after"] == []
        assert found["loss"] and 0.5 <= found["bytes"] < 0.55, "half of a part, and padding"


def test_a_rehearsal_leaves_ranks_as_they_were(results: Any) -> None:
    assert all(found["rehearsed"] == [] for found in results)


def test_a_part_of_the_base_on_the_host(results: Any) -> None:
    assert all(found["offloaded"] == [] for found in results)


def test_weights_in_blocks(results: Any) -> None:
    assert all(found["blocks"] == [] for found in results)


def test_what_does_not_go_together_is_refused(results: Any) -> None:
    for found in results:
        first, vocabulary, across = found["said"]
        assert "is in a sharded base" in first
        assert "embedding" in vocabulary
        assert "the part of layers that parallelize split differs: '0 of 2' on rank 0" in across


def on_gpus(rank: int, device: torch.device) -> dict[str, float]:
    """The largest relative difference of losses and gradients from split layers over a whole base."""
    mesh, way = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp_shard", "tp")), ON_GPU
    models = make(way, device), make(way, device)
    splits = [parallelize(model, mesh["tp"], vocabulary=True) for model in models]
    expected = bits(models[0], way, splits[0])
    base = shard_base(models[1], mesh["dp_shard"])
    found = bits(models[1], way, splits[1])
    dist.barrier()
    base.unshard()
    return {n: relative(found[n], x) for n, x in expected.items() if " in step " in n}


@pytest.mark.gpu
def test_two_by_two_gpus() -> None:
    """Sums by atomics have no order, and FP8 may turn a rounding after them."""
    for found in on_ranks(on_gpus, 4, backend_on_gpus(4)):
        worst = max(found, key=found.__getitem__)
        assert found[worst] <= 2.0**-4, worst
