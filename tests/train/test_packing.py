# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakernels.train.data.packing import (
    IGNORE,
    PackedBatch,
    PackedRows,
    RowOrder,
    attention_mask,
    pack,
)
from lorakernels.train.model.model import decoder_and_head, hidden_states, load_model


def rows_of(lengths: list[int], seq_len: int) -> PackedRows:
    """Documents whose token values are all different."""
    stops = np.cumsum(lengths)
    spans = np.stack([stops - lengths, stops], axis=1).astype(np.int64)
    return PackedRows(np.arange(int(stops[-1]), dtype=np.uint32), spans, seq_len)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 16))
def test_every_prediction_is_trained_exactly_once(lengths: list[int], seq_len: int) -> None:
    rows = rows_of(lengths, seq_len)
    found = []
    for number in range(len(rows)):
        batch = rows.batch([number])
        kept = batch.labels != IGNORE
        assert batch.targets == int(kept.sum())
        for segment in range(int(batch.segments.max()) + 1):
            own = batch.segments == segment
            assert batch.positions[own].tolist() == list(range(int(own.sum())))
            assert bool(kept[own].all())
        found += list(zip(batch.input_ids[kept].tolist(), batch.labels[kept].tolist(), strict=True))
    stops = np.cumsum(lengths)
    expected = [
        (t, t + 1)
        for stop, n in zip(stops, lengths, strict=True)
        for t in range(stop - n, stop - 1)
    ]
    assert sorted(found) == expected
    assert rows.split_documents == sum(n - 1 > seq_len for n in lengths)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=2, max_size=30), st.integers(1, 16))
def test_starts_say_what_segments_say(lengths: list[int], seq_len: int) -> None:
    """The mask built from them is the segments' mask, across rows too; as many numbers for every batch of a size."""
    rows = rows_of(lengths, seq_len)
    sizes = set()
    for first in range(len(rows) - 1):
        batch = rows.batch([first, first + 1])
        assert batch.starts is not None and batch.starts.dtype == torch.int32
        sizes.add(len(batch.starts))
        starts = batch.starts.long()
        assert starts[0] == 0 and starts[-1] == 2 * seq_len and bool((starts.diff() >= 0).all())
        document = torch.searchsorted(starts, torch.arange(2 * seq_len), right=True)
        same = document[:, None] == document[None, :]
        apart = torch.block_diag(*(attention_mask(batch.segments)[:, 0].float())) > 0
        assert torch.equal(same.tril(), apart)
    assert len(sizes) <= 1
    assert all(rows.targets_of(n) == rows.batch([n]).targets for n in range(len(rows)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 16), max_size=60))
def test_pack_places_each_piece_and_leaves_no_two_half_empty_rows(lengths: list[int]) -> None:
    rows = pack(lengths, 16)
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
    filled = [sum(lengths[piece] for piece in row) for row in rows]
    assert all(total <= 16 for total in filled)
    assert sum(2 * total <= 16 for total in filled) <= 1


def test_mask_is_block_diagonal_causal_and_never_empty() -> None:
    mask = attention_mask(torch.tensor([[0, 0, 1, -1, -1]]))[0, 0]
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    assert mask.int().tolist() == expected


def test_logits_in_a_pack_are_the_logits_alone(model_dir: Path) -> None:
    """Documents of 5, 17 and 10 tokens in one row of 40, padding included; another row beside it."""
    model = load_model(model_dir, torch.float32, torch.device("cpu")).eval()
    _, head = decoder_and_head(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (35 + 40,), generator=generator).numpy().astype(np.uint32)
    spans = np.array([[0, 6], [6, 24], [24, 35], [35, 75]], dtype=np.int64)
    rows = PackedRows(tokens, spans, 40)
    assert [len(row) for row in rows.rows] == [1, 3]
    batch = rows.batch([1, 0])
    with torch.no_grad():
        packed = head(hidden_states(model, batch))
        at = 0
        for piece in rows.rows[1]:
            start, length = int(rows.starts[piece]), int(rows.lengths[piece])
            ids = torch.from_numpy(tokens[start : start + length].astype(np.int64))[None]
            alone = model(input_ids=ids).logits[0]
            found = packed[0, at : at + length]
            # fp32 sums in another order: a few ulp of the largest logit
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-5 * float(alone.abs().max()))
            assert not torch.allclose(packed[0, at], packed[1, at]), "the test can fail"
            at += length
        assert packed.isfinite().all()


def test_row_order_is_a_permutation_per_epoch_from_any_position() -> None:
    order = RowOrder(7, seed=5)
    first, second = order.take(0, 7)[0], order.take(7, 7)[0]
    assert sorted(first) == sorted(second) == list(range(7)) and first != second
    assert RowOrder(7, seed=5).take(5, 4)[0] == (first + second)[5:9]
    assert RowOrder(7, seed=6).take(0, 7)[0] not in (first, second), "a seed is not another's epoch"


def test_batch_moves_and_keeps_its_count() -> None:
    batch = rows_of([4, 9], 8).batch([0])
    assert (
        isinstance(batch.to(torch.device("cpu")), PackedBatch)
        and batch.to(torch.device("cpu")).targets == batch.targets
    )
