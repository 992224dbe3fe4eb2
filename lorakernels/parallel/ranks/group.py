# SPDX-License-Identifier: Apache-2.0
"""The ranks that hold one layer together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch.distributed as dist

from lorakernels.parallel.ranks.exchange import CollectiveRows
from lorakernels.parallel.ranks.rows import RowExchange


@dataclass(eq=False)
class Ranks:
    """A tensor-parallel group, as one rank sees it.

    Attributes:
        group: torch's process group.
        rank, size: this rank's place in it, and how many there are.
        sequence: whether what lies between split layers is split by rows (sequence parallelism).
        rows: how they exchange rows then.
    """

    group: Any
    sequence: bool = False
    rows: RowExchange = field(init=False)
    rank: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.rows = CollectiveRows(self.group, dist.get_backend(self.group))

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise RuntimeError(
            "a model that ranks hold together (parallelize, pipeline_parallel) cannot be copied or pickled, as its "
            "process group cannot: split a copy that was made before; or make the model anew, split it, and "
            "load_adapter what save_adapter has written"
        )

    def share(self, total: int) -> slice:
        """This rank's part of `total`, which the size divides."""
        own = total // self.size
        return slice(self.rank * own, (self.rank + 1) * own)
