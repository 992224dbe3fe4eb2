# SPDX-License-Identifier: Apache-2.0
"""`--cp N`: N ranks after each other share each row, with seq_len / N of its tokens each.

With `--pp` each stage has such ranks. The model is cut into stages first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from lorakernels import ContextParallel, context_parallel
from lorakernels.train.data.packing import IGNORE, PackedBatch
from lorakernels.train.errors import OptionError
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks


def sharing(options: FinetuneOptions, ranks: RunRanks) -> RunRanks:
    """The ranks as groups: `cp` of them share each row, `pp` share a model's stages, `tp` share its layers.

    Raises:
        OptionError: `cp`, `pp` or `tp` does not divide their number, or `cp` · `tp` or `cp` · `pp` does not.
    """
    for name in ("cp", "pp", "tp"):
        _check_divides(name, getattr(options, name), ranks)
    _check_divides("cp · tp", options.cp * options.tp, ranks)
    _check_divides("cp · pp", options.cp * options.pp, ranks)
    return replace(ranks, cp=options.cp, pp=options.pp, tp=options.tp)


def _check_divides(name: str, degree: int, ranks: RunRanks) -> None:
    if ranks.size % degree:
        raise OptionError(
            f"{name} must divide the number of ranks, got {degree} for {ranks.size}: torchrun --nproc-per-node N -m -- "
            "lorakernels.cli finetune ..."
        )


def share_rows(model: nn.Module, ranks: RunRanks, device: torch.device) -> None:
    """Collective: let the model's attention run over the ranks that share a row.

    Raises:
        OptionError: the model cannot run so.
    """
    if ranks.cp == 1:
        return
    mesh = ranks.mesh_of("cp", device, ranks.cp, apart=ranks.tp)
    try:
        context = context_parallel(model, mesh)  # all ranks of a replica raise
    except (TypeError, ValueError) as error:
        raise OptionError(f"cp {ranks.cp}: {error}") from error
    # data/packing.py and `own_part` make the rows. Without the check, the host waits for nothing in a step.
    context.checks_places = False


def own_part(batch: PackedBatch, context: ContextParallel | None, isolate: bool) -> PackedBatch:
    """This rank's tokens of a batch of whole rows; without a `context` all of them.

    The documents' starts still count in whole rows. With `isolate` False a row is one document, and positions count
    from the row's start.
    """
    if context is None:
        return batch
    rows, length = batch.input_ids.shape
    positions: Tensor = batch.positions
    if not isolate:
        positions = torch.arange(length).expand(rows, length)
    labels = context.shard(batch.labels)
    return PackedBatch(
        context.shard(batch.input_ids),
        labels,
        context.shard(positions),
        context.shard(batch.segments),
        int((labels != IGNORE).sum()),
        batch.starts if isolate else None,
        batch.longest,
    )
