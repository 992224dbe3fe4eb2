# SPDX-License-Identifier: Apache-2.0
"""What `ShardPlan` predicts of a run, made before the run's first step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.lib.rows import Row, ratio
from benchmarks.peers.training import Ours
from lorakernels.parallel import ShardedBase
from lorakernels.parallel.base.layers import shapes_of
from lorakernels.planner.machine import MACHINES, Machine
from lorakernels.planner.memory import Placement
from lorakernels.planner.plan import predict
from lorakernels.planner.size import ModelSize
from lorakernels.planner.time import BatchSize


@dataclass(frozen=True)
class Prediction:
    """Tokens a second of one GPU, and GiB of its tensors."""

    rate: float
    gib: float

    def columns(self, rate: object, peak: object) -> Row:
        """Beside what was measured."""
        return {
            "predicted tokens/s a GPU": round(self.rate, 1),
            "÷ measured": ratio(self.rate, rate),
            "predicted GiB": round(self.gib, 2),
            "GiB ÷ measured": ratio(self.gib, peak),
        }


NONE: Row = dict.fromkeys(Prediction(1.0, 1.0).columns("", ""), "")


def machine_of(name: str | None, device: torch.device) -> Machine | None:
    """`MACHINES[name]`; without a name that of this GPU, None if the plan does not know it."""
    if name is not None:
        return MACHINES[name]
    found = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = [machine for key, machine in MACHINES.items() if key.partition("-")[0] in found]
    return known[0] if known else None


def placement_of(base: ShardedBase | None, optimizer: int) -> Placement:
    """Where a base lies, and over how many ranks AdamW's state does. None is whole on each GPU."""
    if base is None:
        return Placement(optimizer=optimizer)
    first = next(iter(base.layers.values()))
    whole = sum(n * k for n, k in shapes_of(first).values())
    far = [store for store in base.stores if store.transport.name == "host"]
    there = sum(entry.end - entry.offset for store in far for entry in store.entries(0))
    return Placement(base.shards.ranks, there / whole, base.vocabulary is not None, optimizer)


def prediction(training: Ours, ranks: int, placement: Placement, machine: Machine) -> Prediction:
    """Of a step of `training` on each of `ranks` GPUs, by graphs of layers."""
    size = ModelSize.of(training.model, None)
    batch = BatchSize(training.spec.batch, training.spec.length)
    plan = predict(size, batch, machine, ranks, placement, training.saves)
    return Prediction(plan.rate / ranks, plan.bytes.peak / 2**30)
