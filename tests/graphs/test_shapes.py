# SPDX-License-Identifier: Apache-2.0
"""on_new_shape="capture": a set of graphs for each kind of block. Beside an eager twin, bit for bit.

Losses are sums of squares: the gradient of a plain sum is one number, expanded, which a replay copies to memory of its
own, and cuBLAS multiplies the two in another order (seen on an H200 with 5 rows).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lorakernels.graphs import ReplayError, ReplayOrderError
from torch import Tensor, nn

from tests.graphs.layers import (
    WIDTH,
    Block,
    Drop,
    State,
    batches,
    managed,
    run,
    same,
    twins,
    warm,
)

CPU = torch.device("cpu")


class Factor(Block):
    """A constant beside the tensor."""

    def forward(self, x: Tensor, factor: float = 1) -> Tensor:
        return super().forward(x) * factor


def batch(rows: int, device: torch.device) -> Tensor:
    return torch.randn(rows, WIDTH, device=device)


def step(layers: Any, x: Tensor, factor: float = 1) -> Tensor:
    for layer in layers:
        x = layer(x, factor)
    return x


def captured_blocks(manager: Any) -> int:
    return len(manager.report().shapes)


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_each_shape_runs_eagerly_once_and_is_replayed_then(device: torch.device) -> None:
    ours, theirs = twins(device)
    manager = managed(ours, device, on_new_shape="capture")
    warm(manager, ours, device)
    blocks = []
    for index, rows in enumerate([3, 5, 5, 3, 7, 5, 7, 3]):
        x = batch(rows, device)
        results = [run(layers, x) for layers in (ours, theirs)]
        assert torch.equal(*results), index
        for y in results:
            y.square().sum().backward()
        same(ours, theirs, index)
        manager.end_iteration()
        blocks.append([s.graphs.blocks for s in manager._blocks.captured])
    assert blocks[0] == [1] and blocks[1] == [1, 0] and blocks[-1] == [3, 2, 1]
    report = manager.report()
    assert [g.shape for g in report.graphs] == [i for i in range(3) for _ in range(6)]
    assert "shape 1: float32 [5, 8]" in str(report) and not report.copied
    plans = [s.plan for s in manager._blocks.captured]
    assert report.buffers == sum(len(plan.buffers) for plan in plans)
    assert report.buffer_bytes == sum(plan.bytes for plan in plans) < report.unshared_bytes


def test_it_says_so_once(device: torch.device) -> None:
    ours, _ = twins(device)
    manager = managed(ours, device, on_new_shape="capture")
    warm(manager, ours, device)
    with pytest.warns(RuntimeWarning, match=r"found float32 \[5, 8\].*captures graphs") as found:
        for rows in (5, 5, 7, 3):
            run(ours, batch(rows, device)).square().sum().backward()
            manager.end_iteration()
    assert len([w for w in found if "captures graphs" in str(w.message)]) == 1


ROWS = st.sampled_from([2, 3, 5])
CONSTANT = st.sampled_from([1, 1.0, True, 2.0])
ACTIONS = st.one_of(
    st.tuples(st.just("iteration"), st.lists(st.tuples(ROWS, CONSTANT), min_size=2, max_size=2)),
    st.tuples(st.just("zero"), st.booleans()),
    st.tuples(st.sampled_from(["recapture", "assign", "eval", "disabled", "discard"]), ROWS),
)


class Both:
    """The manager's layers and their eager twins, through the same actions."""

    def __init__(self, max_shapes: int) -> None:
        torch.manual_seed(0)
        self.ours, self.theirs = twins(CPU, 2, Factor)
        self.manager = managed(
            self.ours, CPU, num_microbatches=2, on_new_shape="capture", max_shapes=max_shapes
        )
        self.kinds: list[Any] = []
        self.max_shapes = max_shapes

    def microbatch(self, rows: int, factor: float) -> None:
        x = batch(rows, CPU)
        results = [step(layers, x, factor) for layers in (self.ours, self.theirs)]
        assert torch.equal(*results)
        for y in results:
            y.square().sum().backward()
        same(self.ours, self.theirs)

    def act(self, action: str, argument: Any) -> None:
        if action == "iteration":
            for rows, factor in argument:
                self.microbatch(rows, factor)
                kind = rows, type(factor), factor
                if kind not in self.kinds and len(self.kinds) < self.max_shapes:
                    self.kinds.append(kind)
            self.manager.end_iteration()
            assert captured_blocks(self.manager) == len(self.kinds)
        elif action == "zero":
            for layers in (self.ours, self.theirs):
                for p in layers.parameters():
                    p.grad = None if argument else p.grad if p.grad is None else p.grad.zero_()
        elif action == "assign":
            state = {k: torch.randn_like(v) for k, v in self.ours.state_dict().items()}
            for layers in (self.ours, self.theirs):
                layers.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
            self.manager.recapture()
        elif action == "recapture":
            self.manager.recapture()
        elif action == "discard":  # a forward that leads to nothing
            step(self.ours, batch(argument, CPU))
            self.manager.discard_iteration()
        elif action == "disabled":
            with self.manager.disabled():
                self.microbatch(argument, 1)
        else:
            with torch.no_grad():
                x = batch(argument, CPU)
                assert torch.equal(step(self.ours, x), step(self.theirs, x))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(ACTIONS, min_size=3, max_size=10), st.integers(1, 4))
def test_random_shapes_and_constants(actions: list[tuple[str, Any]], max_shapes: int) -> None:
    """The model: as many captured blocks as kinds of microbatches seen, and always the eager twin's bits."""
    both = Both(max_shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        both.act("iteration", [(3, 1), (3, 1)])
        for action in actions:
            both.act(*action)
        both.manager.close()
    assert not any("forward" in vars(layer) for layer in both.ours)


@settings(max_examples=15, deadline=None)
@given(st.lists(ROWS, min_size=2, max_size=8))
def test_random_shapes_with_two_microbatches_in_flight(rows: list[int]) -> None:
    """One block is the whole iteration; the first microbatch's shape tells which."""
    torch.manual_seed(0)
    ours, theirs = twins(CPU, 2)
    manager = managed(ours, CPU, num_microbatches=2, on_new_shape="capture")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for first in rows:
            xs = [batch(first, CPU), batch(first + 1, CPU)]
            for layers in (ours, theirs):
                ys = [run(layers, x) for x in xs]
                for y in reversed(ys):
                    y.square().sum().backward()
            same(ours, theirs, first)
            manager.end_iteration()
    assert captured_blocks(manager) == len(set(rows))
    assert manager.report().microbatches_captured == 2


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_states_advance_and_masks_are_new_in_every_set(device: torch.device) -> None:
    """F9 and F10, over two captured blocks that take turns."""
    state = State(device)
    layer = Drop(state)
    manager = managed([layer], device, rng_states=[state], on_new_shape="capture")
    manager.device = device
    masks = []
    for rows in (64, 32, 64, 32, 64, 64, 32):
        x = torch.ones(rows, 8, device=device, requires_grad=True)
        y = layer(x)
        y.backward(torch.ones_like(y))
        assert torch.equal(x.grad, y.detach())
        masks.append(y.detach()[:32].clone())
        manager.end_iteration()
    assert state.tensor.tolist() == [3, 5], "two eager blocks do not advance it"
    replayed = masks[2:]
    assert not any(torch.equal(a, b) for i, a in enumerate(replayed) for b in replayed[:i])


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_a_gradient_kept_while_a_set_is_captured_is_not_overwritten() -> None:
    """F6, across captures: somebody holds the slab, the new shape's eager block has made another gradient."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    manager = managed([layer], CPU, on_new_shape="capture")
    warm(manager, [layer], CPU)
    layer(batch(3, CPU)).square().sum().backward()
    manager.end_iteration()
    kept = layer.weight.grad
    content, layer.weight.grad = kept.clone(), None
    expected = 0
    for rows in (5, 5, 3, 5):
        x, g = batch(rows, CPU), batch(rows, CPU)
        layer(x).backward(g)
        expected = expected + g.T @ x
        torch.testing.assert_close(layer.weight.grad, expected, rtol=0, atol=0)
        manager.end_iteration()
    assert torch.equal(kept, content)
    kept = layer.weight.grad = None
    for rows in (3, 5):  # nobody holds it any more: back to the slab, by either set
        x, g = batch(rows, CPU), batch(rows, CPU)
        layer(x).backward(g)
        assert layer.weight.grad is manager._blocks.grad_memory.of([layer.weight])[0].grad
        torch.testing.assert_close(layer.weight.grad, g.T @ x, rtol=0, atol=0)
        layer.weight.grad = None
        manager.end_iteration()


CONSTANTS: dict[str, tuple[float, float]] = {
    "1.0 for 1": (1, 1.0),
    "True for 1": (1, True),
    "2 for 2.0": (2.0, 2),
}


@pytest.mark.parametrize(("first", "second"), CONSTANTS.values(), ids=CONSTANTS)
@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_equal_constants_of_other_types_are_other_constants(first: float, second: float) -> None:
    """F16: an int and a float do not promote alike."""
    ours, _ = twins(CPU, 1, Factor)
    manager = managed(ours, CPU, num_microbatches=2)
    for factor in (first, second):
        step(ours, batch(3, CPU), factor).square().sum().backward()
    manager.end_iteration()
    assert manager.report().microbatches_captured == 2, "not alike"
    manager.close()
    for policy in ("error", "capture"):
        manager = managed(ours, CPU, on_new_shape=policy)
        warm_with(manager, lambda: step(ours, batch(3, CPU), first))
        if policy == "error":
            with pytest.raises(ReplayError, match=f"arguments: expected {first}, found {second}"):
                step(ours, batch(3, CPU), second)
        else:
            step(ours, batch(3, CPU), second).square().sum().backward()
            manager.end_iteration()
            assert captured_blocks(manager) == 2
        manager.close()


def warm_with(manager: Any, forward: Callable[[], Tensor]) -> None:
    forward().square().sum().backward()
    manager.end_iteration()


def test_one_set_for_microbatches_that_take_turns(device: torch.device) -> None:
    """Two shapes within the recorded iteration: two captured blocks at once, in any turn."""
    ours, theirs = twins(device, 2)
    manager = managed(ours, device, num_microbatches=2, on_new_shape="capture")
    for rows in [(3, 5), (5, 3), (3, 3), (5, 5)]:
        for n in rows:
            x = batch(n, device)
            for layers in (ours, theirs):
                run(layers, x).square().sum().backward()
        same(ours, theirs, rows)
        manager.end_iteration()
    assert [s.graphs.blocks for s in manager._blocks.captured] == [3, 3]
    run(ours, next(batches(device, 1))).square().sum().backward()
    with pytest.raises(ReplayOrderError, match="replay ended early"):
        manager.end_iteration()


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_blocks_of_one_and_of_two_microbatches(device: torch.device) -> None:
    """A block of two in flight does not begin where only one microbatch is left of the iteration."""
    ours, theirs = twins(device, 2)
    manager = managed(ours, device, num_microbatches=2, on_new_shape="capture")

    def iteration(*rows: int, in_flight: bool = False) -> None:
        xs = [batch(n, device) for n in rows]
        for layers in (ours, theirs):
            ys = []
            for x in xs:
                ys.append(run(layers, x))
                if not in_flight:
                    ys.pop().square().sum().backward()
            for y in ys:
                y.square().sum().backward()
        same(ours, theirs, rows)
        manager.end_iteration()

    for rows in [(3, 3), (3, 3)]:
        iteration(*rows, in_flight=True)
    for rows in [(5, 5), (5, 5), (5, 3), (5, 3)]:
        iteration(*rows)
    assert [s.graphs.blocks for s in manager._blocks.captured] == [1, 4, 1]


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_arguments_that_are_one_object_are_another_kind_of_call(device: torch.device) -> None:
    class Pair(Block):
        def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
            return super().forward(x) * scale + shift

    ours, theirs = twins(device, 2, Pair)
    manager = managed(ours, device, on_new_shape="capture")
    for one in (True, True, False, False, True, False):
        x = batch(3, device)
        shift = torch.rand(WIDTH, device=device)
        scale = shift if one else torch.rand(WIDTH, device=device)
        for layers in (ours, theirs):
            y = x
            for layer in layers:
                y = layer(y, shift, scale)
            y.square().sum().backward()
        same(ours, theirs, one)
        manager.end_iteration()
    # A set that copies both takes one object for both as well
    assert [s.graphs.blocks for s in manager._blocks.captured] == [1, 3]
