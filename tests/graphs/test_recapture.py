# SPDX-License-Identifier: Apache-2.0
"""Captures that fail, at any point, and captures anew: what is left, freed, updated."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from lorakernels.graphs import (
    CaptureError,
)

from tests.graphs.fake import FakeBackend
from tests.graphs.layers import (
    Block,
    Counting,
    State,
    batches,
    managed,
    run,
    same,
    twins,
    warm,
)

CPU = torch.device("cpu")


@pytest.mark.slow
def test_a_failed_capture_leaves_nothing_and_a_second_one_succeeds() -> None:
    """F29, at every single capture: forward and backward of three layers."""
    for fail_at in range(6):
        ours, theirs = twins(CPU, 3, Counting)
        made = [FakeBackend(fail_at), FakeBackend()]
        given = iter(made)
        manager = managed(ours, CPU, backend=lambda given=given: next(given))
        x = next(batches(CPU, 1))
        run(ours, x).sum().backward(), run(theirs, x).sum().backward()
        before = [t.clone() for t in ours.buffers()]
        with pytest.raises(CaptureError, match="cudaErrorStreamCaptureInvalidated") as error:
            manager.end_iteration()
        layer, phase = (fail_at, "forward") if fail_at < 3 else (5 - fail_at, "backward")
        assert (error.value.layer, error.value.phase) == (str(layer), phase)
        assert error.value.cuda == "cudaErrorStreamCaptureInvalidated"
        assert "run eagerly until capture() succeeds" in manager.explain(error.value)
        del error
        gc.collect()
        assert made[0].released and made[0].arena.live == 0
        assert all(map(torch.equal, before, ours.buffers()))
        assert not any("forward" in vars(layer) for layer in ours)
        for step in range(4):
            run(ours, x).sum().backward(), run(theirs, x).sum().backward()
            same(ours, theirs, step)
            manager.end_iteration()
            if step == 1:
                manager.capture()
        assert manager.phase == "replaying"


class Factor(Block):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


def test_an_attribute_that_changes_again_is_seen_again(device: torch.device) -> None:
    """Each recapture takes the value of then, and watches it from then on."""
    ours, theirs = twins(device, 2, Factor)
    manager = managed(ours, device)
    warm(manager, ours, device)
    for factor in (2.0, 3.0, 1.0, 2.0):
        ours[1].factor = theirs[1].factor = factor
        x = next(batches(device, 1))
        with pytest.raises(RuntimeError, match=r"factor.*manager.recapture\(\)"):
            run(ours, x)
        manager.discard_iteration()
        manager.recapture()
        for step in range(2):
            x = next(batches(device, 1))
            for layers in (ours, theirs):
                layers.zero_grad()
                run(layers, x).sum().backward()
            same(ours, theirs, (factor, step))
            manager.end_iteration()


@pytest.mark.parametrize("after_reset", [False, True], ids=["at first", "after a reset"])
def test_an_iteration_discarded_while_recording_leaves_no_trace(
    device: torch.device, after_reset: bool
) -> None:
    """Of another shape and of fewer layers, after each of its parts."""
    ours, theirs = twins(device, 3)
    manager = managed(ours, device, warmup_steps=2)
    if after_reset:
        warm(manager, ours, device)
        manager.reset()
        with pytest.raises(RuntimeError, match="nothing recorded yet"):
            manager.capture()
    for layers, backward in ((ours, True), (ours[:1], True), (ours[:2], False)):
        y = run(layers, next(batches(device, 1, rows=5)))
        if backward:
            y.sum().backward()
        manager.discard_iteration()
        warm_up = next(batches(device, 1))
        run(ours, warm_up).sum().backward()
        manager.discard_iteration()
    ours.zero_grad()
    for step in range(5):
        x = next(batches(device, 1))
        for layers in (ours, theirs):
            run(layers, x).sum().backward()
        same(ours, theirs, step)
        manager.end_iteration()
        for layers in (ours, theirs):
            layers.zero_grad()
    assert manager.phase == "replaying" and manager.replayed == 3


def test_recapture_takes_new_parameters(device: torch.device) -> None:
    """F30: load_state_dict(assign=True) moves every parameter."""
    ours, theirs = twins(device)
    manager = managed(ours, device)
    warm(manager, ours, device)
    state = {k: torch.randn_like(v) for k, v in ours.state_dict().items()}
    ours.load_state_dict(copy.deepcopy(state), assign=True)
    theirs.load_state_dict(state)
    x = next(batches(device, 1))
    with pytest.raises(RuntimeError, match=r"parameters of up.*manager.recapture\(\)"):
        run(ours, x)
    manager.discard_iteration()
    manager.recapture()
    for step in range(3):
        run(ours, x).sum().backward(), run(theirs, x).sum().backward()
        same(ours, theirs, step)
        manager.end_iteration()


def test_a_recapture_updates_the_executable_graphs(device: torch.device) -> None:
    """cudaGraphExecUpdate where the nodes are the same, a new instantiation where they are not; the report says so."""

    class Gated(Block):
        gate = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y * 2 if self.gate else y

    ours, theirs = twins(device, 2, Gated)
    manager = managed(ours, device)
    warm(manager, ours, device)
    executable = [c.forward_graph for c in manager.graphs.calls]
    assert {g.made for g in manager.report().graphs} == {"instantiated"}
    state = {k: torch.randn_like(v) for k, v in ours.state_dict().items()}
    for changed in (False, True):
        for layers in (ours, theirs):
            layers.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
            layers[1].gate = changed
        manager.recapture()
        report = manager.report()
        made = {(g.layer, g.direction): g.made for g in report.graphs}
        assert made["0", "forward"] == made["0", "backward"] == "updated"
        if changed:
            assert made["1", "forward"].startswith("instantiated: "), made
            assert f"recaptured: {list(made.values()).count('updated')} of 4" in str(report)
        else:
            assert set(made.values()) == {"updated"} and "4 of 4 graphs by an update" in str(report)
            assert [c.forward_graph for c in manager.graphs.calls] == executable
        for step in range(3):
            x = next(batches(device, 1))
            for layers in (ours, theirs):
                run(layers, x).square().sum().backward()
            same(ours, theirs, (changed, step))
            manager.end_iteration()


@pytest.mark.slow
def test_a_failed_recapture_frees_the_graphs_it_had_kept() -> None:
    for fail_at in range(4):
        ours, theirs = twins(CPU, 2)
        made = [FakeBackend(), FakeBackend(fail_at), FakeBackend()]
        given = iter(made)
        manager = managed(ours, CPU, backend=lambda given=given: next(given))
        warm(manager, ours, CPU)
        with pytest.raises(CaptureError, match="cudaErrorStreamCaptureInvalidated"):
            manager.recapture()
        gc.collect()
        for backend in made[:2]:
            assert backend.released and backend.arena.live == 0
            assert not [g for g in backend.graphs if g() is not None and g().alive]
        assert manager.phase == "failed" and not any("forward" in vars(x) for x in ours)
        manager.recapture()
        for step in range(2):
            x = next(batches(CPU, 1))
            for layers in (ours, theirs):
                run(layers, x).square().sum().backward()
            same(ours, theirs, step)
            manager.end_iteration()


@pytest.mark.parametrize("where", ["the fingerprints", "the pins", "the report"])
def test_a_failure_after_the_last_capture_leaves_nothing(monkeypatch, where: str) -> None:
    """F29, beyond the captures themselves."""
    from lorakernels.graphs.capture import captured_blocks

    class Pinned(State):
        in_charge = "user"

        def __init__(self) -> None:
            super().__init__(CPU)
            self.pins: list[str] = []

        @property
        def pinned_by(self) -> str | None:
            return ", ".join(self.pins) or None

        def pin(self, by: str) -> None:
            self.pins.append(by)
            if where == "the pins" and len(self.pins) == 1 and failing:
                raise RuntimeError("late")

        def unpin(self, by: str) -> None:
            self.pins.remove(by)

        def save(self) -> torch.Tensor:
            return self.tensor.clone()

        def restore(self, saved: torch.Tensor) -> None:
            self.tensor.copy_(saved)

    failing, state, made = [1], Pinned(), [FakeBackend(), FakeBackend()]
    ours, theirs = twins(CPU, 2)
    given = iter(made)
    manager = managed(ours, CPU, fp8_state=state, backend=lambda: next(given))
    run(ours, next(batches(CPU, 1))).square().sum().backward()
    grads = [p.grad for p in ours.parameters()]

    def late(*_: object) -> None:
        raise RuntimeError("late")

    with monkeypatch.context() as patch:
        if where == "the fingerprints":
            real, count = captured_blocks.LayerWatch, []
            patch.setattr(
                captured_blocks,
                "LayerWatch",
                lambda *a: late() if count.append(1) or count[1:] else real(*a),
            )
        elif where == "the report":
            patch.setattr(captured_blocks, "_report", late)
        with pytest.raises(CaptureError, match="install: RuntimeError: late"):
            manager.end_iteration()
    failing.clear()
    gc.collect()
    assert made[0].released and made[0].arena.live == 0 and state.pinned_by is None
    assert not any("forward" in vars(layer) for layer in ours) and manager.graphs is None
    assert all(p.grad is g for p, g in zip(ours.parameters(), grads, strict=True))
    manager.capture()
    assert state.pinned_by == "lorakernels.graphs"
    for p in ours.parameters():
        p.grad = None
    for step in range(3):
        x = next(batches(CPU, 1))
        for layers in (ours, theirs):
            run(layers, x).square().sum().backward()
        same(ours, theirs, step)
        manager.end_iteration()
