# SPDX-License-Identifier: Apache-2.0
"""Ranks with parts of a model's adapters: some of its layers (pipeline.py), or a part of each (tensor.py).

Each rank steps the optimizer over its own part. Checkpoints and adapter files hold all of them, as one process writes
them, so that a run goes on at another layout.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.train.files.checkpoint import Checkpoint
from lorakernels.train.ranks.ranks import RunRanks

_OF_MODEL = "finetune_parts"


class RankPart(ABC):
    """This rank's part of the adapters, as a trainer uses it.

    Attributes:
        ranks: all ranks.
        same: those that have the same part, of other rows.
        values: of all trained parameters and initial adapters on the CPU, since `collect`.
    """

    def __init__(self, model: nn.Module, ranks: RunRanks, same: RunRanks) -> None:
        self.ranks, self.same = ranks, same
        self.values: dict[str, Tensor] = {}
        vars(model)[_OF_MODEL] = self

    @classmethod
    def of(cls, model: nn.Module) -> Any:
        """The part of this class that belongs to `model`, or None."""
        parts = vars(model).get(_OF_MODEL)
        return parts if isinstance(parts, cls) else None

    def add_up_gradients(self, parameters: Sequence[Tensor], *others: Tensor) -> list[Tensor]:
        """Sum gradients over the ranks with the same part, and `others` over all. Returns this rank's gradients."""
        self.ranks.add_up(others)
        return self.same.add_up_gradients(parameters, torch.zeros_like(others[0]))

    @abstractmethod
    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Collective: the norm of all parts' gradients, fp32 []."""

    @abstractmethod
    def collect(self) -> None:
        """Collective: bring `values` of all parts here."""

    @abstractmethod
    def whole(self) -> AbstractContextManager[None]:
        """Inside, the model has all modules by their names, with `values`."""

    @abstractmethod
    def gathered(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Collective: the trained tensors and the optimizer's state of all parts, as one process has them."""

    @abstractmethod
    def own_part(self, checkpoint: Checkpoint) -> Checkpoint:
        """This rank's tensors and optimizer state, from a checkpoint of all parts."""


@contextlib.contextmanager
def whole_model(model: nn.Module) -> Iterator[None]:
    """Inside, files get the whole of a model that is split over ranks, with the values that were collected last."""
    parts: RankPart | None = RankPart.of(model)
    if parts is None:
        yield
        return
    with parts.whole():
        yield


def collect(model: nn.Module) -> None:
    """Collective: before `whole_model` on one rank alone."""
    parts: RankPart | None = RankPart.of(model)
    if parts is not None:
        parts.collect()
