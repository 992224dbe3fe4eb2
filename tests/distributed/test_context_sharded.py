# SPDX-License-Identifier: Apache-2.0
"""Rows over ranks that keep one base together: losses, gradients and scales are those over whole bases, bit for bit.

The base is sharded over the ranks that share a row, or over these and the replicas beside them.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lorakernels.graphs import GraphOptions
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peers.models import SPECS, Random
from lorakernels import DelayedScaling, LoRAConfig, PhiloxState, fuse, load_quantized
from lorakernels.parallel import ContextParallel, Offload, context_parallel, shard_base
from lorakernels.parallel.ranks import comm
from tests.distributed.context_models import Way, batch, loss_over_ranks, make
from tests.distributed.test_split_graphs import own_rows_of_the_sum
from tests.fusion.fused_models import an_adapter, fp8_state
from tests.graphs.layers import backend_for, managed
from tests.processes import backend_on_gpus, on_ranks

pytestmark = pytest.mark.slow
STEPS, WARMUP = 5, 2
LAYERS = 4  # more than slots, which each forward and each backward fills anew


@dataclass(frozen=True)
class Case:
    """How the base is kept, and how the layers run.

    Attributes:
        name: what is special.
        replicas: of the ranks that share rows; the base is sharded over all of them.
        graphs: layers are replayed.
        loaded: straight into the shards.
        away: what layers keep waits in host memory, over the sharded base alone.
        options: of `shard_base`.
    """

    name: str
    replicas: int = 1
    graphs: bool = False
    loaded: bool = False
    save: str = "checkpoint"
    documents: bool = True
    away: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name


EVERYTHING = (("embeddings", True),)
ON_CPU = {
    2: (
        Case("eager"),
        Case("whole rows, fp8 kept", save="fp8", documents=False),
        Case("replayed", graphs=True, options=EVERYTHING),
        Case("loaded", loaded=True),
        Case("a part on the host", options=(("offload", Offload(0.3, 2**34)),)),
        Case("inputs of layers on the host", away=True),
        Case("inputs of layers on the host, replayed", graphs=True, away=True),
    ),
    4: (
        Case("eager"),
        Case("whole rows, loaded", loaded=True, documents=False, options=EVERYTHING),
        Case("two replicas", replicas=2),
        Case("two replicas, replayed", replicas=2, graphs=True, save="recompute"),
    ),
}
ON_GPU = (
    Case("eager", options=EVERYTHING),
    Case("replayed", graphs=True),
    Case("loaded", loaded=True),
)


def made(case: Case, device: torch.device, mesh: Any) -> Any:
    """A fused model, its base whole without a mesh."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options = dict(case.options)
    base: Any = None
    if case.loaded:
        torch.manual_seed(0)
        config = SPECS["tiny"].cut(LAYERS).config()
        fp8 = DelayedScaling(amax_history_len=2)
        lora = LoRAConfig(r=4, lora_dropout=0.1, target_modules="all-linear", fp8=fp8)
        given: dict[str, Any] = {"lora": lora, "rng_state": PhiloxState(11, device)}
        if mesh is not None:
            given |= {"mesh": mesh, **options}
        found = load_quantized(
            Random(config, device),
            config=config,
            device=device,
            dtype=dtype,
            progress=False,
            **given,
        )
        model: Any = found.model.train()
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)
        base = found.sharded
    else:
        layers = {"num_hidden_layers": LAYERS}
        model = make(Way("", fp8=True, dropout=0.1, dtype=dtype, model=layers), device)
    fuse(model, save=case.save, offload_activations=case.away and mesh is not None)
    if mesh is not None and base is None:
        base = shard_base(model, mesh, **options)
    if base is not None:
        base.slots.poison = True
    return model, base


def bits(model: nn.Module, case: Case, context: ContextParallel, replica: int) -> dict[str, Tensor]:
    """Losses, gradients and scales of each step, and the adapters after the last."""
    device, state, rng = (
        next(model.parameters()).device,
        fp8_state(model),
        an_adapter(model).rng_state,
    )
    assert rng is not None
    manager, layers = None, model.get_submodule("model.layers")
    if case.graphs:
        states: dict[str, Any] = {"fp8_state": state, "rng_states": [rng]}
        how = GraphOptions(backend=backend_for(device), together=context.together)
        manager = managed(layers, device, warmup_steps=WARMUP, options=how, **states)
    found, trained = {}, {n: p for n, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(9)
    for step in range(STEPS):
        model.zero_grad()
        tokens, labels = batch(step + 100 * replica, device)
        loss = loss_over_ranks(context, tokens, labels, Way("", documents=case.documents))
        loss.backward()
        context.reduce_gradients()
        found |= {f"{step} loss": loss.detach().clone()}
        found |= {f"{step} gradient of {n}": p.grad.clone() for n, p in trained.items()}
        with torch.no_grad():
            for p in trained.values():
                p -= 0.05 * p.grad
        state.reduce_and_update()
        found |= {f"{step} scales": torch.cat((state.forward, state.backward)).clone()}
        if manager is None:
            rng.advance()
        else:
            manager.end_iteration()
    if manager is not None:
        assert manager.phase == "replaying"
        manager.close()
    return found | {f"{n} trained": p.detach().clone() for n, p in trained.items()}


def compare(case: Case, device: torch.device) -> list[str]:
    """What differs from the same run over whole bases, and what a shard of the wrong size has."""
    world = dist.get_world_size()
    shape = (case.replicas, world // case.replicas)
    axes = init_device_mesh(device.type, shape, mesh_dim_names=("dp_shard", "cp"))
    over = axes["dp_shard", "cp"]._flatten("all") if case.replicas > 1 else axes["cp"]
    found, differences = [], []
    for mesh in (None, over):
        model, base = made(case, device, mesh)
        context = context_parallel(model, axes["cp"])
        found.append(bits(model, case, context, axes["dp_shard"].get_local_rank()))
        context.check()
        if base is None:
            whole = sum(p.numel() for n, p in model.named_parameters() if "_proj.weight" in n)
            continue
        held = sum(store.shards.memory.numel() for store in base.stores)
        spare = 0.2 if len(base.stores) == 1 else 1.0  # where blocks of two stores are aligned
        if not whole <= world * held < (1 + spare) * whole:
            differences.append(f"{held} bytes of {whole} on each of {world} ranks")
        dist.barrier()
        base.unshard()
    one, two = found
    assert one.keys() == two.keys() and any(x.any() for n, x in one.items() if "gradient" in n)
    return differences + [n for n, x in one.items() if not torch.equal(x, two[n])]


def worker(rank: int, device: torch.device, cases: list[Case]) -> dict[str, list[str]]:
    found = {}
    for case in cases:
        try:
            # gloo's scatter ends in ops that the imitated capture would record
            with mock.patch.object(
                comm, "sum_rows", own_rows_of_the_sum if device.type == "cpu" else comm.sum_rows
            ):
                found[str(case)] = compare(case, device)
        except Exception:  # a finding, so that the others run
            found[str(case)] = [traceback.format_exc()]
    return found


_ran: dict[tuple[str, int], Any] = {}


def results(backend: str, world: int, cases: tuple[Case, ...]) -> Any:
    if (backend, world) not in _ran:
        _ran[backend, world] = on_ranks(worker, world, backend, [*cases])
    return _ran[backend, world]


CASES = [pytest.param(w, c, id=f"{w} ranks-{c}") for w, cases in ON_CPU.items() for c in cases]


@pytest.mark.parametrize(("world", "case"), CASES)
def test_bits_are_those_over_whole_bases(world: int, case: Case) -> None:
    for found in results("gloo", world, ON_CPU[world]):
        assert found[str(case)] == []


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_bits_are_those_over_whole_bases_on_gpus(world: int, case: Case) -> None:
    """Rows are so short that each sum over keys is one block's, and has one order."""
    for found in results(backend_on_gpus(world), world, ON_GPU):
        assert found[str(case)] == []
