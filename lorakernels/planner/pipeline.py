# SPDX-License-Identifier: Apache-2.0
"""A plan of pipeline stages: what each rank's layers keep, and how long a step of 1F1B takes.

    step    m · T + Σ T of the other stages + 2 (m + p − 2) sends        T: of the slowest stage, a microbatch
    bubble  1 − m · T / step; of p stages that take equally long, without sends, (p − 1) / (m + p − 1)

The first term is the slowest stage's own work. The other stages fill and drain the pipeline once, before and after
it. For equal stages that is (p − 1) / m of the ideal time (Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", 2021, §2.2). Sends carry hidden states and their gradients. All are
counted, as over NCCL. With copy engines, the sends during the first term overlap with it.

Stage s of p has min(m, p − s) microbatches in flight, whose activations it keeps. torch's stages also have buffers for
each microbatch. All but the first stage receive hidden states in them, and all but the last receive their gradients.

Where GPUs share rows, T has their exchanges, and a GPU sends and keeps hidden states of its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lorakernels.fusion.memory import SAVE
from lorakernels.parallel.pipeline.cut import cut
from lorakernels.planner.machine import Machine
from lorakernels.planner.memory import Bytes, Placement, bytes_of, saves_within
from lorakernels.planner.size import ELEMENT, ModelSize
from lorakernels.planner.time import (
    BatchSize,
    KernelSeconds,
    adamw,
    backward,
    exchanged,
    forward,
    head,
    stretched,
)


@dataclass(frozen=True)
class Pipeline:
    """How a step runs through stages.

    Attributes:
        ranks, microbatches: p and m.
        layers: how many each stage has.
        fullest: the stage with the most bytes. A plan shows its bytes.
        bubble: the fraction of a step in which the slowest stage's rank waits.
    """

    ranks: int
    microbatches: int
    layers: tuple[int, ...]
    fullest: int
    bubble: float


class PlannedStage(NamedTuple):
    """One stage of a plan.

    Attributes:
        saves, bytes: what its layers keep, and what its GPU holds.
        seconds: of a microbatch, forward and backward.
        update: of the optimizer.
        factor: how many times longer than at the highest clock, as the power allows.
    """

    saves: tuple[str, ...]
    bytes: Bytes
    seconds: float
    update: float
    factor: float


class Steps(NamedTuple):
    """All stages, and the seconds of a step with its bubble."""

    stages: list[PlannedStage]
    pipeline: Pipeline
    step: float

    @property
    def fullest(self) -> PlannedStage:
        return self.stages[self.pipeline.fullest]


def part_of(model: ModelSize, stages: int) -> list[ModelSize]:
    """The sizes of each stage. The first has the embedding, the last the norm and the head; tied ones are on both."""
    embedding = ELEMENT * model.vocabulary * model.layers[0].hidden
    ranks = sum(sum(layer.ranks) for layer in model.layers)
    sizes = []
    for i, part in enumerate(cut(len(model.layers), stages)):
        layers = tuple(model.layers[j] for j in part)
        first, last = i == 0, i == stages - 1
        outside = embedding * first + max(model.outside - embedding, embedding) * last
        share = sum(sum(layer.ranks) for layer in layers) / max(ranks, 1)
        trained = round(model.trained * share)
        sizes.append(ModelSize(layers, model.vocabulary * last, outside, trained))
    return sizes


def stages_within(
    model: ModelSize, batch: BatchSize, machine: Machine, pipeline: tuple[int, int]
) -> Steps | int:
    """The fastest form of each stage's layers that fits. If one does not fit, its number.

    Args:
        pipeline: p and m.
    """
    ranks, microbatches = pipeline
    stages = []
    for i, part in enumerate(part_of(model, ranks)):
        least = stage(part, batch, machine, (i, *pipeline), ["checkpoint"] * len(part.layers))
        used = least.bytes
        room = machine.memory - (used.total - used.kept - used.workspace)
        room -= buffers(batch, part, (i, *pipeline))
        saves = saves_within(part, batch, room, SAVE, in_flight=min(microbatches, ranks - i))
        if saves is None:
            return i
        stages.append(stage(part, batch, machine, (i, *pipeline), saves))
    return steps(model, batch, machine, pipeline, stages)


def buffers(batch: BatchSize, part: ModelSize, place: tuple[int, int, int]) -> int:
    """Bytes in which a stage receives. `place` is the stage's number, p and m."""
    index, ranks, microbatches = place
    ways = (index > 0) + (index < ranks - 1)
    return ways * microbatches * ELEMENT * batch.tokens * part.layers[0].hidden


def stage(
    part: ModelSize,
    batch: BatchSize,
    machine: Machine,
    place: tuple[int, int, int],
    saves: Sequence[str],
) -> PlannedStage:
    """The plan of one stage, whether it fits or not. `place` is the stage's number, p and m."""
    index, ranks, microbatches = place
    used = bytes_of(part, batch, machine, 1, Placement(), saves)
    received = buffers(batch, part, place)
    kept = used.kept * min(microbatches, ranks - index)
    parts = head(part, batch, machine) if part.vocabulary else KernelSeconds()
    for size, save in zip(part.layers, saves, strict=True):
        parts += forward(size, batch, machine, save) + backward(size, batch, machine, save)
    factor = stretched(parts, machine)
    pairs = zip(part.layers, saves, strict=True)
    rows = sum(exchanged(size, batch, machine, save) for size, save in pairs)
    return PlannedStage(
        tuple(saves),
        replace(used, kept=kept, workspace=used.workspace + received),
        parts.seconds * factor + rows,
        adamw(part, machine).seconds,
        factor,
    )


def steps(
    model: ModelSize,
    batch: BatchSize,
    machine: Machine,
    pipeline: tuple[int, int],
    stages: list[PlannedStage],
) -> Steps:
    """A step of 1F1B over `stages`. `pipeline` is p and m."""
    ranks, microbatches = pipeline
    times = [stage.seconds for stage in stages]
    busy = microbatches * max(times)
    hidden = ELEMENT * batch.tokens * model.layers[0].hidden
    sends = 2 * (microbatches + ranks - 2) * hidden / machine.peer
    through = busy + sum(times) - max(times) + sends
    totals = [stage.bytes.total for stage in stages]
    pipelined = Pipeline(
        ranks,
        microbatches,
        tuple(len(stage.saves) for stage in stages),
        totals.index(max(totals)),
        1 - busy / through,
    )
    return Steps(stages, pipelined, through + max(stage.update for stage in stages))
