# SPDX-License-Identifier: Apache-2.0
"""Where the frozen weights of a base are kept: some on the GPUs, some in the hosts' memory.

A store has blocks, shards, a transport and slots of its own. The base over several ranks has a store on the GPUs, and
with offload another one in pinned memory. On one rank with offload only the latter exists: what stays on the GPU is
left where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lorakernels.parallel.base.layers import groups_of
from lorakernels.parallel.base.offload import (
    Group,
    HostCopies,
    HostShards,
    Offload,
    check_room,
    divide,
    host_block,
)
from lorakernels.parallel.base.slots import Slots
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.blocks import Block, Entry, Shape, lay_out, lay_out_in_place
from lorakernels.parallel.ranks.shards import Shards


class Place(NamedTuple):
    """This rank among those that share a base. `group` is None for a process alone."""

    group: Any
    rank: int
    ranks: int
    device: torch.device

    @classmethod
    def of(cls, mesh: Any, device: torch.device) -> Place:
        """The place of this process in a mesh with one axis; alone if `mesh` is None."""
        if mesh is None:
            return cls(None, 0, 1, device)
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size(), device)


class Layout(NamedTuple):
    """{path: decoder layer}, the blocks that stay on the GPUs, and the blocks that go to the host.

    There may be none of either.
    `groups` has the weights of each of the near blocks, by the input that they share.
    """

    layers: dict[str, nn.Module]
    near: list[Block]
    far: list[Block]
    groups: list[list[Group]]


def lay_out_base(
    layers: dict[str, nn.Module],
    shapes: Callable[[str, nn.Module], Mapping[str, Shape]],
    ranks: int,
    fraction: float,
) -> Layout:
    """The blocks of all layers.

    Args:
        layers: {path: decoder layer}.
        shapes: gives {path in the layer: [N, K]} of a layer's weights, by the layer's path and module.
        ranks: how many share the base.
        fraction: of each layer's bytes that goes to the host, at least.

    Raises:
        ValueError: all of a layer would go to the host.
    """
    divided = [divide(groups_of(m, shapes(path, m)), fraction) for path, m in layers.items()]
    shared = ranks > 1 or not fraction
    near = [lay_out(stay, ranks) for stay, _ in divided] if shared else []
    far = [host_block(there, ranks) for _, there in divided] if fraction else []
    return Layout(layers, near, far, [stay for stay, _ in divided] if near else [])


def in_place(groups: list[list[Group]]) -> list[Block]:
    """Blocks over two ranks, each of which holds whole groups. A layer with a single group gets none.

    The larger part of a layer's bytes goes to one rank and then to the other, layer by layer.
    """
    if min(map(len, groups)) < 2:
        return []
    parts = [divide(of_layer, 0.5) for of_layer in groups]
    return [lay_out_in_place(both[:: -1 if i % 2 else 1]) for i, both in enumerate(parts)]


@dataclass(eq=False)
class Store:
    """Shards, how their parts come together, and the slots on `device`.

    Attributes:
        reason: why `transport` is used.
        further: how many slots there are, and how many layers ahead gathers start, beyond what was asked.
    """

    shards: Shards
    transport: comm.Transport
    reason: str
    device: torch.device
    further: int = 0
    slots: Slots = field(init=False)

    def open(self, slots: int, prefetch: int) -> None:
        """Make the slots."""
        sizes = [block.size for block in self.shards.blocks]
        count = min(slots + self.further, len(sizes))
        ahead = min(prefetch + self.further, count - 1)
        self.slots = Slots(sizes, count, ahead, self.transport, self.device)

    def entries(self, layer: int) -> tuple[Entry, ...]:
        """The entries of the weights of `layer` that are kept here."""
        return self.shards.blocks[layer].entries

    def discard(self) -> None:
        """Give pinned memory back, of a base that is not finished."""
        if isinstance(self.shards, HostShards):
            self.shards.close()

    def __str__(self) -> str:
        n, layers = self.shards.ranks, len(self.shards.blocks)
        whole, part = sum(block.size for block in self.shards.blocks), self.shards.memory.numel()
        still = ", a rank's own weights in place" if self.shards.blocks[0].in_place else ""
        return (
            f"{layers} layers of {whole:,} bytes of frozen weights over {n} ranks: {part:,} bytes a rank, and "
            f"{self.slots.memory.numel():,} in {len(self.slots.memory)} slots\n"
            f"transport {self.transport.name}{still}: {self.reason}"
        )


def allocate(
    place: Place, layout: Layout, offload: Offload, chosen: tuple[str, str]
) -> list[Store]:
    """Collective: the stores of a base, without values and slots.

    Args:
        place: this rank.
        layout: the same on all ranks.
        offload: how memory is pinned.
        chosen: (name of the transport, why).

    Raises:
        ValueError, RuntimeError, OSError: a rank lacks memory. Every rank raises, and nothing stays pinned.
    """
    name, reason = chosen
    stores: list[Store] = []
    try:
        if layout.near:
            transport = comm.make(name, place.group, place.device)
            # with more ranks, the parts would differ too much in size
            two = name == "peer" and place.ranks == 2
            blocks = (in_place(layout.groups) if two else []) or layout.near
            with comm.together(place.group):  # one rank's GPU may be full
                memory = transport.allocate(Shards.bytes_of(blocks, place.ranks))
            shards = Shards(blocks, place.rank, place.ranks, memory)
            stores.append(Store(shards, transport, reason, place.device))
        if layout.far:
            stores.append(_far(place, layout, offload))
    except BaseException:
        discard(stores)
        raise
    return stores


def discard(stores: list[Store]) -> None:
    """Give back what unfinished stores have pinned."""
    for store in stores:
        store.discard()


def _far(place: Place, layout: Layout, offload: Offload) -> Store:
    others, reason = None, "pinned memory, copied by this rank"
    if place.ranks > 1:
        name = "nccl" if place.device.type == "cuda" else "gloo"
        others = comm.Collective(name, place.group, place.device)
        reason = f"pinned memory; each rank copies its part, and {name} gathers the others'"
    shards: HostShards | None = None
    try:
        with comm.together(place.group):  # before one of them takes memory
            check_room(layout.far, place.ranks, offload)
        with comm.together(place.group):
            shards = HostShards(layout.far, place[1:3], place.device, offload.progress)
        return Store(shards, HostCopies(shards, others), reason, place.device, further=1)
    except BaseException:
        if shards is not None:  # another rank failed
            shards.close()
        raise


def write(stores: list[Store], layer: int, name: str, weight: Tensor) -> None:
    """Keep this rank's part of one weight, e4m3 or uint8 [N, K], if a store has it."""
    for store in stores:
        for entry in store.entries(layer):
            if entry.name == name:
                store.shards.write(layer, entry, weight)
