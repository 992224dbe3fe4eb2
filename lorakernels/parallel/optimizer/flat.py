# SPDX-License-Identifier: Apache-2.0
"""Where parameters lie in one flat vector that is cut into equal parts, one a rank.

    parameter 0   padding   parameter 1   padding   parameter 2   padding
    └──────── part 0 ────────┘└──────── part 1 ────────┘└──── part 2 ────┘

Parameters and parts begin at multiples of ALIGN. An element-wise kernel therefore cuts a rank's piece into
vectors at the same elements as the whole parameter, and computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

ALIGN = 64  # elements: 128 bytes of bf16, and a multiple of every vector of a CPU or a GPU


class Piece(NamedTuple):
    """Elements start … stop of a flattened parameter, which lie at `at` of a rank's part. It may be empty."""

    start: int
    stop: int
    at: int

    def of(self, part: Tensor) -> Tensor:
        """This piece of a rank's part, a view."""
        return part[self.at : self.at + self.stop - self.start]


class Layout(NamedTuple):
    """Where tensors lie in one flat buffer that ranks split.

    Tensor i has `counts[i]` elements, from element `offsets[i]` on. Each of `ranks` ranks has `part` elements.
    """

    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    part: int
    ranks: int

    @property
    def size(self) -> int:
        return self.part * self.ranks

    def pieces(self, rank: int) -> list[Piece]:
        """What of each parameter lies in this rank's part."""
        begin, found = rank * self.part, []
        for count, offset in zip(self.counts, self.offsets, strict=True):
            start = min(max(begin - offset, 0), count)
            stop = min(max(begin + self.part - offset, start), count)
            at = min(max(offset - begin, 0), self.part)
            found.append(Piece(start, stop, at))
        return found


def lay_out(counts: Sequence[int], ranks: int) -> Layout:
    """The layout of parameters with so many elements each."""
    offsets, end = [], 0
    for count in counts:
        offsets.append(end)
        end += _up(count, ALIGN)
    return Layout(tuple(counts), tuple(offsets), _up(end, ranks * ALIGN) // ranks, ranks)


def cut(sizes: Sequence[int], most: int) -> list[slice]:
    """Consecutive runs whose sizes add up to `most` or less; a larger one is alone."""
    found, start, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > most:
            found.append(slice(start, index))
            start, total = index, 0
        total += size
    return [*found, slice(start, len(sizes))] if sizes else []


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
