# SPDX-License-Identifier: Apache-2.0
"""The orders in which well-known pipeline schedules run the layers of one stage.

A stage runs whole chunks: the forward of a chunk is its layers first to last, the backward last to
first. The tests drive layers in these orders, and expect the recorder to have seen them.
"""

from __future__ import annotations

from collections.abc import Iterable

from lorakernels.graphs import Direction, Order, Step

Chunk = tuple[int, int, Direction]


def gpipe(num_layers: int, num_microbatches: int) -> Order:
    """All forwards, then all backwards, the last microbatch first."""
    microbatches = range(num_microbatches)
    forwards = [(0, microbatch, Direction.FORWARD) for microbatch in microbatches]
    backwards = [(0, microbatch, Direction.BACKWARD) for microbatch in reversed(microbatches)]
    return _expand(forwards + backwards, num_layers, 1, num_microbatches)


def one_forward_one_backward(
    num_layers: int, num_microbatches: int, *, stages: int, stage: int
) -> Order:
    """1F1B as `stage` of `stages` runs it: at most `stages - stage` microbatches are in flight."""
    chunks = _warm_up_then_alternate(
        [(0, microbatch) for microbatch in range(num_microbatches)],
        [(0, microbatch) for microbatch in range(num_microbatches)],
        warm_up=stages - stage - 1,
    )
    return _expand(chunks, num_layers, 1, num_microbatches)


def interleaved_one_forward_one_backward(
    num_layers: int, num_microbatches: int, *, stages: int, stage: int, chunks: int
) -> Order:
    """Interleaved 1F1B: a stage holds `chunks` chunks of `num_layers` layers, visited in turn.

    Microbatches, a multiple of `stages`, go in groups of `stages` through one chunk, then through the next.
    """
    groups = [range(first, first + stages) for first in range(0, num_microbatches, stages)]
    forwards = [(c, m) for group in groups for c in range(chunks) for m in group]
    backwards = [(c, m) for group in groups for c in reversed(range(chunks)) for m in group]
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    scheduled = _warm_up_then_alternate(forwards, backwards, warm_up)
    return _expand(scheduled, num_layers, chunks, num_microbatches)


def _warm_up_then_alternate(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], warm_up: int
) -> Iterable[Chunk]:
    warm_up = min(warm_up, len(forwards))
    for position, (chunk, microbatch) in enumerate(forwards):
        yield chunk, microbatch, Direction.FORWARD
        if position >= warm_up:
            yield *backwards[position - warm_up], Direction.BACKWARD
    for chunk, microbatch in backwards[len(forwards) - warm_up :]:
        yield chunk, microbatch, Direction.BACKWARD


def _expand(
    scheduled: Iterable[Chunk], num_layers: int, chunks: int, num_microbatches: int
) -> Order:
    steps = []
    for chunk, microbatch, direction in scheduled:
        layers = range(chunk * num_layers, (chunk + 1) * num_layers)
        ordered = layers if direction is Direction.FORWARD else reversed(layers)
        steps += [Step(layer, microbatch, direction) for layer in ordered]
    return Order(steps, chunks * num_layers, num_microbatches)
