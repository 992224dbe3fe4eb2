# SPDX-License-Identifier: Apache-2.0
"""`--shard-base`: the ranks of one machine keep one copy of the FP8 base together. Other machines have copies too."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lorakernels.train.errors import OptionError
from lorakernels.train.options import FinetuneOptions
from lorakernels.train.ranks import STEP, Ranks


def ranks_per_machine(ranks: Ranks) -> int:
    """How many ranks torchrun started on each machine.

    Raises:
        OptionError: LOCAL_WORLD_SIZE is not a number that divides the number of ranks.
    """
    found = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.size))
    if ranks.size == 1:
        return 1
    if not found.isdecimal() or not int(found) or ranks.size % int(found):
        raise OptionError(
            f"shard_base needs as many ranks on every machine, found LOCAL_WORLD_SIZE {found} of {ranks.size} ranks"
        )
    return int(found)


def shard_mesh(
    options: FinetuneOptions, ranks: Ranks, device: torch.device, say: Callable[[str], None]
) -> DeviceMesh | None:
    """Collective: the mesh over which the base is sharded. None if each rank keeps it whole; if asked for, it says why.

    Raises:
        OptionError: as `ranks_per_machine`.
    """
    if not options.shard_base:
        return None
    size = ranks_per_machine(ranks)
    if size == 1:
        say(
            "base: whole, as there is one process on this machine and shard_base needs several: "
            "torchrun --nproc-per-node N -m -- lorakernels.cli finetune ..."
        )
        return None
    group = dist.group.WORLD
    if size < ranks.size:
        group, _ = dist.new_subgroups(size, timeout=STEP)
    assert group is not None
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp_shard",))


def pinning(say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Progress of pinning the host's memory: a line for every tenth of it."""
    said = 0

    def progress(done: int, total: int) -> None:
        nonlocal said
        if 10 * done // total > said:
            said = 10 * done // total
            say(f"base: pinned {done / 1e9:.1f} of {total / 1e9:.1f} GB of host memory")

    return progress
