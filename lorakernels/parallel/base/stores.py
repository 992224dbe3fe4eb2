# SPDX-License-Identifier: Apache-2.0
"""Stores of a base's frozen weights: one on the GPUs, and with offload one in pinned host memory.

Each store has blocks, shards, a transport and memory slots of its own. A base on one rank with offload has only the
store in host memory: the other weights stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lorakernels.parallel.base.layers import groups_of
from lorakernels.parallel.base.offload import (
    HostCopies,
    HostShards,
    Offload,
    WeightGroup,
    check_room,
    divide,
    host_block,
)
from lorakernels.parallel.base.slots import Slots
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.blocks import Block, Entry, Shape, lay_out, lay_out_in_place
from lorakernels.parallel.ranks.shards import Shards


class Member(NamedTuple):
    """This rank, as a member of the group that shares a base. `group` is None for a single process."""

    group: Any
    rank: int
    ranks: int
    device: torch.device

    @classmethod
    def of(cls, mesh: Any, device: torch.device) -> Member:
        """This process as a member of a mesh with one axis; a single process if `mesh` is None."""
        if mesh is None:
            return cls(None, 0, 1, device)
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size(), device)


class BaseLayout(NamedTuple):
    """Which weights of a base lie on the GPUs, and which in host memory.

    Attributes:
        layers: {path: decoder layer}.
        on_gpu: one block per layer, or empty.
        on_host: one block per layer, or empty.
        groups: for each block of `on_gpu`, its weights grouped by the input that they multiply.
    """

    layers: dict[str, nn.Module]
    on_gpu: list[Block]
    on_host: list[Block]
    groups: list[list[WeightGroup]]


def lay_out_base(
    layers: dict[str, nn.Module],
    shapes: Callable[[str, nn.Module], Mapping[str, Shape]],
    ranks: int,
    fraction: float,
) -> BaseLayout:
    """The blocks of all layers.

    Args:
        layers: {path: decoder layer}.
        shapes: returns {path in the layer: [N, K]} of the weights, for a layer's path and module.
        ranks: the number of ranks that share the base.
        fraction: the least fraction of each layer's bytes that goes to the host.

    Raises:
        ValueError: all of a layer would go to the host.
    """
    divided = [divide(groups_of(m, shapes(path, m)), fraction) for path, m in layers.items()]
    shared = ranks > 1 or not fraction
    on_gpu = [lay_out(stay, ranks) for stay, _ in divided] if shared else []
    on_host = [host_block(leave, ranks) for _, leave in divided] if fraction else []
    return BaseLayout(layers, on_gpu, on_host, [stay for stay, _ in divided] if on_gpu else [])


def in_place(groups: list[list[WeightGroup]]) -> list[Block]:
    """Blocks over two ranks, each of which holds whole groups. Empty if a layer has a single group.

    The larger part goes to rank 0 in even layers, and to rank 1 in odd layers.
    """
    if min(map(len, groups)) < 2:
        return []
    parts = [divide(of_layer, 0.5) for of_layer in groups]
    return [lay_out_in_place(both[:: -1 if i % 2 else 1]) for i, both in enumerate(parts)]


@dataclass(eq=False)
class Store:
    """Shards, the transport that gathers them, and the memory slots on `device`.

    Attributes:
        reason: why `transport` was chosen.
        further: this store has so many memory slots more than requested, and prefetches so many layers more.
    """

    shards: Shards
    transport: comm.Transport
    reason: str
    device: torch.device
    further: int = 0
    slots: Slots = field(init=False)

    def open(self, slots: int, prefetch: int) -> None:
        """Allocate the memory slots."""
        sizes = [block.size for block in self.shards.blocks]
        count = min(slots + self.further, len(sizes))
        ahead = min(prefetch + self.further, count - 1)
        self.slots = Slots(sizes, count, ahead, self.transport, self.device)

    def entries(self, layer: int) -> tuple[Entry, ...]:
        """The entries of the weights of `layer` that are kept here."""
        return self.shards.blocks[layer].entries

    def discard(self) -> None:
        """Free pinned memory. For a base that could not be finished."""
        if isinstance(self.shards, HostShards):
            self.shards.close()

    def __str__(self) -> str:
        n, layers = self.shards.ranks, len(self.shards.blocks)
        whole, part = sum(block.size for block in self.shards.blocks), self.shards.memory.numel()
        in_place = ", a rank's own weights in place" if self.shards.blocks[0].in_place else ""
        return (
            f"{layers} layers of {whole:,} bytes of frozen weights over {n} ranks: {part:,} bytes a rank, and "
            f"{self.slots.memory.numel():,} in {len(self.slots.memory)} memory slots\n"
            f"transport {self.transport.name}{in_place}: {self.reason}"
        )


def allocate(
    member: Member, layout: BaseLayout, offload: Offload, chosen: tuple[str, str]
) -> list[Store]:
    """Collective: the stores of a base, without values and memory slots.

    Args:
        member: this rank.
        layout: the same on all ranks.
        offload: how memory is pinned.
        chosen: (name of the transport, the reason for messages).

    Raises:
        ValueError, RuntimeError, OSError: a rank lacks memory. Every rank raises, and nothing stays pinned.
    """
    name, reason = chosen
    stores: list[Store] = []
    try:
        if layout.on_gpu:
            transport = comm.make(name, member.group, member.device)
            # with more ranks, the parts would differ too much in size
            two = name == "peer" and member.ranks == 2
            blocks = (in_place(layout.groups) if two else []) or layout.on_gpu
            with comm.together(member.group):  # one rank's GPU may be full
                memory = transport.allocate(Shards.bytes_of(blocks, member.ranks))
            shards = Shards(blocks, member.rank, member.ranks, memory)
            stores.append(Store(shards, transport, reason, member.device))
        if layout.on_host:
            stores.append(_host_store(member, layout, offload))
    except BaseException:
        discard(stores)
        raise
    return stores


def discard(stores: list[Store]) -> None:
    """Free the pinned memory of unfinished stores."""
    for store in stores:
        store.discard()


def _host_store(member: Member, layout: BaseLayout, offload: Offload) -> Store:
    group, rank, ranks, device = member
    others, reason = None, "pinned memory, copied by this rank"
    if ranks > 1:
        name = "nccl" if device.type == "cuda" else "gloo"
        others = comm.Collective(name, group, device)
        reason = f"pinned memory; each rank copies its part, and {name} gathers the others'"
    shards: HostShards | None = None
    try:
        with comm.together(group):  # before any rank allocates
            check_room(layout.on_host, ranks, offload)
        with comm.together(group):
            shards = HostShards(layout.on_host, rank, ranks, device, offload.progress)
        return Store(shards, HostCopies(shards, others), reason, device, further=1)
    except BaseException:
        if shards is not None:  # another rank failed
            shards.close()
        raise


def write(stores: list[Store], layer: int, name: str, weight: Tensor) -> None:
    """Write this rank's part of one weight, e4m3 or uint8 [N, K], to the store that has it, if any."""
    for store in stores:
        for entry in store.entries(layer):
            if entry.name == name:
                store.shards.write(layer, entry, weight)
