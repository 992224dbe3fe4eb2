# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs over several ranks: collectives inside a captured step, and after or around captured layers.

Each scenario trains the same model graphed and eagerly, on each rank's own data, and returns what every step computed
by either; NCCL on two GPUs, and gloo with the graphs that tests/graphs/fake.py imitates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lorakernels.graphs import GraphManager, GraphOptions, StepGraph
from torch import Tensor, nn

from lorakernels import DelayedScaling, LoRAConfig, PhiloxState, apply_lora
from lorakernels.modules.linear import frozen
from tests.graphs.layers import backend_for
from tests.processes import on_ranks

pytestmark = pytest.mark.slow

WORLD, STEPS, WIDTH, ROWS = 2, 5, 64, 32
Found = list[tuple[Tensor, ...]]


def adapted(device: torch.device) -> nn.Module:
    """Two blocks with LoRA over FP8 and dropout, the same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in "ab")
    ).to(device, torch.bfloat16)
    config = LoRAConfig(
        r=8,
        lora_dropout=0.1,
        target_modules=["0.0", "0.2", "1.0", "1.2"],
        fp8=DelayedScaling(amax_history_len=4),
    )
    report = apply_lora(model, config, rng_state=PhiloxState(3, device))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.2)
    model.fp8 = report.fp8_state
    return model.train()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def rng_of(model: nn.Module) -> PhiloxState:
    return model[0][0].rng_state


def batches(rank: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(10 + rank)
    data = torch.randn(STEPS, 2, ROWS, WIDTH, generator=generator)
    return [tuple(pair.to(device, torch.bfloat16)) for pair in data * (1 + rank)]


class Step:
    """Forward, backward, all-reduce of the gradients, SGD, and the update of the FP8 scales over `group`."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        self.model, self.group, self.calls = model, group, 0

    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.model.zero_grad(set_to_none=True)
        loss = (self.model(x) - target).float().square().mean()
        loss.backward()
        for p in trained(self.model):
            dist.all_reduce(p.grad, group=self.group)
            p.grad.div_(WORLD)
        with torch.no_grad():
            for p in trained(self.model):
                p -= 0.1 * p.grad
        self.model.fp8.reduce_and_update(self.group)
        return loss.detach()


def state_of(model: nn.Module, loss: Tensor) -> tuple[Tensor, ...]:
    fp8 = model.fp8
    found = [loss, *(p for p in trained(model)), *(p.grad for p in trained(model))]
    return tuple(x.detach().float().cpu().clone() for x in [*found, fp8.forward, fp8.backward])


def whole_step(rank: int, device: torch.device, group: Any) -> tuple[Found, Found, int]:
    """StepGraph: NCCL's kernels are nodes of the graph."""
    model = adapted(device)
    twin = copy.deepcopy(model)
    ours, theirs = Step(model, group), Step(twin, group)
    run = StepGraph(
        ours,
        warmup_steps=2,
        fp8_state=model.fp8,
        rng_states=[rng_of(model)],
        modules=[model],
        options=GraphOptions(backend=backend_for(device)),
    )
    found: Found = []
    expected: Found = []
    for step, (x, target) in enumerate(batches(rank, device)):
        start = torch.get_rng_state()
        if step == 2:
            at_capture = start
        found.append(state_of(model, run(x, target)))
        torch.set_rng_state(start if step < 2 else at_capture)
        expected.append(state_of(twin, theirs(x, target)))
        if step >= 2:
            rng_of(twin).advance()
    assert run.phase == "replaying" and ours.calls == 3
    nccl = sum("nccl" in name.lower() for name in run.report().graphs[0].kernels)
    run.reset()  # graphs die before their communicator
    return found, expected, nccl


def around_layers(rank: int, device: torch.device, group: Any, ddp: bool) -> tuple[Found, Found]:
    """GraphManager, with DDP around the model or an all-reduce after its backward."""
    model = adapted(device)
    twin = copy.deepcopy(model)
    manager = GraphManager(
        list(model),
        warmup_steps=2,
        fp8_state=model.fp8,
        rng_states=[rng_of(model)],
        options=GraphOptions(backend=backend_for(device)),
    )
    wrap: Callable[[nn.Module], nn.Module] = (
        (lambda m: nn.parallel.DistributedDataParallel(m, process_group=group))
        if ddp
        else (lambda m: m)
    )
    wrapped = [wrap(m) for m in (model, twin)]
    found: tuple[Found, Found] = ([], [])
    for x, target in batches(rank, device):
        replaying, start = manager.phase == "replaying", torch.get_rng_state()
        for index, (outer, inner) in enumerate(zip(wrapped, (model, twin), strict=True)):
            torch.set_rng_state(start)
            if index and replaying:
                torch.set_rng_state(manager.cpu_rng_at_capture)
            inner.zero_grad()
            loss = (outer(x) - target).float().square().mean()
            loss.backward()
            if not ddp:
                for p in trained(inner):
                    dist.all_reduce(p.grad, group=group)
                    p.grad.div_(WORLD)
            if index and replaying:
                rng_of(inner).advance()
            with torch.no_grad():
                for p in trained(inner):
                    p -= 0.1 * p.grad
            inner.fp8.reduce_and_update(group)
            found[index].append(state_of(inner, loss))
        manager.end_iteration()
    assert manager.phase == "replaying" and (manager._blocks.grad_memory is None) is ddp
    manager.close()
    return found


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        frozen.STORAGE = torch.uint8  # gloo broadcasts no FP8
    group = dist.new_group(list(range(WORLD)))
    *step, nccl = whole_step(rank, device, group)
    return {
        "a whole step": step,
        "DDP": around_layers(rank, device, group, ddp=True),
        "an all-reduce after the backward": around_layers(rank, device, group, ddp=False),
        "NCCL kernels": nccl,
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("gloo", id="gloo-2"),
        pytest.param("nccl", id="nccl-2", marks=pytest.mark.gpu),
    ],
)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """By rank: {scenario: (graphed, eager)}, each a list over steps of what was computed."""
    if request.param == "nccl" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs, found {torch.cuda.device_count()}")
    return on_ranks(worker, WORLD, request.param)


SCENARIOS = ["a whole step", "DDP", "an all-reduce after the backward"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_graphed_and_eager_training_are_bit_equal_on_every_rank(
    ranks: list[dict[str, Any]], scenario: str
) -> None:
    """Losses, parameters, gradients after the reduction, and FP8 scales and histories. Two ranks' sum has one order."""
    for rank, found in enumerate(ranks):
        graphed, eager = found[scenario]
        assert len(graphed) == len(eager) == STEPS
        for step, (ours, theirs) in enumerate(zip(graphed, eager, strict=True)):
            for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert torch.equal(a, b), (rank, step, index)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_with_different_data_agree(ranks: list[dict[str, Any]], scenario: str) -> None:
    for step, (one, other) in enumerate(zip(*(r[scenario][0] for r in ranks), strict=True)):
        assert not torch.equal(one[0], other[0]), "their losses differ"
        for a, b in zip(one[1:-2], other[1:-2], strict=True):
            assert torch.equal(a, b), step
        for a, b in zip(one[-2:], other[-2:], strict=True):
            assert torch.equal(a[-1], b[-1]) and torch.equal(a[1:-1], b[1:-1]), "FP8 state"
            assert (a[-1] > 0).all() and not torch.equal(a[-1], torch.ones_like(a[-1]))


@pytest.mark.gpu
def test_the_step_graph_holds_the_collectives(ranks: list[dict[str, Any]], request: Any) -> None:
    if "gloo" in request.node.callspec.id:
        pytest.skip("gloo has no kernels")
    assert all(found["NCCL kernels"] > 0 for found in ranks)
