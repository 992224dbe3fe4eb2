# SPDX-License-Identifier: Apache-2.0
"""The layout of parameters in one flat vector, which is cut into equal parts, one per rank.

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
    """Elements start … stop of a flattened parameter. They begin at `offset` in a rank's part. It may be empty."""

    start: int
    stop: int
    offset: int

    def of(self, part: Tensor) -> Tensor:
        """This piece as a view of a rank's part."""
        return part[self.offset : self.offset + self.stop - self.start]


class FlatLayout(NamedTuple):
    """The layout of tensors in one flat buffer that ranks split.

    Tensor i has `counts[i]` elements, which begin at element `offsets[i]`. Each of `ranks` ranks has `part` elements.
    """

    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    part: int
    ranks: int

    @property
    def size(self) -> int:
        return self.part * self.ranks

    def pieces(self, rank: int) -> list[Piece]:
        """For each parameter, its piece in this rank's part."""
        begin, pieces = rank * self.part, []
        for count, offset in zip(self.counts, self.offsets, strict=True):
            start = min(max(begin - offset, 0), count)
            stop = min(max(begin + self.part - offset, start), count)
            pieces.append(Piece(start, stop, min(max(offset - begin, 0), self.part)))
        return pieces


def lay_out(counts: Sequence[int], ranks: int) -> FlatLayout:
    """The layout of parameters. `counts`: the number of elements of each."""
    offsets, end = [], 0
    for count in counts:
        offsets.append(end)
        end += _up(count, ALIGN)
    return FlatLayout(tuple(counts), tuple(offsets), _up(end, ranks * ALIGN) // ranks, ranks)


def cut(sizes: Sequence[int], most: int) -> list[slice]:
    """Slices of `sizes` that add up to `most` or less each. A single size may be larger."""
    runs, start, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > most:
            runs.append(slice(start, index))
            start, total = index, 0
        total += size
    return [*runs, slice(start, len(sizes))] if sizes else []


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
