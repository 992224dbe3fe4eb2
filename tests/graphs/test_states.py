# SPDX-License-Identifier: Apache-2.0
"""What a replay draws, and what warm-up and capture leave alone."""

from __future__ import annotations

import pytest
import torch
from lorakernels.graphs.plan.order import Direction
from torch import nn

from tests.graphs.layers import (
    Block,
    Counting,
    Drop,
    State,
    batches,
    managed,
    run,
    same,
    stack,
)

CPU = torch.device("cpu")
F, B = Direction.FORWARD, Direction.BACKWARD


def test_dropout_masks_are_new_and_backward_sees_the_forwards(device: torch.device) -> None:
    """With W = I, the gradient of ones is the mask / (1 − p) itself; f0 f1 b0 b1, so that two are in flight."""
    torch.manual_seed(5)
    state = State(device)
    layer = Drop(state)
    manager = managed([layer], device, num_microbatches=2, rng_states=[state])
    manager.device = device
    seen = []
    for step in range(4):
        xs = [torch.ones(64, 8, device=device, requires_grad=True) for _ in range(2)]
        ys = [layer(x) for x in xs]
        for x, y in zip(xs, ys, strict=True):
            y.backward(torch.ones_like(y))
            assert torch.equal(x.grad, y.detach()), step
            seen.append(y.detach())
        before = state.tensor.clone()
        manager.end_iteration()
        assert torch.equal(before, state.tensor), "the capture left the state alone"
    assert state.tensor.tolist() == [3, 3], "one step for each replayed block"
    rates = torch.stack([(y > 0).float().mean() for y in seen])
    assert ((rates - 0.5).abs() < 5 * 0.5 / 512**0.5).all()
    different = [torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i]]
    assert not any(different)


def test_replays_draw_what_eager_runs_draw(device: torch.device) -> None:
    """From the CPU generator's state at capture and the same device state, block for block."""
    torch.manual_seed(6)
    states = [State(device), State(device)]
    layers = [[Drop(s), Block().to(device), Drop(s)] for s in states]
    layers[1][1].load_state_dict(layers[0][1].state_dict())
    manager = managed(layers[0], device, rng_states=[states[0]])
    warm_x = next(batches(device, 1)).requires_grad_()
    run(layers[0], warm_x).sum().backward()
    layers[0][1].zero_grad()
    manager.end_iteration()
    for step in range(3):
        x = next(batches(device, 1))
        xs = [x.clone().requires_grad_() for _ in range(2)]
        found = run(layers[0], xs[0])
        torch.set_rng_state(manager.cpu_rng_at_capture)
        expected = run(layers[1], xs[1])
        assert torch.equal(found, expected), step
        found.sum().backward(), expected.sum().backward()
        assert torch.equal(xs[0].grad, xs[1].grad)
        states[1].advance()
        assert torch.equal(states[0].tensor, states[1].tensor)
        same(layers[0][1], layers[1][1], step)
        manager.end_iteration()


@pytest.mark.parametrize("where", ["inside", "around"])
def test_recomputation_sees_the_same_mask(device: torch.device, where: str) -> None:
    """F20: a checkpointed layer with p = 0.5, its recomputation inside the captured backward."""
    from torch.utils.checkpoint import checkpoint

    class Dropped(nn.Module):
        def __init__(self, state: State) -> None:
            super().__init__()
            self.block, self.drop = Block(), Drop(state)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.block(self.drop(x)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                checkpoint(self.body, x, use_reentrant=False) if where == "inside" else self.body(x)
            )

    state = State(device)
    layer = Dropped(state).to(device)
    manager = managed([layer], device, rng_states=[state])

    def call(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False) if where == "around" else layer(x)

    call(next(batches(device, 1)).requires_grad_()).sum().backward()
    layer.zero_grad()
    manager.end_iteration()
    for _ in range(3):
        x = next(batches(device, 1)).requires_grad_()
        moment = state.tensor.clone()
        y = call(x)
        y.sum().backward()
        after = state.tensor.clone()
        found = [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        layer.zero_grad()
        with manager.disabled():
            torch.set_rng_state(manager.cpu_rng_at_capture)
            state.tensor.copy_(moment)
            x2 = x.detach().clone().requires_grad_()
            y2 = call(x2)
            y2.sum().backward()
        expected = [y2.detach(), x2.grad, *(p.grad.clone() for p in layer.parameters())]
        assert all(map(torch.equal, found, expected))
        state.tensor.copy_(after)
        layer.zero_grad()
        manager.end_iteration()


def test_capture_leaves_buffers_gradients_and_generators(device: torch.device) -> None:
    layers = stack(device, 2, Counting)
    manager = managed(layers, device)
    run(layers, next(batches(device, 1))).sum().backward()
    before = [t.clone() for t in (*layers.buffers(), *(p.grad for p in layers.parameters()))]
    generators = [torch.get_rng_state()] + (
        [torch.cuda.get_rng_state()] if device.type == "cuda" else []
    )
    weights = [p.clone() for p in layers.parameters()]
    manager.end_iteration()
    after = [*layers.buffers(), *(p.grad for p in layers.parameters())]
    assert all(map(torch.equal, before, after))
    assert all(map(torch.equal, weights, layers.parameters()))
    now = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])
    assert all(map(torch.equal, generators, now))
    run(layers, next(batches(device, 1))).sum().backward()
    assert not torch.equal(before[0], layers[0].seen), (
        "a replay changes the buffer as a forward does"
    )
