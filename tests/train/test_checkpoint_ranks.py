# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that one rank alone cannot read: all ranks do the same then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lorakernels.train.errors import CheckpointError, FinetuneError
from lorakernels.train.files.checkpoint import Checkpoint
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks
from lorakernels.train.run.evaluations import Evaluations
from lorakernels.train.run.session import Session
from tests.processes import on_ranks

pytestmark = pytest.mark.slow


class Folder:
    """Checkpoints, of which a rank cannot read some."""

    def __init__(self, unreadable: bool) -> None:
        self.unreadable = unreadable

    def load(self, step: int, device: torch.device) -> Checkpoint:
        if self.unreadable:
            raise CheckpointError(f"checkpoint {step} cannot be read (stale)")
        return Checkpoint(step, {}, {}, {})

    def load_newest(self, say: Any, device: torch.device, until: int | None) -> Checkpoint:
        return self.load(4, device)


class Trainer:
    def __init__(self, ranks: RunRanks, device: torch.device) -> None:
        self.ranks, self.device, self.taken = ranks, device, -1
        self.counters = type("Counters", (), {"step": 9})

    def take_weights(self, checkpoint: Checkpoint) -> None:
        self.taken = checkpoint.step


def best(rank: int, device: torch.device, who: int) -> tuple[str, int, int]:
    """What `take_best` says, whose weights the model has, and what the session takes it for."""
    trainer, options = (
        Trainer(RunRanks(rank, 2), device),
        FinetuneOptions(load_best_model_at_end=True),
    )
    given: Any = trainer, None, options, None, None, 0.0, "", Folder(rank == who)
    session = Session(*given)
    session.evaluations = Evaluations(best_step=4, best_eval=1.0)
    said = session.take_best()
    return said, trainer.taken, session.adapter_step


@pytest.mark.parametrize("who", [0, 1, None])
def test_the_best_weights_are_taken_by_all_ranks_or_none(who: int | None) -> None:
    """Ranks with parts of the adapters would write a mixture of two steps."""
    for rank, (said, taken, step) in enumerate(on_ranks(best, 2, "gloo", who)):
        if who is None:
            assert (taken, step) == (4, 4)
            assert said.startswith("the adapter has the weights after step 4, whose ")
            continue
        lost = "checkpoint 4 cannot be read (stale)"
        lost = lost if rank == who else f"rank {who} stopped: {lost}"
        last = "the adapter has the weights after step 9, the last one"
        assert said == f"{last}, because the best checkpoint is lost: {lost}"
        assert (taken, step) == (-1, 9)


def newest(rank: int, device: torch.device, who: int) -> str:
    folder: Any = Folder(rank == who)
    given: Any = Trainer(RunRanks(rank, 2), device), None, None, None, None, 0.0, "", folder
    session = Session(*given)
    session.reporter = type("Reporter", (), {"say": None})  # type: ignore[assignment]
    try:
        found = session._load_newest()
    except FinetuneError as error:
        return str(error)
    return str(found and found.step)


@pytest.mark.parametrize("who", [0, 1, None])
def test_all_ranks_go_on_from_a_checkpoint_or_none(who: int | None) -> None:
    lost = "checkpoint 4 cannot be read (stale)"
    for rank, said in enumerate(on_ranks(newest, 2, "gloo", who)):
        assert said == (
            "4" if who is None else lost if rank == who else f"rank {who} stopped: {lost}"
        )
