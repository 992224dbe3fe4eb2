# SPDX-License-Identifier: Apache-2.0
"""Which documents are trained and which are held out, and how often each is trained in an epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from lorakernels.train.data.tokens import Spans, TokenFile
from lorakernels.train.errors import DataError, OptionError

Bools = np.ndarray[Any, np.dtype[np.bool_]]


def hold_out(
    file: TokenFile, fraction: float, seed: int, spans: Spans | None = None
) -> tuple[Spans, Spans, str]:
    """Split into (training spans, held-out spans, a sentence about the split), by a hash of each document's tokens.

    The choice depends on content and seed, not on the order of the files. Documents of equal tokens go to one side.
    They are held out while they fit into `fraction` of all tokens. If none fits, chats or completions of one content
    are held out. For plain text, as with one big file, the end of the longest document is. `spans` None means all spans
    of `file`.

    Raises:
        DataError: there are too few tokens to hold out that fraction.
    """
    spans = file.spans if spans is None else spans
    if fraction == 0:
        return spans, spans[:0], "no document held out for validation"
    lengths = spans[:, 1] - spans[:, 0]
    target = fraction * int(lengths.sum())
    groups = _groups(file, spans, seed)
    held = np.zeros(len(spans), dtype=bool)
    room, left = target, len(groups)
    for group in groups:
        size = int(lengths[group].sum())
        if size <= room and left > 1:
            held[group] = True
            room, left = room - size, left - 1
    if not held.any() and file.whole.any():
        held[_fewest_whole(file, spans, groups)] = True
    if held.any():
        return spans[~held], spans[held], f"{int(held.sum())} of {len(spans)} documents held out"
    return _hold_out_end(spans, groups, fraction)


def _fewest_whole(file: TokenFile, spans: Spans, groups: Sequence[list[int]]) -> list[int]:
    if len(groups) < 2:
        what = (
            "one document"
            if len(spans) < 2
            else f"{len(spans)} documents that are all equal up to seq_len"
        )
        raise DataError(
            f"the data is {what}, of which no part can be held out: give --eval-data FILE or --eval-fraction 0"
        )
    whole = file.whole[documents_of(file, spans)]
    return min((group for group in groups if whole[group[0]]), key=len)


def _hold_out_end(
    spans: Spans, groups: Sequence[list[int]], fraction: float
) -> tuple[Spans, Spans, str]:
    """Hold out the end of the longest document, also of others that equal it."""
    lengths = spans[:, 1] - spans[:, 0]
    longest = int(lengths.argmax())
    (equal,) = (group for group in groups if longest in group)
    tokens = int(lengths.sum())
    tail = max(2, round(fraction * tokens / len(equal)))
    if lengths[longest] - tail < 2:
        raise DataError(f"{tokens} tokens are too few to hold {fraction:g} of them out")
    train = spans.copy()
    train[equal, 1] -= tail
    held = np.array([[train[longest, 1], spans[longest, 1]]], dtype=np.int64)
    return train, held, f"the last {tail} tokens of the longest document held out"


def _keys(file: TokenFile, spans: Spans, seed: int = 0) -> list[bytes]:
    salt = seed.to_bytes(8, "little")
    return [
        hashlib.blake2b(file.tokens[start:stop].tobytes(), digest_size=8, key=salt).digest()
        for start, stop in spans
    ]


def _groups(file: TokenFile, spans: Spans, seed: int) -> list[list[int]]:
    """The numbers of spans, in the order of their hashes. Spans with equal tokens are grouped together."""
    keys = _keys(file, spans, seed)
    groups: dict[bytes, list[int]] = {}
    for number in sorted(range(len(keys)), key=keys.__getitem__):
        groups.setdefault(keys[number], []).append(number)
    return list(groups.values())


def repeated(file: TokenFile, spans: Spans, others: TokenFile, held: Spans) -> int:
    """How many of the `held` spans of `others` have the tokens of one of the `spans` of `file`."""
    keys = set(_keys(file, spans))
    return sum(key in keys for key in _keys(others, held))


def documents_of(file: TokenFile, spans: Spans) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64 [n]: the number of the document that each span is of."""
    return np.searchsorted(file.docs, spans[:, 0].astype(np.uint64), side="right") - 1


def weighted(file: TokenFile, spans: Spans, weights: Sequence[float], seed: int) -> Spans:
    """The spans of an epoch: the tokens of each entry of --data as many times as its weight says.

    Of the part of a weight after the point, that share of the entry's tokens is taken, from documents that are chosen
    by hash. Of plain text the last one is cut. Chats and completions are taken as a whole: the last one, if that comes
    closer to the share. No weights mean one each.

    Raises:
        OptionError: the share is less than one chat or completion, or less than two tokens.
    """
    if not weights:
        return spans
    documents = documents_of(file, spans)
    entries, whole = file.entries[documents], file.whole[documents]
    order = np.asarray([n for group in _groups(file, spans, seed) for n in group], dtype=np.int64)
    parts = []
    for entry, weight in enumerate(weights):
        chosen = order[entries[order] == entry]
        times = int(weight)
        parts += [spans[chosen]] * times
        if len(chosen) and weight > times:
            part = _share(spans[chosen], whole[chosen], weight - times)
            if not len(part):
                name = next(counts.name for counts in file.files if counts.entry == entry)
                raise OptionError(
                    f"data_weights: {weight - times:g} of the {len(chosen):,} documents of {name} is less than one "
                    "chat or completion, or than two tokens of plain text: give more data, or a whole number for "
                    f"{weight:g}"
                )
            parts.append(part)
    made = np.concatenate([spans[:0], *parts])
    return made[np.argsort(made[:, 0], kind="stable")]


def _share(spans: Spans, whole: Bools, share: float) -> Spans:
    """Spans in their order until they have that share of all tokens. Empty if that is less than one can be taken."""
    if whole.all() and share * len(spans) < 1:
        return spans[:0]
    lengths = spans[:, 1] - spans[:, 0]
    target = share * int(lengths.sum())
    ends = lengths.cumsum()
    last = int(np.searchsorted(ends, target))
    taken = spans[: last + 1].copy()
    more = round(target) - int(ends[last] - lengths[last])
    if whole[last]:
        return taken if 2 * more >= lengths[last] or not last else taken[:last]
    taken[last, 1] = taken[last, 0] + more
    return taken if more >= 2 else taken[:last]


def truncated(file: TokenFile, spans: Spans, seq_len: int) -> Spans:
    """The spans with every chat and completion cut after `seq_len` predictions.

    Their rest would lack what it answers. Plain text is not cut here; packing splits it.
    """
    whole = file.whole[documents_of(file, spans)]
    stops = np.where(whole, spans[:, 0] + seq_len + 1, spans[:, 1])
    return np.stack([spans[:, 0], np.minimum(stops, spans[:, 1])], axis=1)
