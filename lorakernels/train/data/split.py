# SPDX-License-Identifier: Apache-2.0
"""Which documents are trained and which are held out, and how often each is trained in an epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from lorakernels.train.data.tokens import Spans, TokenFile
from lorakernels.train.errors import DataError


def hold_out(file: TokenFile, fraction: float, seed: int) -> tuple[Spans, Spans, str]:
    """Split into (training spans, held-out spans, a sentence about the split), by a hash of each document's tokens.

    The choice depends on content and seed, not on the order of the files. Documents are held out while they fit into
    `fraction` of all tokens. If none fits, one chat or completion is held out, or of plain text, as with one big file,
    the end of the longest document.

    Raises:
        DataError: there are too few tokens to hold out that fraction.
    """
    spans = file.spans
    if fraction == 0:
        return spans, spans[:0], "nothing held out"
    lengths = spans[:, 1] - spans[:, 0]
    target = fraction * int(lengths.sum())
    held = np.zeros(len(spans), dtype=bool)
    room = target
    order = _by_hash(file, spans, seed)
    for index in order:
        if lengths[index] <= room and held.sum() < len(spans) - 1:
            held[index] = True
            room -= int(lengths[index])
    if not held.any() and file.whole.any():
        held[_first_whole(file, order)] = True
    if held.any():
        return spans[~held], spans[held], f"{int(held.sum())} of {len(spans)} documents held out"
    return _hold_out_end(spans, fraction, target)


def _first_whole(file: TokenFile, order: Sequence[int]) -> int:
    if len(order) < 2:
        raise DataError(
            "the data is one document, of which no part can be held out: give --eval-data FILE or --eval-fraction 0"
        )
    return next(index for index in order if file.whole[index])


def _hold_out_end(spans: Spans, fraction: float, target: float) -> tuple[Spans, Spans, str]:
    """Hold out the end of the longest document."""
    lengths = spans[:, 1] - spans[:, 0]
    longest = int(lengths.argmax())
    cut = int(spans[longest, 1]) - max(2, round(target))
    if cut - int(spans[longest, 0]) < 2:
        raise DataError(f"{int(lengths.sum())} tokens are too few to hold {fraction:g} of them out")
    train = spans.copy()
    train[longest, 1] = cut
    tail = np.array([[cut, spans[longest, 1]]], dtype=np.int64)
    return (
        train,
        tail,
        f"the last {int(spans[longest, 1]) - cut} tokens of the longest document held out",
    )


def _by_hash(file: TokenFile, spans: Spans, seed: int) -> list[int]:
    salt = seed.to_bytes(8, "little")
    keys = [
        hashlib.blake2b(file.tokens[start:stop].tobytes(), digest_size=8, key=salt).digest()
        for start, stop in spans
    ]
    return sorted(range(len(keys)), key=keys.__getitem__)


def weighted(file: TokenFile, spans: Spans, weights: Sequence[float], seed: int) -> Spans:
    """The spans of an epoch: each document as many times as the weight of its entry in --data says.

    Of the part of a weight after the point, that share of the entry's documents is taken, chosen by hash. No weights
    mean one each.
    """
    if not weights:
        return spans
    documents = np.searchsorted(file.docs, spans[:, 0].astype(np.uint64), side="right") - 1
    weight = np.asarray(weights, dtype=np.float64)[file.entries[documents]]
    times = weight.astype(np.int64)
    order = np.asarray(_by_hash(file, spans, seed), dtype=np.int64)
    for value in np.unique(weight):
        chosen = order[weight[order] == value]
        times[chosen[: round((value - int(value)) * len(chosen))]] += 1
    return np.repeat(spans, times, axis=0)


def truncated(file: TokenFile, spans: Spans, seq_len: int) -> tuple[Spans, int]:
    """The spans with every chat and completion cut after `seq_len` predictions, and how many were cut.

    Their rest would lack what it answers. Plain text is not cut here; packing splits it.
    """
    documents = np.searchsorted(file.docs, spans[:, 0].astype(np.uint64), side="right") - 1
    stops = np.where(file.whole[documents], spans[:, 0] + seq_len + 1, spans[:, 1])
    stops = np.minimum(stops, spans[:, 1])
    return np.stack([spans[:, 0], stops], axis=1), int((stops < spans[:, 1]).sum())
