# SPDX-License-Identifier: Apache-2.0
"""FSDP2 over layers whose base it ignores, and over unfused ones whole: bits of the layers without it, on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorakernels import DelayedScaling, attach, fuse
from lorakernels.parallel import ShardedAdamW
from tests.fusion.fused_models import LINEARS, adapted, fp8_state
from tests.graphs.layers import backend_for
from tests.processes import on_ranks

pytestmark = pytest.mark.slow

WORLD, STEPS = 2, 3
UNFUSED = "unfused"
BYTES = (torch.uint8, torch.float8_e4m3fn)


def net(family: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    trained = ["model.norm", "layers.0.input_layernorm", "layers.1.post_attention_layernorm"]
    model = adapted(
        family, LINEARS, fp8=DelayedScaling(amax_history_len=4), modules_to_save=trained
    )
    return model.to(device)


def batch(rank: int, step: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(64, (2, 12), generator=generator).to(device)


def ignored_of(model: nn.Module, ignores: str) -> set[nn.Parameter]:
    """The base and: nothing else, all that is frozen, or all but the embedding, the head and the norms."""
    wanted = {
        "the base": lambda name, p: p.dtype in BYTES or name.endswith("_proj.bias"),
        "what is frozen": lambda name, p: not p.requires_grad,
        "the layers": lambda name, p: "_proj." in name,
        "nothing": lambda name, p: False,
    }[ignores]
    return {p for name, p in model.named_parameters() if wanted(name, p)}


def shard(model: nn.Module, ignores: str, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, ignored = init_device_mesh(device.type, (WORLD,)), ignored_of(model, ignores)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    return fully_shard(model, mesh=mesh, ignored_params=ignored)


def reduce(params: list[Tensor]) -> None:
    for p in params:
        if p.grad is not None:
            dist.all_reduce(p.grad.div_(WORLD))


def train(
    model: nn.Module, rank: int, device: torch.device, sharded: bool, apart: list[Any]
) -> dict[str, Any]:
    """`apart`: parameters that FSDP does not reduce. Without FSDP, all of them are reduced here."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
    attached, losses = attach(model, optimizer), []
    for step in range(STEPS):
        x = batch(rank, step, device)
        loss = model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        reduce(apart if sharded else trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    assert not sharded or not attached.replaying
    state = fp8_state(model)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    full = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in named.items()}
    return {
        "losses": losses,
        "trained": {n: p.detach().cpu() for n, p in full.items()},
        "scales": [state.forward.cpu().clone(), state.backward.cpu().clone()],
    }


def both(
    rank: int, device: torch.device, family: str, ignores: str, save: str
) -> list[dict[str, Any]]:
    """What is trained with FSDP, and without it."""
    model = net(family, device)
    if save != UNFUSED:
        fuse(model, save=save)
    twin = copy.deepcopy(model)
    if save == "recompute":  # its members are joined before
        model(input_ids=batch(rank, 0, device), use_cache=False)
        twin(input_ids=batch(rank, 0, device), use_cache=False)
    shard(model, ignores, device)
    ignored = ignored_of(model, ignores)
    apart = [p for p in model.parameters() if p in ignored and p.requires_grad]
    assert all(hasattr(p, "device_mesh") != (p in ignored) for p in model.parameters())
    return [train(model, rank, device, True, apart), train(twin, rank, device, False, [])]


CASES = [
    ("Llama", "what is frozen", "recompute"),
    ("Llama", "the base", "checkpoint"),
    ("Llama", "the layers", "fp8"),
    ("Qwen2", "the base", "full"),
    ("Phi3", "what is frozen", "recompute"),
    ("Phi3", "nothing", "recompute"),
    ("Llama", "what is frozen", UNFUSED),
    ("Llama", "nothing", UNFUSED),
]


def worker(rank: int, device: torch.device) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """One start of the ranks for all cases."""
    return {case: both(rank, device, *case) for case in CASES}


_ran: dict[str, list[dict[Any, list[dict[str, Any]]]]] = {}


def results(backend: str) -> list[dict[Any, list[dict[str, Any]]]]:
    """Of every rank, by case."""
    if backend == "nccl" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs, found {torch.cuda.device_count()}")
    if backend not in _ran:
        _ran[backend] = on_ranks(worker, WORLD, backend)
    return _ran[backend]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_bits_are_those_without_fsdp(backend: str, case: tuple[str, str, str]) -> None:
    for found in results(backend):
        ours, theirs = found[case]
        assert all(map(torch.equal, ours["losses"], theirs["losses"]))
        assert ours["trained"].keys() == theirs["trained"].keys()
        differ = [n for n, p in ours["trained"].items() if not torch.equal(p, theirs["trained"][n])]
        assert differ == []
        assert all(map(torch.equal, ours["scales"], theirs["scales"]))


def replayed(rank: int, device: torch.device) -> list[list[Tensor]]:
    """Only the embedding, the head and the last norm are sharded; adapters by ShardedAdamW, and without either."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, found = init_device_mesh(device.type, (WORLD,)), []
    for sharded in (True, False):
        model = net("Llama", device)
        fuse(model)
        trained = [p for p in model.model.layers.parameters() if p.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
        if sharded:
            fully_shard(model, mesh=mesh, ignored_params={*model.model.layers.parameters()})
            assert hasattr(model.lm_head.weight, "device_mesh")
            optimizer = ShardedAdamW(trained, mesh, lr=1e-2)
        attached = attach(
            model, optimizer, graphs=sharded, warmup_steps=1, backend=backend_for(device)
        )
        for step in range(STEPS):
            x = batch(rank, step, device)
            model(input_ids=x, labels=x).loss.backward()
            if not sharded:
                reduce(trained)
            optimizer.step()
            optimizer.zero_grad()
        assert attached.replaying == sharded, attached.why_not
        assert attached.replayed == (STEPS - 1 if sharded else 0)
        found.append([p.detach().cpu() for p in trained])
        attached.detach()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_layers_that_fsdp_ignores_are_replayed(backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs, found {torch.cuda.device_count()}")
    for ours, theirs in on_ranks(replayed, WORLD, backend):
        assert all(map(torch.equal, ours, theirs))


def unprepared(rank: int, device: torch.device) -> str:
    model = net("Llama", device)
    fuse(model)
    shard(model, "nothing", device)
    try:
        model(input_ids=batch(rank, 0, device), use_cache=False)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_a_base_that_fsdp_manages_is_refused_with_what_to_do() -> None:
    for said in on_ranks(unprepared, WORLD, "gloo"):
        assert "q_proj is managed by FSDP" in said and "ignored_params={p for p in" in said
