# SPDX-License-Identifier: Apache-2.0
"""Every stage's schedule, run against each other by a pipeline that only knows dependencies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lorakernels.graphs import (
    Direction,
    Order,
    gpipe,
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)

F, B = Direction.FORWARD, Direction.BACKWARD


def letters(order: Order) -> str:
    return " ".join(f"{s.direction.value[0]}{s.layer}.{s.microbatch}" for s in order)


def run_pipeline(orders: list[Order], layers_per_chunk: int) -> None:
    """Each stage runs its next step as soon as its input has arrived; all must come to an end."""
    stages, done = len(orders), set()

    def global_layer(stage: int, layer: int) -> int:
        chunk, offset = divmod(layer, layers_per_chunk)
        return (chunk * stages + stage) * layers_per_chunk + offset

    last = global_layer(stages - 1, len(orders[-1].layers) - 1)
    positions = [0] * stages
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            while positions[stage] < len(order):
                step = order[positions[stage]]
                layer, m = global_layer(stage, step.layer), step.microbatch
                if step.direction is F:
                    ready = layer == 0 or (layer - 1, m, F) in done
                else:
                    needed = (layer, m, F) if layer == last else (layer + 1, m, B)
                    ready = needed in done
                if not ready:
                    break
                done.add((layer, m, step.direction))
                positions[stage] += 1
                progress = True
    assert positions == [len(order) for order in orders], "the stages wait for each other"


def test_gpipe_closed_form() -> None:
    order = gpipe(2, 2)
    assert letters(order) == "f0.0 f1.0 f0.1 f1.1 b1.1 b0.1 b1.0 b0.0"
    assert order.max_in_flight() == (2, 2)


def test_1f1b_is_the_order_te_tests() -> None:
    """TE tests/pytorch/test_cuda_graphs.py: [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]."""
    order = one_forward_one_backward(2, 3, stages=2, stage=0)
    signed = [(s.layer + 1) * (1 if s.direction is F else -1) for s in order]
    assert signed == [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]
    assert [s.microbatch for s in order] == [0, 0, 1, 1, 0, 0, 2, 2, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, "f0.0 f0.1 f1.0 f1.1 f0.2 b1.0 f0.3 b1.1 f1.2 b0.0 f1.3 b0.1 b1.2 b1.3 b0.2 b0.3"),
        (1, "f0.0 f0.1 f1.0 b1.0 f1.1 b1.1 f0.2 b0.0 f0.3 b0.1 f1.2 b1.2 f1.3 b1.3 b0.2 b0.3"),
    ],
)
def test_interleaved_closed_form(stage: int, expected: str) -> None:
    """Two stages, two chunks of one layer, four microbatches; worked out by hand."""
    order = interleaved_one_forward_one_backward(1, 4, stages=2, stage=stage, chunks=2)
    assert letters(order) == expected


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 3))
def test_1f1b_stages_finish_and_hold_no_more_than_they_should(
    stages: int, microbatches: int, layers: int
) -> None:
    orders = [
        one_forward_one_backward(layers, microbatches, stages=stages, stage=s)
        for s in range(stages)
    ]
    run_pipeline(orders, layers)
    for stage, order in enumerate(orders):
        assert order.max_in_flight() == (min(stages - stage, microbatches),) * layers


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_interleaved_stages_finish_and_the_first_chunk_holds_the_most(
    stages: int, groups: int, chunks: int, layers: int
) -> None:
    orders = [
        interleaved_one_forward_one_backward(
            layers, groups * stages, stages=stages, stage=s, chunks=chunks
        )
        for s in range(stages)
    ]
    run_pipeline(orders, layers)
    for order in orders:
        in_flight = order.max_in_flight()
        assert list(in_flight) == sorted(in_flight, reverse=True)
        assert max(in_flight) <= min(2 * stages, groups * stages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"stages": 0, "stage": 0}, "stages must be an int >= 1, got 0", id="stages"),
        pytest.param(
            {"stages": 2, "stage": 2}, r"stage must be below stages \(2\), got 2", id="at"
        ),
        pytest.param({"stages": 2, "stage": -1}, "stage must be an int >= 0, got -1", id="below"),
        pytest.param(
            {"stages": 2, "stage": 0}, r"multiple of stages \(2\), got 3", id="microbatches"
        ),
    ],
)
def test_bad_schedules_name_the_value(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interleaved_one_forward_one_backward(1, 3, chunks=2, **arguments)


def test_no_layers() -> None:
    with pytest.raises(ValueError, match="num_layers must be an int >= 1, got 0"):
        gpipe(0, 1)
