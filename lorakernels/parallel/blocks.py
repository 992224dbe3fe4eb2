# SPDX-License-Identifier: Apache-2.0
"""Where the frozen weights of one decoder layer lie in its block of bytes. Plain values: no torch in here.

    block   | q rows | k rows | v rows | pad | o rows | pad | gate rows | up rows | pad | down rows | pad |
    ranks   |        rank 0        |        rank 1        |        rank 2        |        rank 3          |

Weights of one input lie one behind the other, as a fused layer joins them. Such a group begins at a multiple of ALIGN
bytes. The block's size is a multiple of ALIGN times the number of ranks. Rank r holds part r, which may begin inside a
weight.
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
    """All entries of one layer, in the order of their offsets; `size` in bytes, padding included."""

    entries: tuple[Entry, ...]
    size: int


Shape = tuple[int, int]


def lay_out(groups: Iterable[Sequence[tuple[str, Shape]]], ranks: int, align: int = ALIGN) -> Block:
    """The block of one layer.

    Args:
        groups: (name, [N, K]) of the weights of each input, in the order of the joined matrix.
        ranks: how many parts the block has.
        align: the parts' sizes are multiples of it, which is a multiple of ALIGN.
    """
    entries: list[Entry] = []
    end = 0
    for group in groups:
        end = _up(end, ALIGN)
        for name, shape in group:
            entries.append(Entry(name, shape, end))
            end = entries[-1].end
    return Block(tuple(entries), _up(end, align * ranks))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
