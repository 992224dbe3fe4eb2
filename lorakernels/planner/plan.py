# SPDX-License-Identifier: Apache-2.0
"""ShardPlan: how to train a model on the GPUs of a host, and what that takes, before a weight is read.

`ShardPlan.of` looks at every placement of the base: whole or sharded, with groups of each layer's weights on the host.
For each it takes the fastest `save` of the layers that fits (fusion/memory.py), and keeps the placement whose step is
shortest. What layers keep may wait in host memory, too. Of plans within 1 % of the shortest step, the one with the
least on the host wins. A gather or host copy is hidden if it takes no longer than the layer that it overlaps with.

Context, tensor and pipeline parallel are given, not chosen: how many ranks share each row, hold each layer together, or
have the layers as stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from lorakernels.config import LoRAConfig
from lorakernels.fusion.memory import AWAY, OFFLOADED, SAVE, LayerSize, host_bytes, kept_bytes
from lorakernels.parallel.base.host_memory import host_memory_limit
from lorakernels.planner.axes import PlanAxes, positive
from lorakernels.planner.machine import MACHINES, Machine
from lorakernels.planner.memory import (
    Bytes,
    Placement,
    bytes_of,
    fractions,
    saves_within,
)
from lorakernels.planner.pipeline import Pipeline, Steps, stages_within
from lorakernels.planner.probe import probe
from lorakernels.planner.report import describe
from lorakernels.planner.size import ELEMENT, ModelSize, weights
from lorakernels.planner.tensor import crossings, ends
from lorakernels.planner.time import (
    REPLAY,
    BatchSize,
    KernelSeconds,
    LayerTime,
    around,
    backward,
    exchanged,
    forward,
    stretched,
)

EXPOSED = 0.02  # of a step: copies that add less count as hidden
EQUAL = 1.01  # steps that differ by less count as equally fast


@dataclass(frozen=True)
class ShardPlan:
    """How a model is trained, and what it takes. `print(plan)` shows all of it.

    Attributes:
        machine: its rates were used.
        batch: of a microbatch, and how many GPUs share it.
        gpus: how many train.
        placement: over how many GPUs the base is sharded, the fraction of it in host memory, and whether embedding and
            head are split over these GPUs, too. Of layers that GPUs hold together, those with equal parts share them.
        saves: what each layer keeps for backward.
        bytes: of one GPU, part by part.
        layer: times of the layer with most seconds exposed, the last of equal ones. With stages, of the fullest stage.
        step: seconds of one optimizer step.
        exposed: seconds of it that gathers and copies add.
        pipeline: how a step runs through stages; None without pipeline parallel. `bytes` are of the fullest stage then.
    """

    model: ModelSize
    batch: BatchSize
    machine: Machine
    gpus: int
    placement: Placement
    saves: tuple[str, ...]
    bytes: Bytes
    layer: LayerTime
    step: float
    exposed: float
    pipeline: Pipeline | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        memory: int | None,
        tokens: int | tuple[int, int],
        gpus: int | PlanAxes = 1,
        *,
        lora: LoRAConfig | None = None,
        machine: str | Machine = "H200",
        host_memory: int | None = None,
        allow_exposed: bool = False,
    ) -> ShardPlan:
        """The fastest plan that fits.

        Args:
            model: a transformers config, or a model, whose adapters count if it has any. No weights are needed.
            memory: bytes of one GPU; None for the machine's.
            tokens: of one microbatch: one sequence, or (sequences, tokens of each).
            gpus: how many, of one host, each with a microbatch of its own; or `PlanAxes`, where some of them share it.
                Stages have a whole base on the GPU, without offload; nor do layers that GPUs hold together have it.
            lora: adapters of a model that has none. None is r = 16 on all linear layers.
            machine: a name of `MACHINES`, rates, or "probe" to measure this machine's current GPU.
            host_memory: bytes that may be pinned on the host, for all GPUs; 0 offloads nothing. None is the limit of
                this process's control groups, and 0 if they set none.
            allow_exposed: accept gathers and copies that take longer than the layers they overlap with.

        Raises:
            TypeError: the model is no transformers model or config.
            ValueError: a number is not positive, axes do not fit each other or the model, the machine or the model's
                family is unknown, nothing fits, or what fits is not hidden.
        """
        rates = _machine(machine)
        if memory is not None:
            rates = replace(rates, memory=positive("memory", memory))
        many, length = tokens if isinstance(tokens, tuple) else (1, tokens)
        axes = gpus if isinstance(gpus, PlanAxes) else PlanAxes(gpus)
        axes.check(length, host_memory)
        batch = BatchSize(positive("tokens", many), positive("tokens", length), axes.cp, axes.tp)
        if host_memory is not None and host_memory < 0:
            raise ValueError(f"host_memory must not be negative, found {host_memory}")
        host = (host_memory_limit() or 0) if host_memory is None else host_memory
        if axes.tp > 1:
            host = 0
        size = ModelSize.of(model, lora, axes.tp)
        if axes.pp > 1:
            return _staged(size, batch, rates, axes)
        split = axes.gpus if axes.sharded_optimizer else 1
        plans = candidates(size, batch, rates, axes.gpus, host, split)
        if not plans:
            raise ValueError(_nothing_fits(size, batch, rates, axes.gpus, host, split))
        hidden = [plan for plan in plans if plan.exposed <= EXPOSED * plan.step]
        if not hidden and not allow_exposed:
            raise ValueError(_not_hidden(_best(plans)))
        return _best(plans if allow_exposed else hidden)

    @property
    def rate(self) -> float:
        """Tokens a second, of all GPUs together."""
        if self.pipeline is None:
            return self.gpus // self.batch.tp * self.batch.tokens / self.step
        replicas = self.gpus // self.pipeline.ranks
        return replicas * self.pipeline.microbatches * self.batch.tokens / self.step

    @property
    def memory_budget(self) -> int:
        """The `memory_budget` with which `fuse` chooses these `saves`, over all layers together: without stages.

        It is of whole layers: before `parallelize` cuts them.
        """
        return kept_bytes(self.model.layers, self.saves, self.batch.tokens, ELEMENT)

    @property
    def offload_activations(self) -> bool:
        """The `offload_activations` with which `fuse` chooses these `saves`."""
        return any(save.endswith(AWAY) for save in self.saves)

    def __str__(self) -> str:
        return describe(self)


def predict(
    model: ModelSize,
    batch: BatchSize,
    machine: Machine,
    gpus: int,
    placement: Placement,
    saves: Sequence[str],
) -> ShardPlan:
    """The plan for a given choice, whether it fits or not. `model` is the whole model.

    A whole base on one GPU is one graph a step, all else graphs by layer.
    """
    whole, model = model, model.over(batch.tp)
    layers = list(zip(model.layers, saves, strict=True))
    parts = around(model, batch, machine, placement.optimizer)
    crossed = ends(model, batch, machine)
    parts += crossed.parts
    waits = crossed.waits
    for size, save in layers:
        parts += forward(size, batch, machine, save) + backward(size, batch, machine, save)
        for crossed in crossings(size, batch, machine, save):
            parts += crossed.parts
            waits += crossed.waits
    split = placement.split(model)
    arrivals = max(
        0, len(layers) - 2
    )  # each way: when the direction changes, two layers are still gathered
    # a gathered byte is written once, and each byte of a shard is read by n GPUs; a copied one is written
    traffic = 2.0 if placement.ranks > 1 else placement.offload
    parts += KernelSeconds(
        memory=2 * arrivals * traffic * max(map(weights, model.layers)) / machine.bandwidth
    )
    factor = stretched(parts, machine, waits)
    counts = Counter(reversed(layers))
    times = {kind: _layer_time(kind, batch, machine, placement, factor) for kind in counts}
    exposed = (
        sum(times[kind].exposed * count for kind, count in counts.items()) * arrivals / len(layers)
    )
    # the embedding and the head, once each; nothing overlaps with them
    both = sum(split[:1] + split[-1:])
    exposed += both * (placement.ranks - 1) / placement.ranks / machine.peer
    one_graph = gpus == 1 and not placement.offload
    replays = 0.0 if one_graph else 2 * len(model.layers) * REPLAY
    exchange = _averaged(model.trained, gpus // batch.tp, machine)
    exchange += sum(exchanged(size, batch, machine, save) for size, save in layers)
    return ShardPlan(
        whole,
        batch,
        machine,
        gpus,
        placement,
        tuple(saves),
        bytes_of(whole, batch, machine, gpus, placement, saves),
        max(times.values(), key=lambda time: time.exposed),
        parts.seconds * factor + replays + exposed + exchange + waits,
        exposed,
    )


def _layer_time(
    kind: tuple[LayerSize, str],
    batch: BatchSize,
    machine: Machine,
    placement: Placement,
    factor: float,
) -> LayerTime:
    """The times of a layer in its form. It takes `factor` times as long as its kernels alone."""
    (size, save), n = kind, placement.ranks
    block = weights(size)
    gather = block * (n - 1) / n / machine.peer
    there, back = crossings(size, batch, machine, save)
    return LayerTime(
        (forward(size, batch, machine, save) + there.parts).seconds * factor,
        (backward(size, batch, machine, save) + back.parts).seconds * factor,
        gather,
        # a GPU copies its own part from the host; all GPUs then gather the parts
        placement.offload * (block / n / machine.host + gather),
        host_bytes(size, save, batch.tokens, ELEMENT) / machine.host,
        exchanged(size, batch, machine, save),
        there.waits + back.waits,
    )


def _averaged(trained: int, gpus: int, machine: Machine) -> float:
    """Seconds of an all-reduce of fp32 gradients: each GPU sends and receives (n − 1) / n of them twice."""
    return 2 * 4 * trained * (gpus - 1) / gpus / machine.peer


def _staged(model: ModelSize, batch: BatchSize, machine: Machine, axes: PlanAxes) -> ShardPlan:
    """The plan over pipeline stages, if it fits."""
    staged = stages_within(model, batch, machine, (axes.pp, axes.in_a_step))
    if not isinstance(staged, Steps):
        raise ValueError(
            f"memory: stage {staged} of {axes.pp} does not fit {machine.memory / 1e9:.1f} GB with its layers "
            f"checkpointed and {min(axes.in_a_step, axes.pp - staged)} microbatches of {batch.tokens} tokens in "
            "flight: take more stages, or fewer tokens"
        )
    fullest = staged.fullest
    last = model.layers[sum(staged.pipeline.layers[: staged.pipeline.fullest + 1]) - 1]
    kind = last, fullest.saves[-1]
    trained = model.trained // axes.pp
    return ShardPlan(
        model,
        batch,
        machine,
        axes.gpus,
        Placement(),
        tuple(save for stage in staged.stages for save in stage.saves),
        fullest.bytes,
        _layer_time(kind, batch, machine, Placement(), fullest.factor),
        staged.step + _averaged(trained, axes.gpus // axes.pp, machine),
        0.0,
        staged.pipeline,
    )


def candidates(
    model: ModelSize, batch: BatchSize, machine: Machine, gpus: int, host: int, optimizer: int = 1
) -> list[ShardPlan]:
    """A plan for each placement of the base that fits the GPU's memory and `host` bytes of the host's.

    Where none does, a plan for each that also splits embedding and head. `optimizer` is the placement's.
    """
    # one GPU cannot split them, and GPUs that hold layers together split them by tokens
    can_split = [False, True] if gpus > 1 and batch.tp == 1 else [False]
    for embeddings in can_split:
        end = Placement(gpus // batch.tp, embeddings=embeddings, optimizer=optimizer)
        if plans := _candidates(model, batch, machine, end, host):
            return plans
    return []


def _candidates(
    model: ModelSize, batch: BatchSize, machine: Machine, over: Placement, host: int
) -> list[ShardPlan]:
    """Plans over one GPU and over all of `over`, which says what else is split."""
    plans, gpus = list[ShardPlan](), over.ranks * batch.tp
    all_forms = (SAVE, OFFLOADED) if host else (SAVE,)
    ways = [(ranks, forms) for ranks in {1, over.ranks} for forms in all_forms]
    for (ranks, forms), offload in product(ways, fractions(max(model.layers, key=weights))):
        ends = over.embeddings and ranks > 1
        placement = Placement(ranks, offload, ends, over.optimizer)
        saves = _saves(model, batch, machine, placement, forms)
        if saves is None or (forms is OFFLOADED and not any(AWAY in save for save in saves)):
            continue
        plan = predict(model, batch, machine, gpus, placement, saves)
        if plan.bytes.host <= host:
            plans.append(plan)
    return plans


def _saves(
    model: ModelSize, batch: BatchSize, machine: Machine, placement: Placement, forms: Sequence[str]
) -> list[str] | None:
    """The fastest `save` of each layer that fits, None if nothing does."""
    none = ["checkpoint"] * len(model.layers)
    used = bytes_of(model, batch, machine, 1, placement, none)
    room = machine.memory - (used.total - used.kept - used.workspace)
    return saves_within(model, batch, room, forms, placement)


def _best(plans: list[ShardPlan]) -> ShardPlan:
    """The fastest plan. Of equally fast ones, the one with the least on the host, then over the fewest GPUs."""
    limit = EQUAL * min(plan.step for plan in plans)
    fastest = [plan for plan in plans if plan.step <= limit]
    return min(fastest, key=lambda p: (p.bytes.host, p.placement.ranks))


def _machine(machine: str | Machine) -> Machine:
    if machine == "probe":
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        return probe(device)
    rates = MACHINES.get(machine) if isinstance(machine, str) else machine
    if rates is None:
        names = ", ".join(MACHINES)
        raise ValueError(f"machine must be probe or one of {names}, found {machine!r}")
    return rates


def _nothing_fits(
    model: ModelSize, batch: BatchSize, machine: Machine, gpus: int, host: int, optimizer: int
) -> str:
    saves, tp = ["checkpoint"] * len(model.layers), batch.tp
    placement = Placement(gpus // tp, embeddings=tp == 1, optimizer=optimizer)
    used = bytes_of(model, batch, machine, gpus, placement, saves)
    offered = f"{host / 1e9:.0f} GB of" if host else "no"
    over = f"over {gpus} GPUs, embedding and head too," if gpus > 1 else "whole"
    if tp > 1:
        shared = f", each over {gpus // tp} GPUs," if gpus > tp else ""
        return (
            f"memory: nothing fits {machine.memory / 1e9:.1f} GB. With the base in {tp} parts{shared} and every layer "
            f"checkpointed, {batch.tokens} tokens need {used.total / 1e9:.1f} GB, {used.base / 1e9:.1f} of them the "
            "base: take fewer tokens, or more GPUs"
        )
    return (
        f"memory: nothing fits {machine.memory / 1e9:.1f} GB. With the base {over} and every layer checkpointed, "
        f"{batch.tokens} tokens need {used.total / 1e9:.1f} GB, {used.base / 1e9:.1f} of them the base, with {offered} "
        "host memory (host_memory, --host-memory) to take a part of it"
    )


def _not_hidden(plan: ShardPlan) -> str:
    layer = plan.layer
    return (
        f"a layer runs {layer.forward * 1e3:.2f} ms forward and {layer.backward * 1e3:.2f} ms backward, while its "
        f"weights need {layer.gather * 1e3:.2f} ms from the other GPUs and {layer.copy * 1e3:.2f} ms from the host: "
        f"{plan.exposed * 1e3:.0f} ms of {plan.step * 1e3:.0f} a step are not hidden. Take more tokens, or "
        "allow_exposed (--allow-exposed)"
    )
