# SPDX-License-Identifier: Apache-2.0
"""Where the frozen weights of one decoder layer lie in its block of bytes. This file does not import torch.

    block   | q rows | k rows | v rows | pad | o rows | pad | gate rows | up rows | pad | down rows | pad |
    ranks   |        rank 0        |        rank 1        |        rank 2        |        rank 3          |

Weights that multiply the same input lie one behind the other, as a fused layer joins them. Such a group begins at a
multiple of ALIGN bytes. The block's size is a multiple of ALIGN times the number of ranks. Rank r holds part r, which
may begin inside a weight. Two ranks that copy out of each other's memory hold whole groups instead, each about half of
the block. Then a rank reads its own weights where they are, and copies only the other rank's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

ALIGN = 128  # bytes: a cache line; enough for TMA and for 16-byte loads


class Entry(NamedTuple):
    """One weight of 1-byte elements. `name`: its module's path in the layer; `offset`: where its first byte lies."""

    name: str
    shape: tuple[int, int]
    offset: int

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.offset + self.shape[0] * self.shape[1]


class Block(NamedTuple):
    """All entries of one layer, in the order of their offsets.

    Attributes:
        bounds: rank r holds the bytes from `bounds[r]` to `bounds[r + 1]`, padding included.
        in_place: no weight crosses a bound, and a rank's own weights are read where the rank holds them.
    """

    entries: tuple[Entry, ...]
    bounds: tuple[int, ...]
    in_place: bool = False

    @property
    def size(self) -> int:
        """Bytes of the block, padding included."""
        return self.bounds[-1]

    def part(self, rank: int) -> int:
        """How many bytes a rank holds."""
        return self.bounds[rank + 1] - self.bounds[rank]


Shape = tuple[int, int]
WeightGroups = Iterable[Sequence[tuple[str, Shape]]]


def lay_out(groups: WeightGroups, ranks: int, align: int = ALIGN) -> Block:
    """The block of one layer, in equal parts.

    Args:
        groups: for each input, (name, [N, K]) of the weights that multiply it, in the order of the joined matrix.
        ranks: how many parts the block has.
        align: each part's size is a multiple of it. It must be a multiple of ALIGN.
    """
    entries, end = _entries(groups, 0)
    part = _up(end, align * ranks) // ranks
    return Block(entries, tuple(part * r for r in range(ranks + 1)))


def lay_out_in_place(parts: Sequence[WeightGroups]) -> Block:
    """The block of one layer, in which rank r holds the groups of `parts[r]`."""
    entries: list[Entry] = []
    bounds = [0]
    for groups in parts:
        part, end = _entries(groups, bounds[-1])
        entries += part
        bounds.append(_up(end, ALIGN))
    return Block(tuple(entries), tuple(bounds), in_place=True)


def _entries(groups: WeightGroups, end: int) -> tuple[tuple[Entry, ...], int]:
    """The entries of consecutive groups, the first at offset `end`, and the offset behind the last entry."""
    entries: list[Entry] = []
    for group in groups:
        end = _up(end, ALIGN)
        for name, shape in group:
            entries.append(Entry(name, shape, end))
            end = entries[-1].end
    return tuple(entries), end


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
