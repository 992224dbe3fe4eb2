# SPDX-License-Identifier: Apache-2.0
"""Stages whose layers are replayed, with microbatches in flight, train as one eager process does, to the bit."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import PhiloxState
from lorakernels.parallel import pipeline_parallel
from lorakernels.parallel.pipeline.stages import Draws
from lorakernels.parallel.ranks import comm
from tests.distributed.pipeline_models import STEPS, Way, batch, make, state_of, train
from tests.distributed.tensor_layers import relative
from tests.distributed.test_pipeline import refused
from tests.fusion.fused_models import fp8_state
from tests.graphs.fake import FakeBackend
from tests.graphs.layers import managed
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
WORLDS = {
    2: (
        Way("fused, FP8", fused=True, fp8=True),
        Way("interleaved, packed", chunks=2, packed=True, fused=True),
        Way("first stage without a gradient", chunks=2, lora={"layers_to_transform": [2, 3]}),
        Way("fused, FP8, dropout", fused=True, fp8=True, dropout=0.3, one_state=True),
        Way("interleaved, dropout", chunks=2, dropout=0.3, one_state=True),
        Way("fused, checkpoint, bf16", 4, 1, 2, fused=True, save="checkpoint", fp8=True, dtype=torch.bfloat16),
    ),
    4: (Way("four ranks", fused=True, fp8=True),),
}  # fmt: skip
ON_GPU = (
    Way("fused, bf16, FP8", fp8=True, fused=True, dtype=torch.bfloat16),
    Way("interleaved, fused, bf16", chunks=2, fused=True, dtype=torch.bfloat16),
    Way("dropout, fused, bf16", dropout=0.3, one_state=True, fused=True, dtype=torch.bfloat16),
)


def compare(rank: int, device: torch.device, ways: list[Way]) -> dict[str, Any]:
    """What is not equal to one process, and how far off it is; what was replayed."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("pp",))
    found = {}
    for way in ways:
        whole, model = make(way, device), make(way, device)
        cut = pipeline_parallel(model, mesh["pp"], microbatches=way.microbatches, chunks=way.chunks)
        options: dict[str, Any] = {"fp8_state": fp8_state(model)} if way.fp8 else {}
        options["rng_states"] = cut.rng_states
        manager = managed(cut.layers, device, num_microbatches=way.microbatches, **options)
        expected = train(whole, way, device, None)
        ours = train(model, way, device, cut, manager.end_iteration)
        unequal, errors = [], {}
        for step, ((_, theirs), (_, own)) in enumerate(zip(expected, ours, strict=True)):
            assert theirs.keys() == own.keys()
            unequal += [f"{n} in step {step}" for n in own if not torch.equal(own[n], theirs[n])]
            errors |= {
                f"{n} in step {step}": relative(own[n], theirs[n])
                for n in own
                if n != "generator" and theirs[n].is_floating_point()
            }
        graphs = manager.report().graphs
        found[str(way)] = {
            "unequal": unequal,
            "errors": errors,
            "graphs": len(graphs),
            "replayed": manager.replayed,
            "layers": [*cut.layers],
        }
        comm.agree(cut.ranks.group, None)
        manager.close()
    return found


_ran: dict[int, Any] = {}
CASES = [pytest.param(w, way, id=f"{w} ranks-{way}") for w, ways in WORLDS.items() for way in ways]


@pytest.mark.parametrize(("world", "way"), CASES)
def test_replayed_stages_train_as_one_eager_process(world: int, way: Way) -> None:
    """One step is recorded. Each layer with a backward then has a graph for each microbatch and direction."""
    if world not in _ran:
        _ran[world] = on_ranks(compare, world, "gloo", [*WORLDS[world]])
    for rank, ranks in enumerate(_ran[world]):
        found = ranks[str(way)]
        assert found["unequal"] == []
        assert found["replayed"] == (STEPS - 1) * way.microbatches
        # the last stage runs each microbatch to its end before the next, so that one graph serves all
        in_turn = way.chunks == 1 and rank == world - 1
        assert found["graphs"] == 2 * len(found["layers"]) * (1 if in_turn else way.microbatches)
        frozen = "without" in str(way) and rank == 0
        assert len(found["layers"]) == way.layers // world - frozen


@pytest.mark.gpu
@pytest.mark.parametrize("way", ON_GPU, ids=str)
def test_replayed_stages_on_two_gpus(way: Way) -> None:
    """As test_stages_on_two_gpus, whose bounds these are."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    bound = 2.0**-2 if way.fp8 else 2.0**-4
    for found in on_ranks(compare, 2, "nccl", [way]):
        errors = found[str(way)]["errors"]
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= bound, (worst, errors[worst])
        assert found[str(way)]["replayed"] == (STEPS - 1) * way.microbatches


def sent(rank: int, device: torch.device, chunks: int) -> tuple[list[bool], list[bool]]:
    """In the last step, whether each tensor is memory of graphs: those that are sent, and those between layers."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    way, made = Way("", 2 * 2 * chunks, chunks, fused=True), [FakeBackend()]
    found: list[bool] = []
    inside: list[bool] = []
    cut = pipeline_parallel(make(way, device), mesh["pp"], microbatches=4, chunks=chunks)
    manager = managed(cut.layers, device, num_microbatches=4, backend=lambda: made[0])
    right = dist.P2POp.__init__

    def noted(self: Any, op: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        if op is dist.isend:
            found.append(made[0].arena.owns(tensor))
        right(self, op, tensor, *args, **kwargs)

    with patch.object(dist.P2POp, "__init__", noted):
        for step in range(4):
            found.clear()
            labels, inputs = batch(step, way, device)
            cut.forward_backward(labels, **inputs)
            manager.end_iteration()
    call = manager.graphs.calls[1]  # of the stage's second layer
    inside += [made[0].arena.owns(x.origin.alias) for x in call.inputs if x.origin is not None]
    manager.close()
    return found, inside


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_is_sent_is_no_memory_of_graphs(chunks: int) -> None:
    """Else the next replay would write there while the send still reads. Between layers it is their memory."""
    for found, inside in on_ranks(sent, 2, "gloo", chunks):
        assert len(found) == (4 if chunks == 1 else 12) and not any(found)
        assert inside and all(inside)


def changed_later(rank: int, device: torch.device) -> str:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))["pp"]
    way = Way("", fused=True)
    cut = pipeline_parallel(make(way, device), mesh, microbatches=4)
    manager = managed(cut.layers, device, num_microbatches=4)
    for step in range(3):
        labels, inputs = batch(step, way, device)
        cut.forward_backward(labels, **inputs)
        manager.end_iteration()
    cut.layers["model.layers.2"].register_buffer("more", torch.zeros(1))
    return refused(lambda: cut.forward_backward(labels, **inputs))


def test_a_refused_replay_says_what_it_was() -> None:
    """torch's stages raise another error, which says shapes."""
    (said,) = on_ranks(changed_later, 1, "gloo")
    assert said.startswith("ReplayError") and "model.layers.2" in said and "more" in said, said


def refusals(rank: int, device: torch.device) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))["pp"]
    way = Way("", dropout=0.1)
    drops = pipeline_parallel(make(way, device), mesh, microbatches=4)
    manager = managed(drops.layers, device, num_microbatches=4, rng_states=[state_of(drops.model)])
    labels, inputs = batch(0, way, device)
    without = refused(lambda: drops.forward_backward(labels, **inputs))
    drops.offsets = state_of(drops.model)
    drops.forward_backward(labels, **inputs)
    manager.end_iteration()
    unnamed = pipeline_parallel(make(way, device), mesh, microbatches=4)
    unnamed.offsets = state_of(unnamed.model)
    listed = managed(
        [*unnamed.layers.values()], device, num_microbatches=4, rng_states=unnamed.rng_states
    )
    unnamed.forward_backward(labels, **inputs)
    again = pipeline_parallel(
        make(Way("", dropout=0.1, checkpoint=True), device), mesh, microbatches=4
    )
    again.forward_backward(labels, **inputs)
    again.offsets = state_of(again.model)
    early = make(Way(""), device)
    managed(early.get_submodule("model.layers"), device, num_microbatches=4)
    return {
        "without offsets": without,
        "not placed": refused(lambda: drops.forward_backward(labels, **inputs)),
        "a list": refused(listed.end_iteration),
        "checkpointed": refused(lambda: again.forward_backward(labels, **inputs)),
        "early": refused(lambda: pipeline_parallel(early, mesh, microbatches=4)),
    }


def test_what_graphs_of_stages_do_not_do_is_refused() -> None:
    for found in on_ranks(refusals, 2, "gloo"):
        assert (
            "managed by lorakernels.graphs, but pipeline.offsets is None"
            in found["without offsets"]
        )
        assert (
            "was captured without rng_states=pipeline.rng_states of GraphManager"
            in found["not placed"]
        )
        assert "layers must be pipeline.layers, whose names are paths" in found["a list"]
        assert "has dropout and gradient checkpointing" in found["checkpointed"]
        assert "cut the model first, then give GraphManager pipeline.layers" in found["early"]


def test_a_stage_that_raises_leaves_the_offset_as_it_was() -> None:
    state = PhiloxState(7, "cpu")
    draws = Draws([1], [0], 4, state)
    before = state.tensor.clone()
    with pytest.raises(KeyError), draws.of(0, 3):
        assert not torch.equal(state.tensor, before)
        raise KeyError("a mistake in a layer")
    assert torch.equal(state.tensor, before)
