# SPDX-License-Identifier: Apache-2.0
"""Weights in pinned memory of the host: which weights go there, and how they are copied into a memory slot.

    one rank       the weights that stay on the GPU keep their own memory; only weights on the host have memory slots
    several ranks  the weights on the host are split over the ranks like the other weights. A rank copies its part into
                   the memory slot, and an all-gather brings the other parts. Each byte crosses the bus of one GPU only.

Weights that multiply the same input form a group, which goes to the host as a whole. All layers offload the same
groups: at least the requested fraction of a layer's bytes, and as little more as possible. They are never written back.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.parallel.base.host_memory import check_host_memory
from lorakernels.parallel.base.pinned import PAGE, Pinned, Progress
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.blocks import Block, Shape, lay_out
from lorakernels.parallel.ranks.shards import Shards

WeightGroup = list[
    tuple[str, Shape]
]  # (path in the layer, [N, K]) of the weights that multiply one input


class Offload(NamedTuple):
    """Which part of a base goes to host memory.

    Attributes:
        fraction: of the bytes of every layer's frozen weights, at least 0 and less than 1.
        host_memory: bytes that all ranks of this host may pin together; None reads the control group's limit.
        progress: called with (bytes pinned, bytes in all) while memory is pinned.
    """

    fraction: float
    host_memory: int | None = None
    progress: Progress | None = None


def as_offload(offload: float | Offload) -> Offload:
    """`offload` as an Offload, if it is only the fraction.

    Raises:
        ValueError: the fraction is not in [0, 1), or host_memory is not a number of bytes.
    """
    if not isinstance(offload, Offload):
        offload = Offload(offload)
    fraction, memory = offload.fraction, offload.host_memory
    if type(fraction) not in (int, float) or not 0 <= fraction < 1:
        raise ValueError(f"offload must be at least 0 and less than 1, found {fraction!r}")
    if memory is not None and (type(memory) is not int or memory < 0):
        raise ValueError(f"host_memory must be a number of bytes, found {memory!r}")
    return offload


def divide(
    groups: Sequence[WeightGroup], fraction: float
) -> tuple[list[WeightGroup], list[WeightGroup]]:
    """(groups that stay, groups for the host) of one layer. Among equally large choices, the last groups go.

    Raises:
        ValueError: no group would stay.
    """
    if not fraction:
        return list(groups), []
    sizes = [sum(n * k for _, (n, k) in group) for group in groups]
    wanted = fraction * sum(sizes)
    able = (chosen for chosen in _sets(len(groups)) if sum(sizes[i] for i in chosen) >= wanted)
    best = min(able, key=lambda chosen: (sum(sizes[i] for i in chosen), [-i for i in chosen]))
    if len(best) == len(groups):
        most = math.floor(1000 * (1 - min(sizes) / sum(sizes))) / 1000
        raise ValueError(
            f"offload must be at most {most:.3f} for this model, found {fraction}: matrices of one input go to the "
            "host as a whole, and one of them must stay"
        )
    on_host = set(best)
    stay = [group for i, group in enumerate(groups) if i not in on_host]
    return stay, [groups[i] for i in sorted(on_host)]


def _sets(count: int) -> Iterator[tuple[int, ...]]:
    for size in range(1, count + 1):
        yield from combinations(range(count), size)


def host_block(groups: Sequence[WeightGroup], ranks: int) -> Block:
    """The block of one layer's weights on the host. Its parts are whole pages, since each part is pinned by itself."""
    return lay_out(groups, ranks, PAGE)


def check_room(blocks: Sequence[Block], ranks: int, offload: Offload) -> None:
    """Refuse shards of `blocks` for which this host has too little memory. Call it before any rank allocates.

    Raises:
        ValueError: this host has too little memory for its ranks' shards.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    check_host_memory(Shards.bytes_of(blocks, ranks) * here, offload.host_memory)


class HostShards(Shards):
    """Shards in memory of the host, pinned part by part, without values. `close` unpins them.

    Args:
        blocks: one `host_block` per layer.
        rank, ranks: this rank, and the number of ranks.
        device: the GPU that reads the shards.
        progress: as for Offload.

    Raises:
        OSError: the system did not pin it.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        rank: int,
        ranks: int,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        sizes = [block.part(rank) for block in blocks]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self._pinned = Pinned(spans, sum(sizes), device, progress)
        super().__init__(blocks, rank, ranks, self._pinned.memory)

    def close(self) -> None:
        """Wait for running copies, unpin the memory, and free it."""
        self._pinned.close()
        self.memory = self._pinned.memory = self.memory.new_empty(0)


class _Done:
    """Stands for a finished copy: copies on a CPU end before they return."""

    def wait(self) -> None:
        pass


class HostCopies:
    """The transport of HostShards: a copy engine copies this rank's part, and an all-gather brings the other parts.

    Args:
        shards: this rank's shards.
        others: "gloo" or "nccl" over the ranks; None if there is one rank.
    """

    name = "host"

    def __init__(self, shards: HostShards, others: comm.Collective | None) -> None:
        self._shards, self._others = shards, others

    def allocate(self, size: int) -> Tensor:
        raise NotImplementedError("HostShards allocate their memory")

    def publish(self, shards: Shards) -> None:
        if self._others is not None:
            self._others.publish(shards)

    def gather(self, layer: int, out: Tensor) -> Any:
        part = self._shards.part(layer)
        target = out[self._shards.rank * part.numel() :][: part.numel()]
        target.copy_(part, non_blocking=True)
        return _Done() if self._others is None else self._others.join(target, out)

    def close(self) -> None:
        if self._others is not None:
            self._others.close()
        self._shards.close()
