# SPDX-License-Identifier: Apache-2.0
"""StepGraph: a whole training step in one graph, beside an eager twin, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lorakernels.graphs import CaptureError, ReplayError
from torch import Tensor, nn

from lorakernels import DelayedScaling, FP8State
from tests.graphs.layers import WIDTH, Block, Counting, Drop, State
from tests.graphs.steps import Sgd, Step, graphed


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


@pytest.mark.parametrize("how", ["reset", "recapture"])
def test_a_graph_that_is_dropped_leaves_the_gradients(device: torch.device, how: str) -> None:
    """In memory that is not the graph's, once and again; the steps after it go on as eager ones."""
    model = Block().to(device)
    twin = copy.deepcopy(model)
    ours, theirs = Sgd(model), Sgd(twin)
    ours.lr, theirs.lr = ours.lr.to(device), theirs.lr.to(device)
    run = graphed(ours, device)
    for _ in range(3):
        for _ in range(5):
            x = torch.randn(3, WIDTH, device=device)
            assert torch.equal(run(x), theirs(x))
        assert run.phase == "replaying"
        before = [p.grad for p in model.parameters()]
        getattr(run, how)()
        for p, q, grad in zip(model.parameters(), twin.parameters(), before, strict=True):
            assert torch.equal(p, q) and torch.equal(p.grad, q.grad)
            assert p.grad.untyped_storage()._cdata != grad.untyped_storage()._cdata


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
    with pytest.raises(CaptureError, match=r"layer 'step', capture: .*waits for the device"):
        run(x)
    assert all(map(torch.equal, before, [t for p in model.parameters() for t in (p, p.grad)]))
    run(x)
    assert not torch.equal(before[0], model.up.weight)


class Positions(nn.Module):
    """Reads on the host, as transformers' dynamic RoPE does, and longrope in earlier versions: max(position_ids)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.abs().max() > 1e6 else x


def test_a_module_that_waits_for_the_device_is_named(device: torch.device) -> None:
    step = Sgd(nn.Sequential(Block(), nn.Sequential(Positions()), Block()).to(device))
    step.lr = step.lr.to(device)
    run = graphed(step, device)
    x = torch.randn(3, WIDTH, device=device)
    for _ in range(2):
        run(x)
    with pytest.raises(CaptureError, match=r"capture: in Positions: .*waits for the device"):
        run(x)
    run(x)


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


class Updates(Sgd):
    """A step that draws, counts and updates FP8 scales."""

    def __init__(self, model: nn.Module, fp8: FP8State) -> None:
        super().__init__(model)
        self.fp8 = fp8

    def __call__(self, x: Tensor, half: bool = False) -> Tensor:
        loss = super().__call__(x)
        self.fp8.reduce_and_update()
        if half:
            raise RuntimeError("late")
        return loss


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_a_capture_leaves_states_and_generators(device: torch.device, fails: bool) -> None:
    """What a replay, or the eager step after a failure, draws and scales by is what it was before."""
    state, fp8 = State(device), FP8State(["x"], DelayedScaling(amax_history_len=4), device)
    step = Updates(nn.Sequential(Counting(), Drop(state)).to(device), fp8)
    step.lr = step.lr.to(device)
    run = graphed(step, device, warmup_steps=1, rng_states=[state], fp8_state=fp8)
    start = fp8.state_dict()
    x = torch.randn(3, WIDTH, device=device)
    run(x)
    fp8.load_state_dict(start)  # nobody is in charge, as in a state that is new
    fp8.forward[0], fp8.backward[0] = 3.0, 5.0

    def now() -> list[Tensor]:
        found = [torch.get_rng_state(), state.tensor, fp8.forward, fp8.backward]
        found += [*step.model.parameters(), *step.model.buffers()]
        if device.type == "cuda":
            found.append(torch.cuda.get_rng_state())
        return [x.detach().clone() for x in found]

    before = now()
    if fails:
        with pytest.raises(CaptureError, match="late"):
            run.capture(x, half=True)
        assert fp8.pinned_by is None
    else:
        run.capture(x)
    assert all(map(torch.equal, before, now()))
    assert fp8.in_charge == "auto"
