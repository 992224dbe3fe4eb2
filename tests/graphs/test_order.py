# SPDX-License-Identifier: Apache-2.0
"""Order against a declarative model of what a valid iteration is."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lorakernels.graphs import Direction, Order, OrderError, ReplayOrderError, Step

F, B = Direction.FORWARD, Direction.BACKWARD
# One layer, three microbatches, two in flight.
ALTERNATING = [Step(0, 0, F), Step(0, 1, F), Step(0, 0, B), Step(0, 2, F), Step(0, 1, B)]
ALTERNATING.append(Step(0, 2, B))


def all_steps(layers: int, microbatches: int) -> list[Step]:
    return list(
        itertools.starmap(Step, itertools.product(range(layers), range(microbatches), (F, B)))
    )


def is_valid(steps: list[Step], layers: int, microbatches: int) -> bool:
    if sorted(map(repr, steps)) != sorted(map(repr, all_steps(layers, microbatches))):
        return False
    at = steps.index
    return all(
        at(Step(layer, m, F)) < at(Step(layer, m, B))
        and (m == 0 or at(Step(layer, m - 1, F)) < at(Step(layer, m, F)))
        for layer in range(layers)
        for m in range(microbatches)
    )


@st.composite
def valid_orders(draw: st.DrawFn) -> tuple[list[Step], int, int]:
    """A shuffle, repaired: per layer, the forwards are sorted and backwards moved behind them."""
    layers, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shuffled = draw(st.permutations(all_steps(layers, microbatches)))
    forwards, alive, steps = [0] * layers, [[] for _ in range(layers)], []
    for step in shuffled:
        queue = alive[step.layer]
        if queue and (step.direction is B or forwards[step.layer] == microbatches):
            steps.append(Step(step.layer, queue.pop(step.microbatch % len(queue)), B))
        else:
            queue.append(forwards[step.layer])
            steps.append(Step(step.layer, forwards[step.layer], F))
            forwards[step.layer] += 1
    return steps, layers, microbatches


@st.composite
def corrupted_orders(draw: st.DrawFn) -> tuple[list[Step], int, int]:
    steps, layers, microbatches = draw(valid_orders())
    steps = list(steps)
    some = st.integers(0, len(steps) - 1)
    i, j = draw(some), draw(some)
    other = st.builds(
        Step, st.integers(0, layers - 1), st.integers(0, microbatches), st.sampled_from((F, B))
    )
    match draw(st.sampled_from(("drop", "repeat", "swap", "move", "replace"))):
        case "drop":
            del steps[i]
        case "repeat":
            steps.insert(j, steps[i])
        case "swap":
            steps[i], steps[j] = steps[j], steps[i]
        case "move":
            steps.insert(j, steps.pop(i))
        case "replace":
            steps[i] = draw(other)
    return steps, layers, microbatches


@given(valid_orders())
def test_a_valid_order_is_accepted_and_keeps_its_steps(case: tuple[list[Step], int, int]) -> None:
    steps, layers, microbatches = case
    assert is_valid(steps, layers, microbatches)
    order = Order(iter(steps), layers, microbatches)
    assert list(order) == steps and len(order) == 2 * layers * microbatches
    assert [order.index(step) for step in steps] == list(range(len(steps)))


@settings(max_examples=300)
@given(corrupted_orders())
def test_an_order_is_refused_exactly_when_the_model_refuses_it(
    case: tuple[list[Step], int, int],
) -> None:
    steps, layers, microbatches = case
    if is_valid(steps, layers, microbatches):  # a swap of independent steps
        Order(steps, layers, microbatches)
        return
    with pytest.raises(OrderError) as error:
        Order(steps, layers, microbatches)
    position = error.value.position
    assert error.value.actual == (steps[position] if position < len(steps) else None)
    assert error.value.expected != error.value.actual
    if error.value.expected is not None:
        assert error.value.expected in all_steps(layers, microbatches)


def test_positions_in_closed_form() -> None:
    order = Order(ALTERNATING, 1, 3)
    assert [order.index(Step(0, m, B)) for m in range(3)] == [2, 4, 5]
    with pytest.raises(ValueError, match="backward of layer '0', microbatch 3 is not in the order"):
        order.index(Step(0, 3, B))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        pytest.param([], "incomplete at position 0: expected forward of layer 'a'", id="empty"),
        pytest.param(
            [Step(0, 0, B)],
            "a backward before its forward at position 0: expected forward of layer 'a', micro",
            id="backward-first",
        ),
        pytest.param(
            [Step(0, 1, F)],
            "a forward out of turn at position 0: expected .* microbatch 0, found .* microbatch 1",
            id="microbatch-skipped",
        ),
        pytest.param(
            [Step(0, 0, F), Step(0, 0, F)], "a second forward at position 1", id="forward-twice"
        ),
        pytest.param(
            [Step(0, 0, F), Step(0, 0, B), Step(0, 0, B)],
            "a second backward at position 2: expected no such step",
            id="backward-twice",
        ),
        pytest.param(
            [Step(0, 0, F), Step(0, 1, F), Step(0, 2, F)],
            "a microbatch beyond num_microbatches=2 at position 2",
            id="too-many",
        ),
        pytest.param(
            [Step(0, 0, F), Step(0, 0, B), Step(0, 1, F)],
            "incomplete at position 3: expected backward of layer 'a', microbatch 1, found the end",
            id="no-backward",
        ),
        pytest.param(
            [Step(0, 0, F), Step(0, 0, B)],
            "incomplete at position 2: expected forward of layer 'a', microbatch 1, found the end",
            id="too-few",
        ),
    ],
)
def test_an_invalid_order_says_what_is_wrong(steps: list[Step], message: str) -> None:
    with pytest.raises(OrderError, match=message):
        Order(steps, ["a"], 2)


def test_a_step_beyond_the_layers_and_a_stranger_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Step\(layer=1.* at position 0: layers has 1"):
        Order([Step(1, 0, F)], 1, 1)
    with pytest.raises(TypeError, match="steps must hold Step, found 'f0' at position 0"):
        Order(["f0"], 1, 1)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("layers", "microbatches", "error", "message"),
    [
        pytest.param(0, 1, ValueError, "at least one layer, got 0", id="no-layer"),
        pytest.param(["a", "a"], 1, ValueError, "'a' occurs more than once", id="same-name"),
        pytest.param("ab", 1, TypeError, "names, got 'ab'", id="string"),
        pytest.param([0, 1], 1, TypeError, "names, found 0", id="ints"),
        pytest.param(1, 0, ValueError, "num_microbatches must be an int >= 1, got 0", id="zero"),
        pytest.param(1, True, ValueError, "num_microbatches .* got True", id="bool"),
    ],
)
def test_bad_arguments_name_the_value(
    layers: object, microbatches: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Order([], layers, microbatches)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-1, 0, F), "Step.layer must be an int >= 0, got -1"),
        ((0, 1.0, F), "Step.microbatch must be an int >= 0, got 1.0"),
        ((0, 0, "forward"), "Step.direction must be a Direction, got 'forward'"),
    ],
)
def test_a_bad_step_names_field_and_value(values: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Step(*values)


def test_order_and_errors_survive_copy_and_pickle_and_cannot_be_changed() -> None:
    order = Order(ALTERNATING, ["a"], 3)
    order.index(ALTERNATING[0])  # fills the cache, which must not travel
    for twin in (copy.copy(order), copy.deepcopy(order), pickle.loads(pickle.dumps(order))):
        assert twin == order and hash(twin) == hash(order) and twin.index(Step(0, 2, B)) == 5
    assert order != Order(ALTERNATING, ["b"], 3)
    with pytest.raises(AttributeError):
        order.steps = ()  # type: ignore[misc]
    error = ReplayOrderError("replay out of order", 0, ALTERNATING[0], ALTERNATING[1], ("a",))
    twin_error = pickle.loads(pickle.dumps(error))
    assert type(twin_error) is ReplayOrderError and str(twin_error) == str(error)
    assert twin_error.actual == ALTERNATING[1]
