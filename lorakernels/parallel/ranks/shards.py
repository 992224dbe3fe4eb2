# SPDX-License-Identifier: Apache-2.0
"""Shards: one rank's part of every block, in one allocation. They are written only while the base is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lorakernels.parallel.ranks.blocks import Block, Entry


class Shards:
    """Part `rank` of `ranks` parts of every block.

    Args:
        blocks: the blocks of all layers.
        rank, ranks: the part's index, and the number of parts.
        memory: uint8 [Shards.bytes_of(blocks, ranks)], which this object writes.
    """

    def __init__(self, blocks: Sequence[Block], rank: int, ranks: int, memory: Tensor) -> None:
        if memory.dtype != torch.uint8 or memory.shape != (self.bytes_of(blocks, ranks),):
            raise ValueError(
                f"memory must be uint8 [{self.bytes_of(blocks, ranks)}], found {memory.dtype} {list(memory.shape)}"
            )
        self.blocks, self.rank, self.ranks, self.memory = tuple(blocks), rank, ranks, memory
        parts = ([block.part(r) for block in self.blocks] for r in range(ranks))
        self._offsets = [tuple(accumulate(sizes, initial=0)) for sizes in parts]

    @staticmethod
    def bytes_of(blocks: Sequence[Block], ranks: int) -> int:
        """Bytes that the parts of `blocks` take on the rank that holds most."""
        return max(sum(block.part(r) for block in blocks) for r in range(ranks))

    def span(self, layer: int, rank: int) -> slice:
        """Where the part of block `layer` lies in the memory of `rank`."""
        return slice(self._offsets[rank][layer], self._offsets[rank][layer + 1])

    def part(self, layer: int) -> Tensor:
        """uint8: this rank's part of block `layer`."""
        return self.memory[self.span(layer, self.rank)]

    def home(self, layer: int, entry: Entry) -> Tensor | None:
        """uint8 [N · K]: the memory of a weight that lies whole in this rank's shard and is read there; else None."""
        block = self.blocks[layer]
        start, end = block.bounds[self.rank : self.rank + 2]
        if not block.in_place or not start <= entry.offset < end:
            return None
        return self.part(layer)[entry.offset - start : entry.end - start]

    def write(self, layer: int, entry: Entry, weight: Tensor) -> None:
        """Keep the bytes of `weight` that lie in this rank's part.

        Args:
            layer: the block's index.
            entry: an entry of that block.
            weight: contiguous, `entry.shape`, of 1-byte elements, on any device.

        Raises:
            ValueError: the weight's shape or dtype does not fit the entry.
        """
        if tuple(weight.shape) != entry.shape or weight.element_size() != 1:
            raise ValueError(
                f"{entry.name} must be [{entry.shape[0]}, {entry.shape[1]}] of 1-byte elements, found {weight.dtype} "
                f"{list(weight.shape)}"
            )
        part = self.part(layer)
        start = self.blocks[layer].bounds[self.rank]
        low, high = max(start, entry.offset), min(start + part.numel(), entry.end)
        if low < high:
            flat = weight.detach().contiguous().view(torch.uint8).view(-1)
            part[low - start : high - start].copy_(flat[low - entry.offset : high - entry.offset])
