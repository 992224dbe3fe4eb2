# SPDX-License-Identifier: Apache-2.0
"""The order of one training iteration, and the check that a replay follows it.

A step is the forward or the backward of one layer for one microbatch. Graphs that share memory are
right only if they replay in the order in which they were captured. So the order is a value of its
own: it is validated once, cannot change, and every launch is compared with it first.

Pure Python; nothing here knows of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NoReturn


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Step:
    """One layer's forward or backward for one microbatch; both are counted from 0."""

    layer: int
    microbatch: int
    direction: Direction

    def __post_init__(self) -> None:
        for name in ("layer", "microbatch"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"Step.{name} must be an int >= 0, got {value!r}")
        if not isinstance(self.direction, Direction):
            raise ValueError(f"Step.direction must be a Direction, got {self.direction!r}")


class OrderError(RuntimeError):
    """A sequence of steps is not the expected one.

    Attributes: `reason`, `position`, `names` of the layers; `expected`, None if no step would have been right;
    `actual`, None if the sequence ended.
    """

    def __init__(
        self,
        reason: str,
        position: int,
        expected: Step | None,
        actual: Step | None,
        names: tuple[str, ...] = (),
    ) -> None:
        super().__init__(reason, position, expected, actual, names)
        self.reason, self.position, self.names = reason, position, names
        self.expected, self.actual = expected, actual

    def __str__(self) -> str:
        expected = describe(self.expected, self.names) if self.expected else "no such step"
        actual = describe(self.actual, self.names) if self.actual else "the end of the iteration"
        return f"{self.reason} at position {self.position}: expected {expected}, found {actual}"


class ReplayOrderError(OrderError):
    """A replay left the recorded order; nothing has been launched."""


def describe(step: Step, names: tuple[str, ...] = ()) -> str:
    name = repr(names[step.layer]) if step.layer < len(names) else str(step.layer)
    return f"{step.direction.value} of layer {name}, microbatch {step.microbatch}"


def layer_names(layers: int | Iterable[str]) -> tuple[str, ...]:
    """`layers` as names: a count gives "0", "1", …; names must be distinct, and at least one."""
    if isinstance(layers, str) or type(layers) is bool:
        raise TypeError(f"layers must be a count or a sequence of names, got {layers!r}")
    names = tuple(map(str, range(layers))) if isinstance(layers, int) else tuple(layers)
    if not names:
        raise ValueError(f"layers must name at least one layer, got {layers!r}")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"layers must be a count or a sequence of names, found {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"layers must have distinct names, {name!r} occurs more than once")
    return names


def check_count(name: str, value: int, minimum: int = 1) -> int:
    if type(value) is not int or value < minimum:
        raise ValueError(f"{name} must be an int >= {minimum}, got {value!r}")
    return value


@dataclass(frozen=True, init=False)
class Order:
    """A valid, immutable iteration: each (layer, microbatch) runs forward, later backward, once.

    A layer's forwards are numbered as they run, so its microbatches appear in the order 0, 1, …;
    its backwards may come in any order.
    """

    steps: tuple[Step, ...]
    layers: tuple[str, ...]
    num_microbatches: int

    def __init__(
        self, steps: Iterable[Step], layers: int | Iterable[str], num_microbatches: int
    ) -> None:
        object.__setattr__(self, "steps", tuple(steps))
        object.__setattr__(self, "layers", layer_names(layers))
        object.__setattr__(
            self, "num_microbatches", check_count("num_microbatches", num_microbatches)
        )
        self._check()

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __getitem__(self, position: int) -> Step:
        return self.steps[position]

    def index(self, step: Step) -> int:
        """Position of `step`, which is also the index of the graph that is captured for it."""
        try:
            return self._positions[step]
        except KeyError:
            raise ValueError(f"{describe(step, self.layers)} is not in the order") from None

    @cached_property
    def _positions(self) -> dict[Step, int]:
        return {step: position for position, step in enumerate(self.steps)}

    def __reduce__(self) -> tuple[object, ...]:
        return Order, (self.steps, self.layers, self.num_microbatches)

    def _check(self) -> None:
        forwards = [0] * len(self.layers)
        waiting: dict[Step, None] = {}
        for position, step in enumerate(self.steps):
            if not isinstance(step, Step):
                raise TypeError(f"steps must hold Step, found {step!r} at position {position}")
            if step.layer >= len(self.layers):
                raise ValueError(f"{step} at position {position}: layers has {len(self.layers)}")
            due = Step(step.layer, forwards[step.layer], Direction.FORWARD)
            if step == due and step.microbatch < self.num_microbatches:
                forwards[step.layer] += 1
                waiting[Step(step.layer, step.microbatch, Direction.BACKWARD)] = None
            elif step in waiting:
                del waiting[step]
            else:
                self._refuse(position, step, due)
        self._check_complete(forwards, waiting)

    def _refuse(self, position: int, step: Step, due: Step) -> NoReturn:
        expected = None
        if step.microbatch >= self.num_microbatches:
            reason = f"a microbatch beyond num_microbatches={self.num_microbatches}"
        elif step.microbatch < due.microbatch:
            reason = f"a second {step.direction.value}"
        else:
            forward = step.direction is Direction.FORWARD
            reason = "a forward out of turn" if forward else "a backward before its forward"
            expected = due
        raise OrderError(reason, position, expected, step, self.layers)

    def _check_complete(self, forwards: list[int], waiting: dict[Step, None]) -> None:
        missing = next(iter(waiting), None)
        for layer, count in enumerate(forwards):
            if missing is None and count < self.num_microbatches:
                missing = Step(layer, count, Direction.FORWARD)
        if missing is not None:
            reason = "the iteration is incomplete"
            raise OrderError(reason, len(self.steps), missing, None, self.layers)
