# SPDX-License-Identifier: Apache-2.0
"""The plan against a model of memory that hands a dead buffer to whoever asks next."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakernels.graphs import Direction, Order, Step
from lorakernels.graphs.plan.call_spec import CallSpec, FromOutput, FromOutside
from lorakernels.graphs.plan.plan import make_plan
from tests.graphs.schedules import gpipe, one_forward_one_backward

F, B = Direction.FORWARD, Direction.BACKWARD


@dataclass(frozen=True)
class Spec:
    nbytes: int = 4
    requires_grad: bool = True


def chain(layers: int, microbatches: int, extra: int = 0) -> dict[tuple[int, int], CallSpec]:
    """Each layer reads the one before it and `extra` constants that all of a microbatch's calls share."""
    calls = {}
    for m in range(microbatches):
        shared = tuple(FromOutside(100 * m + g + 1) for g in range(extra))
        for layer in range(layers):
            first = FromOutput((layer - 1, m), 0) if layer else FromOutside(100 * m)
            specs = (Spec(), *[Spec(8, False)] * extra)
            calls[layer, m] = CallSpec(specs, (first, *shared), (Spec(),))
    return calls


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Order, dict[tuple[int, int], CallSpec]]:
    """Any valid interleaving of microbatches; each layer reads random outputs of earlier layers."""
    layers, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    reads = [
        draw(st.lists(st.integers(0, layer - 1), max_size=2)) if layer else []
        for layer in range(layers)
    ]
    todo = [[Step(n, m, F) for n in range(layers)] for m in range(microbatches)]
    for m, steps in enumerate(todo):
        steps += [Step(n, m, B) for n in reversed(range(layers))]
    order, done = [], [0] * layers
    while any(todo):
        ready = [m for m, steps in enumerate(todo) if steps]
        # a layer's forwards are numbered as they run
        ready = [m for m in ready if todo[m][0].direction is B or done[todo[m][0].layer] == m]
        step = todo[draw(st.sampled_from(ready))].pop(0)
        done[step.layer] += step.direction is F
        order.append(step)
    calls = {}
    for m in range(microbatches):
        for n in range(layers):
            sources = [FromOutput((r, m), 0) for r in reads[n]] or [FromOutside(m)]
            calls[n, m] = CallSpec((Spec(),) * len(sources), tuple(sources), (Spec(),))
    return Order(order, layers, microbatches), calls


class Pool:
    """Memory by name; whatever is freed goes to the next that asks."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.size = 0

    def take(self) -> int:
        if self.free:
            return self.free.pop()
        self.size += 1
        return self.size - 1


def place(plan) -> dict[int, int]:
    """Where a capture puts each buffer."""
    pool, at = Pool(), {}
    for position in range(len(plan.order)):
        for b in plan.buffers:
            if b.birth == position:
                at[b.index] = pool.take()
        for b in plan.dying(position):
            pool.free.append(at[b.index])
    return at


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_every_read_finds_what_its_writer_wrote(case) -> None:
    """Replays write unique values into the places of a capture; the model knows the value each read has to find."""
    order, calls = case
    plan = make_plan(order, calls)
    at, memory, true = place(plan), {}, {}

    def write(buffer, value) -> None:
        memory[at[buffer.index]] = true[buffer.index] = value

    def read(buffer) -> None:
        assert memory[at[buffer.index]] == true[buffer.index], buffer.name

    for block in range(2 * plan.repeats):
        for step in plan.order:
            call = plan.calls[step.layer, step.microbatch]
            if step.direction is F:
                for i, buffer in enumerate(call.inputs):
                    if call.copies[i]:
                        write(buffer, (block, step, i))
                    read(buffer)
                for k, buffer in enumerate(call.outputs):
                    write(buffer, (block, step, "out", k))
            else:
                for buffer in call.grad_outputs:
                    if not buffer.chained:
                        write(buffer, (block, step, "grad out"))
                    read(buffer)
                for i, buffer in enumerate(call.grad_inputs):
                    write(buffer, (block, step, "grad in", i))


def test_alternating_microbatches_need_one_set_of_graphs() -> None:
    order = one_forward_one_backward(3, 4, stages=1, stage=0)
    plan = make_plan(order, chain(3, 4, extra=2))
    assert len(plan.order) == 6 and plan.repeats == 4
    assert len(make_plan(gpipe(3, 4), chain(3, 4)).order) == 24


@pytest.mark.parametrize("different", ["shape", "constants", "groups"])
def test_microbatches_that_differ_are_captured_each(different: str) -> None:
    calls = chain(2, 2, extra=2)
    old = calls[1, 1]
    calls[1, 1] = {
        "shape": CallSpec((Spec(16), *old.inputs[1:]), old.sources, old.outputs),
        "constants": CallSpec(old.inputs, old.sources, old.outputs, "other"),
        "groups": CallSpec(
            old.inputs, (old.sources[0], FromOutside(7), FromOutside(8)), old.outputs
        ),
    }[different]
    order = one_forward_one_backward(2, 2, stages=1, stage=0)
    assert make_plan(order, calls).repeats == 1


def test_buffers_of_a_chain_closed_form() -> None:
    """L layers: one input, L outputs, one gradient in at the end, L gradients going back; 2 side inputs in all."""
    for layers in (1, 4, 16):
        plan = make_plan(gpipe(layers, 1), chain(layers, 1, extra=2))
        kinds = [b.kind for b in plan.buffers]
        assert kinds.count("input") == 3, "Megatron has 4 L side inputs, collapsed into 2"
        assert kinds.count("activation") == layers and kinds.count("gradient") == layers + 1
        assert plan.unshared_buffers == layers * (3 + 1) + layers * 2
        copying = [sum(call.copies) for call in plan.calls.values()]
        assert copying == [3] + [0] * (layers - 1)
        assert plan.bytes == 2 * 8 + 4 + layers * 4 + (layers + 1) * 4


def test_places_do_not_grow_with_the_microbatches() -> None:
    """Megatron :1133. In a pipeline stage with at most 2 microbatches in flight, later ones reuse the memory."""
    sizes = [
        len(
            set(
                place(
                    make_plan(one_forward_one_backward(3, n, stages=2, stage=0), chain(3, n))
                ).values()
            )
        )
        for n in (2, 4, 16)
    ]
    assert sizes[1] == sizes[2] <= sizes[0] + 2


def test_an_output_with_two_readers_shares_forward_and_copies_back() -> None:
    calls = {
        (0, 0): CallSpec((Spec(),), (FromOutside(0),), (Spec(),)),
        (1, 0): CallSpec((Spec(),), (FromOutput((0, 0), 0),), (Spec(),)),
        (2, 0): CallSpec((Spec(),), (FromOutput((0, 0), 0),), (Spec(),)),
    }
    order = Order(
        [Step(0, 0, F), Step(1, 0, F), Step(2, 0, F), Step(2, 0, B), Step(1, 0, B), Step(0, 0, B)],
        3,
        1,
    )
    plan = make_plan(order, calls)
    shared = plan.calls[0, 0].outputs[0]
    assert plan.calls[1, 0].inputs[0] is plan.calls[2, 0].inputs[0] is shared and shared.death == 2
    assert not plan.calls[0, 0].grad_outputs[0].chained
    assert not plan.calls[1, 0].grad_inputs[0].chained
