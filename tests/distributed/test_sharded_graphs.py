# SPDX-License-Identifier: Apache-2.0
"""A sharded base under graphs, and over the transports of GPUs: bits equal to the whole base's in the same graphs.

Between the replays the model is evaluated, so that the slots hold other layers than at the capture. On a CPU the
graphs are those that tests/graphs/fake.py imitates. Layers are warmed up and captured over slots of NaN, of which the
FP8 state, the random state and the gradients keep nothing. In one step one rank runs its layers while others replay.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lorakernels.graphs import GraphOptions, StepGraph
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from lorakernels import linear_cross_entropy
from lorakernels.parallel import ShardedBase, shard_base
from lorakernels.parallel.base.slots import POISON
from tests.distributed.sharded_models import Found, Way, batches, compare, make
from tests.fusion.fused_models import an_adapter
from tests.graphs.layers import backend_for, managed
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
WORLD = 2
SAVES = ("recompute", "checkpoint")
Run = Callable[[Tensor], Tensor]


class Loop:
    """Trains the decoder layers of `model` on the mean square of what they return, and on the head's loss."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, adapter = model, an_adapter(model)
        self.state, self.rng = adapter.fp8_state, adapter.rng_state
        self.trained = [p for p in model.parameters() if p.requires_grad]
        like = torch.empty(1, 16, 64, device=device, dtype=torch.bfloat16)
        self.angles = model.model.rotary_emb(like, torch.arange(16, device=device)[None])
        self.spoil: Callable[[], None] = lambda: None  # called before layers may be captured
        self.eager = False  # run the layers although their graphs are there

    def loss(self, ids: Tensor) -> Tensor:
        h = self.model.model.embed_tokens(ids)
        for layer in self.model.model.layers:
            h = layer(h, position_embeddings=self.angles)
        return h.float().square().mean() + self.loss_of_head(h, ids)

    def loss_of_head(self, h: Tensor, ids: Tensor) -> Tensor:
        head = self.model.lm_head
        if h.is_cuda:
            return linear_cross_entropy(h, head.weight, ids, chunk=12)
        return cross_entropy(head(h).float().flatten(0, 1), ids.flatten())  # the other reads labels

    def step(self, ids: Tensor) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(ids)
        loss.backward()
        with torch.no_grad():
            for p in self.trained:
                p -= 0.1 * p.grad
        self.state.reduce_and_update()
        return loss.detach()

    def evaluate(self, ids: Tensor) -> Tensor:
        """The last layer alone, as the slots had it before the replay, then all."""
        self.model.eval()
        with torch.no_grad():
            h = self.model.model.embed_tokens(ids)
            last = self.model.model.layers[-1](h, position_embeddings=self.angles)
            found = self.loss(ids) + last.float().sum()
        self.model.train()
        return found

    def by_layers(self, device: torch.device) -> tuple[Run, Callable[[], str], Callable[[], None]]:
        states = {"fp8_state": self.state, "rng_states": [self.rng]}
        manager = managed(self.model.model.layers, device, warmup_steps=2, **states)

        def run(ids: Tensor) -> Tensor:
            self.spoil()
            with manager.disabled() if self.eager else nullcontext():
                loss = self.step(ids)
            self.spoil()
            manager.end_iteration()
            return loss

        return run, lambda: manager.phase, manager.close

    def whole(self, device: torch.device) -> tuple[Run, Callable[[], str], Callable[[], None]]:
        graph = StepGraph(
            self.step,
            warmup_steps=2,
            fp8_state=self.state,
            rng_states=[self.rng],
            modules=[self.model],
            options=GraphOptions(backend=backend_for(device)),
        )
        return graph, lambda: graph.phase, graph.reset


def spoil(base: ShardedBase) -> None:
    """Only NaN in the slots, until a layer is brought. A capture of layers brings none."""
    base.slots.forget()
    base.slots.memory.data.fill_(POISON)


def trained(
    model: nn.Module, device: torch.device, graphs: str, base: ShardedBase | None = None
) -> Found:
    """What six steps compute: two are eager, and the model is evaluated before the later ones."""
    torch.manual_seed(5)
    loop, found = Loop(model, device), {}
    if base is not None:
        loop.spoil = partial(spoil, base)
    run, phase, close = getattr(loop, graphs)(device)
    for step, ids in enumerate([*batches(device), *batches(device)]):
        if step > 2:
            found[f"{step} evaluated"] = loop.evaluate(ids)
        loop.eager = (
            step == 4 and dist.is_initialized() and dist.get_rank() == 1
        )  # the other replays
        found[f"{step} loss"] = run(ids).clone()
        found[f"{step} fp8"] = torch.cat((loop.state.forward, loop.state.backward)).clone()
    assert phase() == "replaying"
    found["after"] = loop.evaluate(ids)
    found |= {f"trained {i}": p.detach().clone() for i, p in enumerate(loop.trained)}
    close()
    return found


def graphed(mesh: Any, device: torch.device, graphs: str, save: str, transport: str) -> list[str]:
    expected = trained(make(Way(save), device), device, graphs)
    model = make(Way(save), device)
    split = save == "checkpoint"
    base = shard_base(model, mesh, transport=transport, embeddings=split)
    base.slots.poison = split
    found = trained(model, device, graphs, base)
    assert (base.vocabulary is not None) == split
    dist.barrier()
    base.unshard()
    return [name for name, x in expected.items() if not torch.equal(x, found[name])]


def beside_a_step(mesh: Any, device: torch.device) -> list[str]:
    """NCCL's kernels of one forward and backward over peer copies, and copies outside of its kernels' interval.

    The step before has left the first layers in the slots, so that the gathers come after the first kernel.
    """
    model = make(Way("recompute"), device)
    base, loop = shard_base(model, mesh, transport="peer"), Loop(model, device)
    ids = next(batches(device))
    loop.step(ids)
    torch.cuda.synchronize()
    before = base.gathers
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        loop.loss(ids).backward()
        torch.cuda.synchronize()
    gathers = base.gathers - before
    base.unshard()
    events = [e for e in profile.events() if e.device_type == DeviceType.CUDA]
    moves = [e for e in events if e.name.lower().startswith(("memcpy", "memset"))]
    copies = [e for e in moves if "-> device" in e.name.lower()]
    kernels = [e for e in events if e not in moves]
    began = min(e.time_range.start for e in kernels)
    ended = max(e.time_range.end for e in kernels)
    outside = [e for e in copies if not began <= e.time_range.start <= e.time_range.end <= ended]
    found = [e.name for e in kernels if "nccl" in e.name.lower()]
    if len(copies) < (WORLD - 1) * gathers:  # a rank's own weights are read in place
        found.append(f"{len(copies)} copies of {gathers} gathers")
    return found + [f"{e.name} at {e.time_range}" for e in outside]


def worker(rank: int, device: torch.device, transport: str) -> dict[Any, list[str]]:
    mesh = init_device_mesh(device.type, (WORLD,), mesh_dim_names=("dp_shard",))["dp_shard"]
    found: dict[Any, list[str]] = {}
    for save in SAVES:
        for graphs in ("by_layers", "whole"):
            found[save, graphs] = said(graphed, mesh, device, graphs, save, transport)
        split = save == "checkpoint"
        options = {"transport": transport, "embeddings": split}
        way = Way(save, options=options, poison=split, step="chunked" if split else "plain")
        found[save, "eager"] = said(differences, way, mesh, rank, device)
    if transport == "peer":
        step = "plain" if rank else "interrupted"
        apart = Way("recompute", step=step, delayed=True, apart=True)
        found["ranks that do not do the same"] = said(differences, apart, mesh, rank, device)
        found["kernels and copies"] = said(beside_a_step, mesh, device)
    return found


def differences(*args: Any) -> list[str]:
    return compare(*args)[0]


def said(scenario: Callable[..., list[str]], *args: Any) -> list[str]:
    """What `scenario` found; what it raised counts as a finding, so that the others are run."""
    try:
        return scenario(*args)
    except Exception:
        return [traceback.format_exc()]


_ran: dict[str, list[dict[Any, list[str]]]] = {}


def results(backend: str, transport: str) -> list[dict[Any, list[str]]]:
    """Of every rank. The ranks of one transport run all that is compared over it."""
    if backend == "nccl" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs, found {torch.cuda.device_count()}")
    if transport not in _ran:
        _ran[transport] = on_ranks(worker, WORLD, backend, transport)
    return _ran[transport]


@pytest.mark.parametrize("graphs", ["eager", "by_layers", "whole"])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    ("backend", "transport"),
    [
        ("gloo", "gloo"),
        pytest.param("nccl", "peer", marks=pytest.mark.gpu),
        pytest.param("nccl", "nccl", marks=pytest.mark.gpu),
    ],
)
def test_bits_are_those_of_the_whole_base(
    backend: str, transport: str, save: str, graphs: str
) -> None:
    for rank, found in enumerate(results(backend, transport)):
        assert found[save, graphs] == [], rank


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["ranks that do not do the same", "kernels and copies"])
def test_peer_copies_are_no_collectives(what: str) -> None:
    """One rank evaluates and generates between its steps, late; the other does not. No NCCL kernel runs in a step, and
    the gathers run between its first kernel and its last one."""
    for rank, found in enumerate(results("nccl", "peer")):
        assert found[what] == [], rank
