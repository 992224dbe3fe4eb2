# SPDX-License-Identifier: Apache-2.0
"""Each rank hears of the end of any other before one of them has waited for its grace."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests import processes

RANKS, ENDS = 4, 2


def hears(rank: int, where: dict[str, str], folder: str) -> None:
    """Rank `ENDS` ends. The others write a file when they have heard of it, and then wait for ever."""
    import torch.distributed as dist

    from lorakernels.train.ranks import watch

    os.environ |= where
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)

    def grace(seconds: float) -> None:
        Path(folder, f"heard{rank}").write_text(str(seconds))
        time.sleep(600)

    with mock.patch.object(watch, "time", mock.Mock(sleep=grace)):
        watch.RankWatch(lambda: "")
        dist.barrier()
        if rank == ENDS:
            os._exit(0)
        time.sleep(600)


def test_all_ranks_hear_at_once_that_one_has_ended(tmp_path: Path) -> None:
    """The graces of eight ranks one after the other would take longer than a step may."""
    _store, where = processes.meet()
    ranks: list[Any] = [
        processes.start(
            hears, rank, where, str(tmp_path), on_gpu=False, said=tmp_path / f"said{rank}"
        )
        for rank in range(RANKS)
    ]
    heard = [tmp_path / f"heard{rank}" for rank in range(RANKS) if rank != ENDS]
    try:
        for _ in range(600):
            if all(path.exists() for path in heard):
                break
            time.sleep(0.1)
        assert [path.name for path in heard if not path.exists()] == []
    finally:
        for process in ranks:
            process.kill()
            process.join()
