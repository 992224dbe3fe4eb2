# SPDX-License-Identifier: Apache-2.0
"""What says that a model was cut into stages, for code that knows no pipeline."""

from __future__ import annotations

from torch import nn

from lorakernels.parallel.ranks.group import Ranks

CUT = "pipeline_cut"  # the attribute of a model that has its Cut (pipeline/cut.py)


def ranks_of_stages(model: nn.Module) -> Ranks | None:
    """Those that have the stages of a model that was cut; None of a whole one."""
    cut = vars(model).get(CUT)
    return None if cut is None else cut.ranks
