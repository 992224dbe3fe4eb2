# SPDX-License-Identifier: Apache-2.0
"""StepGraph: calls of other shapes and constants, and eager calls between replays."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from lorakernels.graphs import CaptureError, ReplayError
from tests.graphs.fake import FakeBackend
from tests.graphs.layers import WIDTH, Block
from tests.graphs.steps import Sgd, graphed

CPU = torch.device("cpu")


def test_eager_steps_between_replays(device: torch.device) -> None:
    """Their gradients end up where the graph has its own."""
    model = Block().to(device)
    twin = copy.deepcopy(model)
    ours, theirs = Sgd(model), Sgd(twin)
    ours.lr, theirs.lr = ours.lr.to(device), theirs.lr.to(device)
    run = graphed(ours, device, on_new_shape="eager")
    for step, rows in enumerate([3, 3, 3, 5, 3, 3, 3]):
        x = torch.randn(rows, WIDTH, device=device)
        if rows == 5:
            with pytest.warns(RuntimeWarning, match="this call runs eagerly"):
                found = run(x)
        elif step == 5:
            with run.disabled():
                found = run(x)
        else:
            found = run(x)
        assert torch.equal(found, theirs(x)), step
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q) and torch.equal(p.grad, q.grad), step
    assert run.phase == "replaying"


@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "to zero"])
def test_another_graph_for_each_new_shape(device: torch.device, to_none: bool) -> None:
    """The first call of a shape runs eagerly, the second captures; gradients are those of the call that ran last."""

    class Either(Sgd):
        def __call__(self, x: Tensor, half: bool = False) -> Tensor:
            self.model.zero_grad(set_to_none=to_none)
            loss = self.model(x).square().sum() * (0.5 if half else 1)
            loss.backward()
            with torch.no_grad():
                for p in self.model.parameters():
                    p -= 1e-2 * p.grad
            return loss.detach()

    model = Block().to(device)
    twin = copy.deepcopy(model)
    theirs = Either(twin)
    run = graphed(Either(model), device, on_new_shape="capture", max_shapes=3)
    with pytest.warns(RuntimeWarning) as found:
        for step, (rows, half) in enumerate(
            [(3, 0), (3, 0), (3, 0), (5, 0), (5, 0), (3, 0), (3, 1), (3, 1), (5, 0), (7, 0), (3, 0)]
        ):
            x = torch.randn(rows, WIDTH, device=device)
            assert torch.equal(run(x, half=bool(half)), theirs(x, bool(half))), step
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(p, q) and torch.equal(p.grad, q.grad), step
    said = [
        str(w.message) for w in found if "layer 'step'" in str(w.message) or "max" in str(w.message)
    ]
    assert len(said) == 2 and "captures another graph" in said[0] and "max_shapes=3" in said[1]
    report = run.report()
    assert [g.shape for g in report.graphs] == [0, 1, 2] and len(report.shapes) == 3
    run.recapture()
    for rows in (5, 3):
        x = torch.randn(rows, WIDTH, device=device)
        assert torch.equal(run(x, half=False), theirs(x, False)), rows
    assert [g.made for g in run.report().graphs] == ["updated", "updated"]
    model.up.weight.grad = None
    with pytest.raises(ReplayError, match=r"gradient of modules\[0\].up.weight"):
        run(x, half=False)
    run.reset()
    assert run.phase == "recording" and not run.report().graphs


def test_a_new_shape_that_cannot_be_captured_runs_eagerly(device: torch.device) -> None:
    class Waits(Sgd):
        def __call__(self, x: Tensor, half: bool = False) -> Tensor:
            loss = super().__call__(x)
            return loss * loss.item() if len(x) == 5 else loss

    model = Block().to(device)
    step, theirs = Waits(model), Waits(copy.deepcopy(model))
    step.lr, theirs.lr = step.lr.to(device) / 10, theirs.lr.to(device) / 10
    run = graphed(step, device, on_new_shape="capture")

    def same_step(rows: int) -> None:
        x = torch.randn(rows, WIDTH, device=device)
        assert torch.equal(run(x), theirs(x))
        for p, q in zip(model.parameters(), theirs.model.parameters(), strict=True):
            assert torch.equal(p, q) and torch.equal(p.grad, q.grad)

    for _ in range(4):
        same_step(3)
    with pytest.warns(RuntimeWarning, match="captures another graph"):
        same_step(5)
    with pytest.raises(CaptureError, match="waits for the device"):
        run(torch.randn(5, WIDTH, device=device))
    for rows in (3, 5, 3):
        same_step(rows)
    assert len(run.report().graphs) == 1


def test_constants_of_equal_value_and_another_type(device: torch.device) -> None:
    """F16."""
    step = Sgd(Block().to(device))
    step.lr = step.lr.to(device)
    run = graphed(step, device)
    x = torch.randn(3, WIDTH, device=device)
    for _ in range(4):
        run(x, half=1)
    with pytest.raises(ReplayError, match="arguments: expected 1, found True"):
        run(x, half=True)


class Wide(nn.Module):
    """Reaches `extra` for 5 rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.extra = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) + (self.extra(x) if len(x) == 5 else 0)


@pytest.mark.parametrize("inside", [True, False], ids=["zeroed inside", "not zeroed"])
def test_an_eager_call_that_reaches_more_parameters(device: torch.device, inside: bool) -> None:
    """Its gradient is gone when a replay comes, as the step's own zero_grad would have it; else the replay, in which
    the optimizer does not know that parameter, is refused."""

    class Plain(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p -= self.param_groups[0]["lr"] * p.grad

    class Train:
        def __init__(self, model: nn.Module) -> None:
            lr = torch.tensor(1e-2, device=device)
            self.model, self.optimizer = model, Plain(model.parameters(), {"lr": lr})

        def __call__(self, x: Tensor) -> Tensor:
            if inside:
                self.optimizer.zero_grad()
            loss = self.model(x).square().sum()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    model = Wide().to(device)
    step, theirs = Train(model), Train(copy.deepcopy(model))
    run = graphed(step, device, on_new_shape="eager", optimizers=[step.optimizer])
    for index, rows in enumerate([3, 3, 3, 5, 3, 3, 5, 5, 3]):
        x = torch.randn(rows, WIDTH, device=device)
        if index == 4 and not inside:
            with pytest.raises(ReplayError, match=r"gradient of modules\[0\].extra.weight"):
                run(x)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(run(x), theirs(x)), index
        for p, q in zip(model.parameters(), theirs.model.parameters(), strict=True):
            assert torch.equal(p, q) and (p.grad is None) == (q.grad is None), index
            assert p.grad is None or torch.equal(p.grad, q.grad), index


@pytest.mark.filterwarnings("ignore:replay of:RuntimeWarning")
def test_no_executable_graph_is_forgotten() -> None:
    """recapture() twice, a capture that fails, reset(): every graph that was made is destroyed."""
    backends: list[FakeBackend] = []

    def backend() -> FakeBackend:
        backends.append(FakeBackend(0 if len(backends) == 3 else None))
        return backends[-1]

    step = Sgd(Block())
    run = graphed(step, CPU, on_new_shape="capture", backend=backend)
    for rows in (3, 3, 3, 5, 5):
        run(torch.randn(rows, WIDTH))
    graphs = [one.graph for one in run._steps]
    assert len(graphs) == 2 and all(g.alive for g in graphs)
    run.recapture()
    run.recapture()
    assert all(g.alive for g in graphs)
    run(torch.randn(3, WIDTH))
    run.recapture()
    with pytest.raises(CaptureError):
        for _ in range(3):
            run(torch.randn(3, WIDTH))
    run.reset()
    assert not any(g.alive for g in graphs)
