# SPDX-License-Identifier: Apache-2.0
"""One rank's view of its process group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch.distributed as dist

from lorakernels.parallel.ranks.exchange import CollectiveRows
from lorakernels.parallel.ranks.rows import RowExchange


@dataclass(eq=False)
class Ranks:
    """A process group, as one rank sees it.

    Attributes:
        group: torch's process group.
        rank, size: this rank's index in the group, and the number of ranks.
        sequence: whether activations between split layers are split by rows (sequence parallelism).
        rows: how the ranks exchange rows.
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
            "process group cannot: copy the model before it is split; or make the model again, split it, and "
            "load_adapter the files of save_adapter"
        )

    def share(self, total: int) -> slice:
        """This rank's part of `total` rows or columns. `size` must divide `total`."""
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)
