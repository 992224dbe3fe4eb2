# SPDX-License-Identifier: Apache-2.0
"""Several microbatches in flight: every order is captured and replayed as it ran."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lorakernels.graphs import GraphManager
from lorakernels.graphs.plan.order import Direction, Order, Step
from torch import nn

from tests.graphs.layers import (
    batches,
    managed,
    same,
    twins,
)
from tests.graphs.schedules import (
    gpipe,
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)

CPU = torch.device("cpu")
F, B = Direction.FORWARD, Direction.BACKWARD


def equal_to_eager(
    device: torch.device, layers: int, order: Order, drive: Callable[..., list[torch.Tensor]]
) -> GraphManager:
    """Four iterations: recorded, captured, replayed."""
    ours, theirs = twins(device, layers)
    manager = managed(ours, device, num_microbatches=order.num_microbatches)
    for step in range(4):
        inputs = list(batches(device, order.num_microbatches))
        found, expected = (drive(m, order, inputs) for m in (ours, theirs))
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b), step
        same(ours, theirs, step)
        manager.end_iteration()
    return manager


def run_order(
    layers: nn.ModuleList, order: Order, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Drive single layers in any order, as a pipeline stage whose layers are cut from each other."""
    waiting: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    outputs: list[torch.Tensor] = []
    for step in order:
        key = (step.layer, step.microbatch)
        if step.direction is F:
            x = inputs[step.microbatch].detach().requires_grad_()
            y = layers[step.layer](x)
            waiting[key] = x, y
            outputs.append(y.detach().clone())
        else:
            x, y = waiting.pop(key)
            y.square().sum().backward()
            outputs.append(x.grad)
    return outputs


ORDERS = {
    "gpipe": gpipe(2, 3),
    "1F1B of TE :1151": one_forward_one_backward(2, 3, stages=2, stage=0),
    "interleaved 1F1B": interleaved_one_forward_one_backward(1, 4, stages=2, stage=0, chunks=2),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_pipelines_with_several_microbatches_in_flight(device: torch.device, order: Order) -> None:
    manager = equal_to_eager(device, 2, order, run_order)
    assert len(manager.report().graphs) == len(order)


@st.composite
def orders(draw: st.DrawFn) -> Order:
    layers, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    todo = [
        [Step(n, m, F) for n in range(layers)] + [Step(n, m, B) for n in reversed(range(layers))]
        for m in range(microbatches)
    ]
    steps, done = [], [0] * layers
    while any(todo):
        ready = [
            m
            for m, rest in enumerate(todo)
            if rest and (rest[0].direction is B or done[rest[0].layer] == m)
        ]
        step = todo[draw(st.sampled_from(ready))].pop(0)
        done[step.layer] += step.direction is F
        steps.append(step)
    return Order(steps, layers, microbatches)


def run_chunk_order(
    layers: nn.ModuleList, order: Order, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Layers of a microbatch feed each other; its backward runs at its last layer's step, all layers at once."""
    last, hidden, found = len(order.layers) - 1, list(inputs), []
    for step in order:
        m = step.microbatch
        if step.direction is F:
            hidden[m] = layers[step.layer](hidden[m])
        elif step.layer == last:
            found.append(hidden[m].detach().clone())
            hidden[m].square().sum().backward()
    return found


@settings(max_examples=25, deadline=None)
@given(orders())
def test_random_interleavings_on_the_imitated_pool(order: Order) -> None:
    """The backward of a microbatch runs whole; forwards of others lie anywhere between."""
    torch.manual_seed(0)
    equal_to_eager(CPU, len(order.layers), order, run_chunk_order)


def test_interleaved_scalars_give_4_6_8(device: torch.device) -> None:
    """The handbook's case: f(x) = x² + 2x + 1 at 1, 2, 3 as f0 f1 b0 f2 b1 b2; torch's own callables give 6, 3, 8."""

    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x + 2 * x + 1

    layer = Square()
    manager = managed([layer], device, num_microbatches=3)
    manager.device = device
    for _ in range(3):
        xs = [torch.full((1,), i + 1.0, device=device, requires_grad=True) for i in range(3)]
        ys = [layer(xs[0]), layer(xs[1])]
        ys[0].backward()
        ys.append(layer(xs[2]))
        ys[1].backward()
        ys[2].backward()
        assert [x.grad.item() for x in xs] == [4.0, 6.0, 8.0]
        assert [y.item() for y in ys] == [4.0, 9.0, 16.0]
        manager.end_iteration()


def test_parallel_results_of_the_handbook_are_4_10_18(device: torch.device) -> None:
    """Three graphs of one pool, all outputs read at the end: not 13, 12, 19."""

    class Times(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * y * self.weight

    layer = Times().to(device)
    manager = managed([layer], device, num_microbatches=3)
    for _ in range(3):
        pairs = [(1.0, 4.0), (2.0, 5.0), (3.0, 6.0)]
        outs = [layer(*(torch.full((1,), v, device=device) for v in pair)) for pair in pairs]
        assert [y.item() for y in outs] == [4.0, 10.0, 18.0]
        sum(outs).backward()
        assert layer.weight.grad.item() == 32.0
        layer.weight.grad = None
        manager.end_iteration()
