# SPDX-License-Identifier: Apache-2.0
"""scope="iteration": a whole training step in one graph, beside an eager twin, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lorakernels.graphs import CaptureError, GraphManager, ReplayError
from torch import Tensor, nn

from tests.graphs.layers import WIDTH, Block, Drop, State, backend_for


class Step:
    """Two microbatches, loss, backward, clipping, AdamW, and a loss scale and a learning rate on the device."""

    def __init__(self, model: nn.Module, device: torch.device, outside: bool = False) -> None:
        self.model, self.outside = model, outside
        self.lr = torch.tensor(1e-2, device=device)
        self.scale = torch.tensor(4.0, device=device)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.lr, capturable=True, foreach=True
        )
        self.calls = 0

    def __call__(self, xs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if not self.outside:
            self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=xs.device)
        for x, target in zip(xs, targets, strict=True):
            loss = (self.model(x) - target).square().mean()
            (loss * self.scale).backward()
            total = total + loss.detach()
        for p in self.model.parameters():
            p.grad.div_(self.scale)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return {"loss": total, "norm": norm}


def graphed(step: Any, device: torch.device, **options: Any) -> Any:
    options = {"warmup_steps": 2, "backend": backend_for(device), **options}
    return GraphManager(step, "iteration", modules=[step.model], **options)


@pytest.mark.gpu
def test_a_whole_step_is_bit_equal() -> None:
    device = torch.device("cuda")
    state = State(device)
    model = nn.Sequential(Block(), Drop(state, 0.1), Block()).to(device)
    twin = copy.deepcopy(model)
    twin[1].state = twin_state = State(device)
    ours, theirs = Step(model, device), Step(twin, device)
    run = graphed(ours, device, optimizers=[ours.optimizer], rng_states=[state])
    losses = []
    for step in range(6):
        xs, targets = torch.randn(2, 2, 3, WIDTH, device=device)
        replays = step >= 2
        if step == 2:
            at_capture = torch.get_rng_state()
        if step == 4:
            for one in (ours, theirs):
                one.lr.fill_(1e-3), one.scale.fill_(8.0)
        before = torch.get_rng_state()
        found = run(xs, targets)
        torch.set_rng_state(at_capture if replays else before)
        expected = theirs(xs, targets)
        if replays:
            twin_state.advance()
        assert all(torch.equal(found[k], expected[k]) for k in expected), step
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q) and torch.equal(p.grad, q.grad), step
        losses.append(found["loss"])
    assert run.phase == "replaying" and ours.calls == 3 and state.tensor[1] == 4
    assert len({x.item() for x in losses}) == 6, "each call returns its own tensors"
    assert run.report().graphs[0].nodes["kernel"] > 20
    with pytest.raises(ReplayError, match=r"input \[0\]\[0\]: expected float32 \[2, 3, 8\]"):
        run(xs[:1], targets)
    model[0].up.weight.grad = None
    with pytest.raises(ReplayError, match=r"gradient of .*0.up.weight \(zero it inside the step"):
        run(xs, targets)
    run.reset()
    run(xs, targets)


class Sgd:
    """A step without an optimizer, which the CPU can capture."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.lr = model, torch.tensor(0.1)

    def __call__(self, x: Tensor, half: bool = False) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        loss = self.model(x).square().sum()
        loss.backward()
        with torch.no_grad():
            for p in self.model.parameters():
                p -= self.lr.to(p.device) * p.grad
        return loss.detach()


def test_replays_on_any_device(device: torch.device) -> None:
    model = Block().to(device)
    twin = copy.deepcopy(model)
    ours, theirs = Sgd(model), Sgd(twin)
    ours.lr, theirs.lr = ours.lr.to(device), theirs.lr.to(device)
    run = graphed(ours, device)
    for step in range(5):
        x = torch.randn(3, WIDTH, device=device)
        assert torch.equal(run(x), theirs(x)), step
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q) and torch.equal(p.grad, q.grad), step
    for change, message in [
        (lambda: run(x, half=True), "arguments"),
        (lambda: run(x.t()), r"input \[0\]\[0\]"),
        (lambda: run(x[:1]), r"found float32 \[1, 8\]"),
    ]:
        with pytest.raises(ReplayError, match=message):
            change()
    model.up.weight.data = model.up.weight.data.clone()
    with pytest.raises(ReplayError, match=r"address of 'up.weight'.*recapture\(\)"):
        run(x)
    twin.load_state_dict(model.state_dict())
    run.recapture()
    for _ in range(2):
        assert torch.equal(run(x), theirs(x))
    with run.disabled():
        assert torch.equal(run(x), theirs(x))


def test_what_would_be_frozen_is_refused(device: torch.device) -> None:
    model = Block().to(device)
    for optimizer, message in [
        (
            torch.optim.SGD(model.parameters(), lr=0.1),
            r"SGD.param_groups\[0\]\['lr'\] is the number 0.1",
        ),
        (
            torch.optim.Adam(
                model.parameters(), lr=torch.tensor(0.1, device=device), foreach=False
            ),
            r"Adam.param_groups\[0\] has capturable=False",
        ),
    ]:
        run = graphed(Sgd(model), device, optimizers=[optimizer])
        run.step.lr = run.step.lr.to(device)
        x = torch.randn(3, WIDTH, device=device)
        for _ in range(2):
            run(x)
        with pytest.raises(CaptureError, match=message):
            run(x)
        run(x)  # eagerly, until recapture()
        assert run.phase == "failed"


def test_a_failed_capture_trains_nothing_and_goes_on_eagerly(device: torch.device) -> None:
    model = Block().to(device)

    class Waits(Sgd):
        def __call__(self, x: Tensor, half: bool = False) -> Tensor:
            loss = super().__call__(x)
            return loss * loss.item()

    step = Waits(model)
    step.lr = step.lr.to(device)
    run = graphed(step, device)
    x = torch.randn(3, WIDTH, device=device)
    for _ in range(2):
        run(x)
    before = [t.detach().clone() for p in model.parameters() for t in (p, p.grad)]
    with pytest.raises(CaptureError, match=r"layer 'iteration', capture: .*waits for the device"):
        run(x)
    assert all(map(torch.equal, before, [t for p in model.parameters() for t in (p, p.grad)]))
    run(x)
    assert not torch.equal(before[0], model.up.weight)


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


def test_autocast_is_part_of_the_call(device: torch.device) -> None:
    run = graphed(Sgd(Block().to(device)), device)
    run.step.lr = run.step.lr.to(device)
    x = torch.randn(3, WIDTH, device=device)
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        for _ in range(4):
            run(x)
    with pytest.raises(ReplayError, match=r"autocast: expected \(True, torch.bfloat16\)"):
        run(x)


class Result(dict):
    """As transformers' ModelOutput: a dict, but not the type."""


def test_an_output_that_a_replay_cannot_renew(device: torch.device) -> None:
    step = Sgd(Block().to(device))
    step.lr = step.lr.to(device)
    wrapped = lambda x: Result(loss=step(x))  # noqa: E731
    wrapped.model = step.model
    run = graphed(wrapped, device, warmup_steps=1)
    x = torch.randn(3, WIDTH, device=device)
    run(x)
    with pytest.raises(CaptureError, match=r"output value is a .*Result, which a replay cannot"):
        run(x)


CHANGES = {
    "a learning rate": lambda o: o.param_groups[0].update(lr=torch.zeros(())),
    "a number": lambda o: o.param_groups[0].update(weight_decay=0.5),
    "a state": lambda o: o.state[o.param_groups[0]["params"][0]].update(step=torch.zeros(())),
    "all of it": lambda o: o.load_state_dict(o.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_optimizer(device: torch.device, change: Any) -> None:
    step = Sgd(Block().to(device))
    step.lr = step.lr.to(device)
    optimizer = torch.optim.SGD(step.model.parameters(), lr=step.lr)
    for p in step.model.parameters():
        optimizer.state[p]["step"] = torch.zeros((), device=device)
    run = graphed(step, device, optimizers=[optimizer])
    x = torch.randn(3, WIDTH, device=device)
    for _ in range(4):
        run(x)
    change(optimizer)
    with pytest.raises(ReplayError, match=r"optimizers\[0\].*recapture\(\)"):
        run(x)
    run.recapture()
    run(x)


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
        str(w.message) for w in found if "iteration" in str(w.message) or "max" in str(w.message)
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
