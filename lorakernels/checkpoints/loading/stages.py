# SPDX-License-Identifier: Apache-2.0
"""Load the stages of one rank of a pipeline, and no weights of other stages.

Until all is read, something else stands for a weight of another rank (stand_ins.py). So adapters are drawn as in one
process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from lorakernels.checkpoints.loading.stand_ins import StandIns
from lorakernels.parallel.pipeline.check import check, check_ranks, places_of
from lorakernels.parallel.pipeline.cut import PipelineCut, stages_of
from lorakernels.parallel.ranks.group import Ranks


class StageMesh(NamedTuple):
    """The `stages` of `load_quantized`: `mesh` is one dimension of a DeviceMesh, `chunks` the stages of a rank."""

    mesh: Any
    chunks: int = 1

    @classmethod
    def of(cls, stages: Any) -> StageMesh | None:
        """`stages`: a mesh, (mesh, chunks), or None.

        Raises:
            ValueError: chunks is no positive integer.
        """
        if stages is None:
            return None
        parsed = cls(*stages) if isinstance(stages, tuple) else cls(stages)
        if type(parsed.chunks) is not int or parsed.chunks < 1:
            raise ValueError(f"stages: chunks must be a positive integer, found {parsed.chunks!r}")
        return parsed


class OtherStages:
    """The modules of `model` that other ranks have, while this rank's are read.

    Args:
        model: before it has weights.
        stages: where it is cut.
        device: of the model's weights.

    Attributes:
        inside: what the names of their parameters begin with.
        stand_ins: what stands for these parameters.

    Raises:
        TypeError, ValueError: as for `pipeline_parallel`.
    """

    def __init__(self, model: nn.Module, stages: StageMesh, device: torch.device) -> None:
        ranks = Ranks(stages.mesh.get_group())
        places = places_of(model)
        self.cut = PipelineCut(ranks, places, stages_of(places, ranks.size, stages.chunks))
        self.inside = tuple(f"{path}." for path in self.cut.elsewhere())
        self.stand_ins = StandIns(device)

    def take_out(self, model: nn.Module) -> None:
        """Leave this rank its part, after adapters were put on the whole model.

        Raises:
            ValueError: the model cannot run as stages.
        """
        check(model, self.cut.places)
        check_ranks(model, self.cut.stages, self.cut.ranks.size)
        self.cut.take_out(model)
