# SPDX-License-Identifier: Apache-2.0
"""Pack documents into rows of T = seq_len tokens, so that documents do not see each other.

A document d of n tokens holds n − 1 predictions, with inputs d[:-1] and labels d[1:]. It is cut into pieces of at most
T inputs. A piece's last label is the next piece's first input, so every prediction is trained exactly once.

Pieces are packed by best fit, longest first. In a row each piece has its own segment number, and its positions start
at 0. Attention sees (same segment) and (not later), so a piece's logits in a row equal its logits alone. The rest of a
row is padding, with segment −1 and label −100. A token that is not trained has label −100 too; a piece of such tokens
alone is left out.

Attention kernels of variable lengths launch blocks for the longest document that they are told, and compute no query
behind it. `PackedRows.longest` is that length for all rows, so that it never changes while graphs replay. It is
computed from all data, so that it is equal on all ranks and after a resume.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
PADDING = -1
BLOCK = 128  # tokens of an attention kernel's block, the unit of `PackedRows.longest`
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class PackedBatch:
    """Rows of packed documents.

    Attributes:
        input_ids, labels, positions, segments: int64 [B, T].
        targets: number of labels that are trained.
        starts: int32 [N + 1], where each document begins in the flattened rows. A row's padding counts as documents.
            The tail is filled up with B T.
        longest: tokens that no document of `starts` has more of; None stands for T.
    """

    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    segments: Tensor
    targets: int
    starts: Tensor | None = None
    longest: int | None = None

    def checked(self) -> PackedBatch:
        """This batch, on the host.

        Raises:
            ValueError: a document has more than `longest` tokens.
        """
        if self.starts is not None and self.longest is not None:
            most = int(self.starts.diff().max())
            if most > self.longest:
                raise ValueError(
                    f"longest must be at least the tokens of each document, found {self.longest} for one of {most}"
                )
        return self

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All fields but ``targets`` and ``longest``, for a function whose calls must have equal constants."""
        return self.input_ids, self.labels, self.positions, self.segments, self.starts

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], longest: int | None = None) -> PackedBatch:
        """The reverse of ``tensors()``. ``targets`` is unknown and becomes -1."""
        input_ids, labels, positions, segments, starts = tensors
        return cls(input_ids, labels, positions, segments, -1, starts, longest)  # type: ignore[arg-type]

    def to(self, device: torch.device) -> PackedBatch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> PackedBatch:
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> PackedBatch:
        return PackedBatch(
            change(self.input_ids),
            change(self.labels),
            change(self.positions),
            change(self.segments),
            self.targets,
            None if self.starts is None else change(self.starts),
            self.longest,
        )


def cut(spans: Ints, seq_len: int) -> tuple[Ints, Ints, int]:
    """Cut documents into (start int64 [P], length int64 [P], number of documents that were split).

    ``spans`` is int64 [n_documents, 2].
    """
    inputs = np.maximum(spans[:, 1] - spans[:, 0] - 1, 0)
    counts = -(-inputs // seq_len)
    document = np.repeat(np.arange(len(spans)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offset = (np.arange(len(document)) - first) * seq_len
    starts = spans[document, 0] + offset
    lengths = np.minimum(seq_len, inputs[document] - offset)
    return starts, lengths, int((counts > 1).sum())


def pack(lengths: Sequence[int] | Ints, seq_len: int) -> list[list[int]]:
    """Rows of piece numbers. The longest piece comes first, and each goes into the fullest row that has room for it."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room left → rows
    rooms: list[int] = []  # the keys of with_room, sorted
    for piece in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[piece])
        index = bisect.bisect_left(rooms, length)
        if index == len(rooms):
            row, room = len(rows), seq_len
            rows.append([])
        else:
            room = rooms[index]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[index]
        rows[row].append(piece)
        left = room - length
        if left not in with_room:
            with_room[left] = []
            bisect.insort(rooms, left)
        with_room[left].append(row)
    return rows


def longest_of(lengths: Ints, seq_len: int) -> int:
    """The largest of `lengths`, int64 [P], rounded up to blocks, at most `seq_len`."""
    most = max(1, int(lengths.max(initial=0)))
    return min(seq_len, -(-most // BLOCK) * BLOCK)


class PackedRows:
    """Packed rows of documents. `batch` turns row numbers into a PackedBatch.

    Attributes:
        tokens: ids of all documents.
        trained: uint8 of the same length, 1 where a token is trained. None if all are.
        inputs, targets: tokens of all rows, and labels that are trained.
        split_documents, untrained_pieces: documents that were cut, and pieces that were left out.
        longest: tokens that no piece of a document has more of, rounded up to blocks. Padding is cut into such pieces.
    """

    def __init__(
        self, tokens: Any, spans: Ints, seq_len: int, pad_token: int = 0, trained: Any = None
    ) -> None:
        self.tokens, self.trained = tokens, trained
        self.seq_len, self.pad_token = seq_len, pad_token
        self.starts, self.lengths, self.split_documents = cut(spans, seq_len)
        self._labels = self._count_labels()
        kept = self._labels > 0
        self.untrained_pieces = int((~kept).sum())
        self.starts, self.lengths = self.starts[kept], self.lengths[kept]
        self._labels = self._labels[kept]
        self.rows = pack(self.lengths, seq_len)
        self.inputs, self.targets = int(self.lengths.sum()), int(self._labels.sum())
        self.longest = longest_of(self.lengths, seq_len)
        # The most documents that a row holds, pieces of padding with them.
        self.most = max(map(self._documents_of, range(len(self.rows))), default=1)

    def _count_labels(self) -> Ints:
        """How many labels of each piece are trained."""
        if self.trained is None:
            return self.lengths
        stops = self.starts + self.lengths + 1
        pieces = zip((self.starts + 1).tolist(), stops.tolist(), strict=True)
        trained = np.asarray(self.trained)  # slices of a memory map itself are slow
        counts = [np.count_nonzero(trained[start:stop]) for start, stop in pieces]
        return np.asarray(counts, dtype=np.int64)

    def _documents_of(self, number: int) -> int:
        """Pieces of documents and of padding of one row."""
        room = self.seq_len - self.inputs_of(number)
        return len(self.rows[number]) - (-room // self.longest)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fill(self) -> float:
        """Share of the packed positions that hold tokens."""
        return self.inputs / max(1, len(self) * self.seq_len)

    def inputs_of(self, number: int) -> int:
        """Tokens of one row."""
        return int(self.lengths[self.rows[number]].sum())

    def targets_of(self, number: int) -> int:
        """Labels of one row that are trained."""
        return int(self._labels[self.rows[number]].sum())

    def batch(self, numbers: Sequence[int]) -> PackedBatch:
        shape = (len(numbers), self.seq_len)
        input_ids = np.full(shape, self.pad_token, dtype=np.int64)
        labels = np.full(shape, IGNORE, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        segments = np.full(shape, PADDING, dtype=np.int64)
        starts = np.full(len(numbers) * self.most + 1, input_ids.size, dtype=np.int32)
        sequences = 0
        for i, number in enumerate(numbers):
            filled = 0
            for segment, piece in enumerate(self.rows[number]):
                start, length = int(self.starts[piece]), int(self.lengths[piece])
                window = self.tokens[start : start + length + 1]
                place = slice(filled, filled + length)
                input_ids[i, place], labels[i, place] = window[:-1], window[1:]
                if self.trained is not None:
                    untrained = self.trained[start + 1 : start + length + 1] == 0
                    labels[i, place][untrained] = IGNORE
                positions[i, place], segments[i, place] = np.arange(length), segment
                starts[sequences], sequences = i * self.seq_len + filled, sequences + 1
                filled += length
            for padding in range(filled, self.seq_len, self.longest):
                starts[sequences], sequences = i * self.seq_len + padding, sequences + 1
        targets = int((labels != IGNORE).sum())
        return PackedBatch(
            torch.from_numpy(input_ids),
            torch.from_numpy(labels),
            torch.from_numpy(positions),
            torch.from_numpy(segments),
            targets,
            torch.from_numpy(starts),
            self.longest,
        ).checked()


class RowOrder:
    """The endless order in which rows are trained: one permutation per epoch, which depends on (seed, epoch) alone.

    The rows of ``left_out`` are passed over. They are never all rows.
    """

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.left_out: frozenset[int] = frozenset()
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def take(self, position: int, count: int) -> tuple[list[int], int]:
        """`count` rows from `position` on, and the position after them."""
        rows: list[int] = []
        while len(rows) < count:
            row = self._at(position)
            position += 1
            if row not in self.left_out:
                rows.append(row)
        return rows, position

    def _at(self, place: int) -> int:
        epoch, index = divmod(place, self.rows)
        if epoch != self._epoch:
            self._order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(
                self.rows
            )
            self._epoch = epoch
        return int(self._order[index])


def spread(rows: int, limit: int) -> list[int]:
    """The numbers of ``limit`` rows (0: all), evenly spread, because the longest documents are packed first."""
    count = min(rows, limit) if limit else rows
    return [i * rows // count for i in range(count)]


def attention_mask(segments: Tensor) -> Tensor:
    """segments int64 [B, T] → mask bool [B, 1, T, T], True where query t sees key u: same segment and u ≤ t.

    Padding sees earlier padding and itself, so no row of the softmax is empty.
    """
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return (same & causal)[:, None]
