# SPDX-License-Identifier: Apache-2.0
"""`--shard-base`: the ranks of one machine keep one copy of the FP8 base together. Other machines have copies too."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lorakernels import shard_base
from lorakernels.train.errors import OptionError
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import STEP, RunRanks


def ranks_per_machine(ranks: RunRanks) -> int:
    """How many ranks torchrun started on each machine.

    Raises:
        OptionError: LOCAL_WORLD_SIZE is not a number that divides the number of ranks.
    """
    count = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.size))
    if ranks.size == 1:
        return 1
    if not count.isdecimal() or not int(count) or ranks.size % int(count):
        raise OptionError(
            f"shard_base needs as many ranks on every machine, found LOCAL_WORLD_SIZE {count} of {ranks.size} ranks"
        )
    return int(count)


def shard_mesh(
    options: FinetuneOptions, ranks: RunRanks, device: torch.device, say: Callable[[str], None]
) -> DeviceMesh | None:
    """Collective: the mesh over which the base is sharded. None if each rank keeps it whole; if asked for, it says why.

    With `tp` it has the ranks of this machine that have the same parts of the layers.

    Raises:
        OptionError: as `ranks_per_machine`. Also if tensor-parallel ranks are on two machines.
    """
    if not options.shard_base:
        return None
    size, tp = ranks_per_machine(ranks), ranks.tp
    if size % tp:
        raise OptionError(
            f"shard_base needs all {tp} ranks of tp on one machine, found {size} ranks on each"
        )
    if tp > 1:
        return _mesh_of_equal_parts(ranks, size // tp, device, say)
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


def _mesh_of_equal_parts(
    ranks: RunRanks, count: int, device: torch.device, say: Callable[[str], None]
) -> DeviceMesh | None:
    if count == 1:
        say(
            f"base: each rank keeps its parts whole, as a machine has no more than the {ranks.tp} ranks of tp"
        )
        return None
    return ranks.mesh_of("dp_shard", device, count, apart=ranks.tp)


def shard_parts(model: nn.Module, mesh: DeviceMesh | None, say: Callable[[str], None]) -> None:
    """Collective: shard the base of a model whose layers were split, and say how; nothing without a mesh.

    Raises:
        OptionError: the base cannot be sharded.
    """
    if mesh is None:
        return
    try:
        base = shard_base(model, mesh)
    except (TypeError, ValueError) as error:
        raise OptionError(f"shard_base: {error}") from error
    say(f"base: {'; '.join(str(base).splitlines())}")


def pinning(say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Progress of pinning the host's memory: a line for every tenth of it."""
    said = 0

    def progress(done: int, total: int) -> None:
        nonlocal said
        if 10 * done // total > said:
            said = 10 * done // total
            say(f"base: pinned {done / 1e9:.1f} of {total / 1e9:.1f} GB of host memory")

    return progress
