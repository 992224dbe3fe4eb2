# SPDX-License-Identifier: Apache-2.0
"""Where the frozen weights of one decoder layer lie in its block of bytes. Plain values: no torch in here.

    block   | q rows | k rows | v rows | pad | o rows | pad | gate rows | up rows | pad | down rows | pad |
    ranks   |        rank 0        |        rank 1        |        rank 2        |        rank 3          |

Weights of one input lie one behind the other, as a fused layer joins them. Such a group begins at a multiple of ALIGN
bytes. The block's size is a multiple of ALIGN times the number of ranks. Rank r holds part r, which may begin inside a
weight. Two ranks that copy out of each other's memory hold whole groups instead, each about half of the block. A rank's
own weights then stay where they are, and only the other's are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

ALIGN = 128  # bytes: what TMA and 16-byte loads ask of a matrix's first byte, and a cache line


class Entry(NamedTuple):
    """One weight of 1-byte elements. `name`: its module's path in the layer; `offset`: of its first byte."""

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
        """In bytes, padding included."""
        return self.bounds[-1]

    def part(self, rank: int) -> int:
        """How many bytes a rank holds."""
        return self.bounds[rank + 1] - self.bounds[rank]


Shape = tuple[int, int]
Groups = Iterable[Sequence[tuple[str, Shape]]]


def lay_out(groups: Groups, ranks: int, align: int = ALIGN) -> Block:
    """The block of one layer, in equal parts.

    Args:
        groups: (name, [N, K]) of the weights of each input, in the order of the joined matrix.
        ranks: how many parts the block has.
        align: the parts' sizes are multiples of it, which is a multiple of ALIGN.
    """
    entries, end = _entries(groups, 0)
    part = _up(end, align * ranks) // ranks
    return Block(entries, tuple(part * r for r in range(ranks + 1)))


def lay_out_in_place(parts: Sequence[Groups]) -> Block:
    """The block of one layer, in which rank r holds the groups of `parts[r]`."""
    entries: list[Entry] = []
    bounds = [0]
    for groups in parts:
        found, end = _entries(groups, bounds[-1])
        entries += found
        bounds.append(_up(end, ALIGN))
    return Block(tuple(entries), tuple(bounds), in_place=True)


def _entries(groups: Groups, end: int) -> tuple[tuple[Entry, ...], int]:
    """The entries of groups one behind the other from offset `end` on, and the offset behind the last."""
    entries: list[Entry] = []
    for group in groups:
        end = _up(end, ALIGN)
        for name, shape in group:
            entries.append(Entry(name, shape, end))
            end = entries[-1].end
    return tuple(entries), end


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
