# SPDX-License-Identifier: Apache-2.0
"""`--pp N`: N ranks have a model's decoder layers as stages, and are one replica.

Every microbatch of a step is one of the pipeline's. Each rank steps the optimizer over its own adapters. Checkpoints
hold all of them, in the order of one process, so that a run goes on with another N. With `--cp M`, M ranks have each
stage, and share its rows: a replica then has M · N ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lorakernels import Microbatch, PhiloxState, PipelineParallel, pipeline_parallel
from lorakernels.train.data.packing import IGNORE, PackedBatch, PackedRows, spread
from lorakernels.train.errors import OptionError
from lorakernels.train.files.checkpoint import Checkpoint
from lorakernels.train.layouts.context import own_part
from lorakernels.train.layouts.parts import RankPart
from lorakernels.train.model.model import decoder_and_head, no_mask, places_of, places_over_ranks
from lorakernels.train.optimizer.optimizers import groups, numbers
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.progress import Observer, nobody
from lorakernels.train.ranks.ranks import RunRanks, wait_for


class PipelinePart(RankPart):
    """The stages of this rank, as a trainer uses them.

    Attributes:
        pipeline: what `pipeline_parallel` returned.
        others: one rank for each stage, this one among them.
    """

    def __init__(
        self,
        pipeline: PipelineParallel,
        options: FinetuneOptions,
        ranks: RunRanks,
        groups: list[Any],
    ) -> None:
        stage, place = divmod(ranks.rank, ranks.of_stage)
        super().__init__(pipeline.model, ranks, RunRanks(place, ranks.of_stage, group=groups[1]))
        self.pipeline, self.options = pipeline, options
        self.others = RunRanks(stage, ranks.pp, group=groups[0])
        with pipeline.structure():
            named = pipeline.model.named_parameters()
            self.trained = {n: p for n, p in named if p.requires_grad}

    def forward_backward(
        self, batches: Sequence[PackedBatch], items: Tensor, begins: Callable[[], None]
    ) -> Tensor:
        """The step's loss of this replica, fp32 []. It is on the replica's first rank; its other ranks return 0.

        `begins` is called before each forward and backward of a microbatch.
        """
        loss = self._run(batches, items, True, begins)
        return loss if self.ranks.first_of_replica else torch.zeros_like(loss)

    def summed_loss(self, batches: Sequence[PackedBatch]) -> Tensor:
        """Sum of the token losses of `batches`, this rank's tokens of each of the pipeline's microbatches."""
        device = batches[0].labels.device
        return self._run(batches, torch.ones((), device=device), False, partial(wait_for, device))

    def _run(
        self,
        batches: Sequence[PackedBatch],
        items: Tensor,
        trains: bool,
        begins: Callable[[], None],
    ) -> Tensor:
        decoder, _ = decoder_and_head(self.pipeline.model)
        isolate, shared = self.options.isolate_documents, self.pipeline.context is not None

        def places(batch: PackedBatch) -> dict[str, Any]:
            if shared:
                return places_over_ranks(batch)
            return places_of(decoder, batch) if isolate else {}

        cut = [Microbatch(batch.input_ids, batch.labels, places(batch)) for batch in batches]
        with contextlib.nullcontext() if isolate else no_mask(decoder, self.options.seq_len):
            return self.pipeline.run(cut, items, trains, begins)

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        square = torch.nn.utils.get_total_norm(gradients).float().square()
        self.others.add_up([square])
        return square.sqrt()

    def evaluate(
        self, rows: PackedRows, device: torch.device, progress: Observer = nobody
    ) -> Tensor:
        """fp64 [2]: this replica's sum of token losses on held-out rows, and their tokens; 0 except on its first rank.

        ``progress`` reports the batches that were handed out, except the last.
        """
        options, ranks, context = self.options, self.ranks, self.pipeline.context
        isolate = options.isolate_documents
        chosen = spread(len(rows), options.eval_rows)
        count = len(chosen)
        size, at_once = options.batch_size, self.pipeline.microbatches
        together = size * at_once * ranks.replicas
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for start in range(0, count, together):
            first = start + ranks.replica * size * at_once
            batches = []
            for i in range(at_once):
                row_numbers = chosen[first + i * size : first + (i + 1) * size]
                batch = rows.batch(row_numbers + [chosen[0]] * (size - len(row_numbers)))
                batch.labels[len(row_numbers) :] = IGNORE  # rows that fill the batch do not count
                batches.append(replace(batch, targets=int((batch.labels != IGNORE).sum())))
            loss = self.summed_loss([own_part(b, context, isolate).to(device) for b in batches])
            if ranks.first_of_replica:
                total[0] += loss
                total[1] += sum(batch.targets for batch in batches)
            handed_out, batches_in_all = (start + together) // size, math.ceil(count / size)
            progress(min(handed_out, batches_in_all - 1), batches_in_all)
        return total

    def collect(self) -> None:
        self.values = self.pipeline.whole_values()

    def whole(self) -> AbstractContextManager[None]:
        return self.pipeline.whole(self.values)

    def gathered(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self.collect()
        state = optimizer.state_dict()
        states_here = {
            name: state["state"].get(i, {})
            for name, i in numbers(self._own(), self.options).items()
        }
        everywhere: list[Any] = [None] * self.others.size
        dist.all_gather_object(everywhere, _on_cpu(states_here), group=self.others.group)
        states = {name: moments for part in everywhere for name, moments in part.items()}
        places = numbers(self.trained, self.options)
        kept = {i: states[name] for name, i in places.items() if states[name]}
        whole = self._numbered(self.trained, state["param_groups"])
        return self.values, {"state": kept, "param_groups": whole}

    def own_part(self, checkpoint: Checkpoint) -> Checkpoint:
        names = {n for n, _ in self.pipeline.model.named_parameters()}
        names |= {n for n, _ in self.pipeline.model.named_buffers()}
        tensors = {
            n: x for n, x in checkpoint.tensors.items() if n in names or n not in self.trained
        }
        optimizer, here = checkpoint.state["optimizer"], numbers(self._own(), self.options)
        places = numbers(self.trained, self.options)
        fits = sum(len(group["params"]) for group in optimizer["param_groups"]) == len(self.trained)
        if not fits:  # of another run, as the trainer will say
            return checkpoint
        kept = {
            i: optimizer["state"][places[n]]
            for n, i in here.items()
            if places[n] in optimizer["state"]
        }
        param_groups = self._numbered(self._own(), optimizer["param_groups"])
        state = {**checkpoint.state, "optimizer": {"state": kept, "param_groups": param_groups}}
        return replace(checkpoint, tensors=tensors, state=state)

    def _numbered(self, trained: dict[str, nn.Parameter], like: list[Any]) -> list[dict[str, Any]]:
        """The groups of `trained` as a state_dict has them, with the settings of the groups `like`."""
        parameters = count()
        return [
            {**settings, "params": [*islice(parameters, len(group["params"]))]}
            for group, settings in zip(groups(trained, self.options), like, strict=True)
        ]

    def _own(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.pipeline.model.named_parameters() if p.requires_grad}


@dataclass(frozen=True)
class StageRanks:
    """The ranks under `--pp N`: `mesh` over the stages, and `groups` over the stages and over equal ones."""

    mesh: DeviceMesh
    groups: list[Any]


def stage_ranks(ranks: RunRanks, device: torch.device) -> StageRanks | None:
    """Collective: the groups of a run with `pp` ranks a replica; None without pipeline."""
    if ranks.pp == 1:
        return None
    mesh = ranks.mesh_of("pp", device, ranks.pp, apart=ranks.of_stage)
    return StageRanks(mesh, [mesh.get_group(), ranks.group_of(ranks.of_stage)])


def cut_stages(
    model: nn.Module,
    options: FinetuneOptions,
    ranks: RunRanks,
    shared: StageRanks | None,
    random: PhiloxState,
) -> PipelinePart | None:
    """Collective: keep this rank's stages of the model.

    Raises:
        OptionError: the model cannot be cut.
    """
    if shared is None:
        return None
    try:
        pipeline = pipeline_parallel(model, shared.mesh, microbatches=options.grad_accum)
    except (TypeError, ValueError) as error:
        raise OptionError(f"pp {ranks.pp}: {error}") from error
    pipeline.offsets, pipeline.loss_chunk = random, options.loss_chunk
    return PipelinePart(pipeline, options, ranks, shared.groups)


def _on_cpu(states: dict[str, Any]) -> dict[str, Any]:
    def moved(value: Any) -> Any:
        return value.cpu() if isinstance(value, Tensor) else value

    return {name: {k: moved(v) for k, v in state.items()} for name, state in states.items()}
