# SPDX-License-Identifier: Apache-2.0
"""Descriptions of recorded calls for a plan, and which microbatches replay the same graphs. No tensors here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .order import Order

Key = tuple[int, int]  # layer, microbatch


@dataclass(frozen=True)
class FromOutput:
    """The input is, as an object, output `index` of `call`."""

    call: Key
    index: int


@dataclass(frozen=True)
class FromOutside:
    """The input comes from eager code; inputs of one `group` are one and the same object."""

    group: int


@dataclass(frozen=True)
class CallSpec:
    """One recorded forward, as far as a plan needs it.

    Attributes:
        inputs, outputs: `TensorSpec`s, or anything that has `nbytes` and `requires_grad`.
        sources: where each input comes from.
        constants: everything else in the call, compared with ==.
    """

    inputs: tuple[Any, ...]
    sources: tuple[FromOutput | FromOutside, ...]
    outputs: tuple[Any, ...]
    constants: Any = None

    def like(self, other: CallSpec, microbatch: int, other_microbatch: int) -> bool:
        """Whether both calls could replay the same graphs."""
        return (
            self.inputs == other.inputs
            and self.outputs == other.outputs
            and self.constants == other.constants
            and [_relative(s, microbatch) for s in self.sources]
            == [_relative(s, other_microbatch) for s in other.sources]
        )


def _relative(source: FromOutput | FromOutside, microbatch: int) -> Any:
    if isinstance(source, FromOutput):
        return source.call[0], source.call[1] - microbatch, source.index
    return None


def block_length(order: Order, calls: Mapping[Key, CallSpec]) -> int:
    """How many microbatches are captured: 1 if each runs alone and all look alike, else all of them.

    With one microbatch at a time, the iteration repeats one block of steps. The same graphs serve all microbatches,
    because each microbatch has used all that it saved before the next one begins.
    """
    count, layers = order.num_microbatches, range(len(order.layers))
    size = len(order) // count
    first = [(s.layer, s.direction) for s in order.steps[:size]]
    for m in range(count):
        block = order.steps[m * size : (m + 1) * size]
        if (
            any(s.microbatch != m for s in block)
            or [(s.layer, s.direction) for s in block] != first
        ):
            return count
    alike = all(
        all(calls[layer, m].like(calls[layer, 0], m, 0) for layer in layers)
        and same_groups([(calls[layer, 0], calls[layer, m]) for layer in layers])
        for m in range(1, count)
    )
    return 1 if alike else count


def same_groups(calls: Sequence[tuple[CallSpec, CallSpec]]) -> bool:
    """Whether the inputs from outside are shared among the first of each pair as among the second."""
    pairs = [
        (a.group, b.group)
        for one, other in calls
        for a, b in zip(one.sources, other.sources, strict=True)
        if isinstance(a, FromOutside) and isinstance(b, FromOutside)
    ]
    return len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(set(pairs))
