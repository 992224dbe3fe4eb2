# SPDX-License-Identifier: Apache-2.0
"""What attention is told of the longest document: no document and no padding exceeds it, and no number follows it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lorakernels.autograd.attention import choose as attention
from lorakernels.train.data import packing
from lorakernels.train.data.packing import PADDING, PackedBatch, PackedRows, RowOrder, longest_of
from lorakernels.train.data.prepare import RunData, check_rows
from lorakernels.train.errors import DataError
from lorakernels.train.jobs import JobRows
from lorakernels.train.model import model as models
from lorakernels.train.model.model import hidden_states, mean_loss
from lorakernels.train.run.session import Session
from tests.fusion.fused_models import difference
from tests.train.alike import TURNED_GRADIENTS, check_gradients, check_losses
from tests.train.replays import assert_same, records, trained
from tests.train.test_ranks import losses, on_ranks

Cli = Callable[..., int]


@pytest.fixture
def blocks_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BLOCK", 3)


def rows_of(lengths: list[int], seq_len: int) -> PackedRows:
    """Rows of documents with so many inputs."""
    stops = np.cumsum([n + 1 for n in lengths])
    spans = np.stack([stops - [n + 1 for n in lengths], stops], 1).astype(np.int64)
    text = (b"the quick brown fox jumps over the lazy dog; " * 40)[: int(stops[-1])]
    return PackedRows(np.frombuffer(text, dtype=np.uint8), spans, seq_len)


def told_the_row(batch: PackedBatch) -> PackedBatch:
    """The batch as one with padding in one piece, where attention is told the length of a row."""
    rows, length = batch.segments.shape
    first = torch.ones(rows, length, dtype=torch.bool)
    first[:, 1:] = batch.segments[:, 1:] != batch.segments[:, :-1]
    starts = torch.cat([first.flatten().nonzero().flatten(), torch.tensor([rows * length])])
    return replace(batch, starts=starts.int(), longest=None)


@pytest.mark.parametrize(
    ("lengths", "seq_len", "expected"),
    [
        ([], 4096, 128),
        ([1, 128], 4096, 128),
        ([129, 5], 4096, 256),
        ([3969], 4096, 4096),
        ([129], 200, 200),
        ([7], 100, 100),
    ],
    ids=["none", "a block", "one more", "the last block", "a short row", "less than a block"],
)
def test_the_longest_is_rounded_up_to_blocks(
    lengths: list[int], seq_len: int, expected: int
) -> None:
    assert longest_of(np.asarray(lengths, dtype=np.int64), seq_len) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=2, max_size=30), st.integers(1, 24), st.integers(1, 9))
def test_no_piece_of_documents_or_padding_is_longer(
    lengths: list[int], seq_len: int, block: int
) -> None:
    """Also of documents that are longer than a row. Where documents begin is said as before, padding apart."""
    with mock.patch.object(packing, "BLOCK", block):
        rows = rows_of([n - 1 for n in lengths], seq_len)
    most = min(seq_len, max(lengths) - 1)
    assert most <= rows.longest <= min(seq_len, most + block - 1)
    sizes = set()
    for first in range(len(rows) - 1):
        batch = rows.batch([first, first + 1])
        assert batch.starts is not None and batch.longest == rows.longest
        found = batch.starts.tolist()
        sizes.add(len(found))
        assert found[0] == 0 and found[-1] == 2 * seq_len and found == sorted(found)
        assert int(batch.starts.diff().max()) <= rows.longest
        before = told_the_row(batch).starts
        assert before is not None and {*before.tolist()} <= {*found}
        added = sorted({*found} - {*before.tolist()})
        assert bool((batch.segments.flatten()[added] == PADDING).all())
    assert len(sizes) <= 1, "graphs need equal shapes"


def test_a_longer_document_is_refused() -> None:
    rows = rows_of([9, 4], 16)
    batch = rows.batch([0])
    rows.longest = 8
    with pytest.raises(ValueError, match="the tokens of each document, found 8 for one of 9"):
        rows.batch([0])
    jobs = JobRows([rows_of([9, 4], 16)], 16)
    jobs.longest = 8
    with pytest.raises(ValueError, match="found 8 for one of 9"):
        jobs.batch([0])
    assert replace(batch, longest=None).checked().longest is None, "None is the whole row"


def test_a_batch_that_moves_keeps_it() -> None:
    batch = rows_of([200], 300).batch([0])
    assert batch.longest == batch.to(torch.device("cpu")).longest == 256
    assert PackedBatch.of(batch.tensors(), 256).longest == 256


def test_values_and_gradients_have_the_same_bits(
    make: Any, by_starts: None, blocks_of_three: None
) -> None:
    """Two documents of 9 in one row; in the other, one and 15 tokens of padding, in two pieces."""
    rows = rows_of([9, 9, 9], 24)
    assert rows.longest == 9 and rows.most == 3
    trainer, _ = make(False, True)
    model = trainer.model.eval()
    told: list[Any] = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda layer, args, kwargs: told.append(kwargs["max_length_q"]), with_kwargs=True
    )
    batch = rows.batch([0, 1])
    assert batch.starts is not None and batch.starts.tolist() == [0, 9, 18, 24, 33, 42, 48]
    as_one = replace(batch, starts=torch.tensor([0, 24, 48], dtype=torch.int32), longest=None)
    found = []
    for each in (batch, told_the_row(batch), as_one):
        model.zero_grad()
        loss = mean_loss(model, each, trainer.options, torch.tensor(27.0))
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **grads})
    hook.remove()
    trainer.close()
    assert told == [9, 24, 24] and len(found[0]) > 10
    assert_same(found[0], found[1])
    assert not torch.equal(found[0]["loss"], found[2]["loss"]), "the test can fail"


@pytest.mark.slow
@pytest.mark.parametrize("replay", [False, True], ids=["eager", "one graph"])
def test_a_run_is_the_same(
    make: Any, by_starts: None, blocks_of_three: None, monkeypatch: pytest.MonkeyPatch, replay: bool
) -> None:
    """FP8 and dropout, every step with the same number. No scale of these rows comes from padding.

    Padding in other pieces is another number of products, which may add in another order. The first step has the same
    parameters. A scale follows its largest element, which roundings to FP8 before it move by far less than themselves.
    """
    first, losses, told = [], [], []
    real = models.places_of

    def places_of(decoder: Any, batch: PackedBatch) -> dict[str, Any]:
        places = real(decoder, batch)
        told[-1].add(places["max_length_q"])
        return places

    monkeypatch.setattr(models, "places_of", places_of)
    for short in (True, False):
        trainer, _ = make(replay, True)
        trainer.rows = rows_of([9] * 7, 24)
        trainer.order = RowOrder(len(trainer.rows), 0)
        if not short:
            trainer.rows.longest = 24
        told.append(set())
        losses.append([trainer.step().loss])
        gradients = {n: p.grad.clone() for n, p in trainer.trainable.items()}
        first.append({**gradients, "scales": trained(trainer)["scales"]})
        losses[-1] += [trainer.step().loss for _ in range(4)]
        trainer.close()
    assert told == [{9}, {24}]
    for name, value in first[0].items():
        bound = 2.0**-8 if name == "scales" else TURNED_GRADIENTS
        assert difference(first[1][name], value) <= bound, name
    check_losses(losses[1], losses[0], fp8=True, untrained=1)


def test_jobs_have_that_of_all(blocks_of_three: None) -> None:
    """A row of padding, of a job with fewer rows to evaluate or alone, is cut too."""
    each = [rows_of([9, 9, 9, 9, 9], 24), rows_of([4, 5], 24)]
    assert [rows.longest for rows in each] == [9, 6]
    rows = JobRows(each, 24, once=True)
    assert rows.longest == 9
    alone = rows.only(1)
    assert (len(rows), len(alone)) == (3, 1)
    for batch in (rows.batch([0, 1, 2]), alone.batch([0])):
        tokens = batch.input_ids.numel()
        most = 9 if tokens > 48 else 6
        assert batch.longest == most and batch.starts is not None
        assert batch.starts[0] == 0 and batch.starts[-1] == tokens
        assert int(batch.starts.diff().max()) <= most
        assert {*range(0, tokens, 24)} <= {*batch.starts.tolist()}


def test_rows_over_ranks_are_told_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []

    class Decoder:
        def __call__(self, **given: Any) -> Any:
            told.append(given)
            return SimpleNamespace(last_hidden_state=torch.zeros(1))

    monkeypatch.setattr(models, "decoder_and_head", lambda _: (Decoder(), None))
    monkeypatch.setattr(models.ContextParallel, "of", lambda _: object())
    batch = rows_of([200, 100], 300).batch([0])
    hidden_states(None, batch)
    hidden_states(None, replace(batch, starts=None))
    assert told[0]["max_length_q"] == 256 and told[0]["cu_seq_lens_q"] is batch.starts
    assert told[1].get("max_length_q") is None


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ({}, None),
        ({"training longest document": 24}, "found training longest document 9, on rank 0 24"),
        ({"training sequences": 7}, "found training sequences 2, on rank 0 7"),
        ({"tokens": "3f"}, "found tokens 2a, on rank 0 3f"),
        ({"of a job": "3f"}, "found of a job None, on rank 0 3f"),
    ],
    ids=["equal", "another length", "other rows", "other text, as long", "another job"],
)
def test_ranks_with_other_data_are_refused(
    blocks_of_three: None, first: dict[str, Any], said: str | None
) -> None:
    rows = rows_of([9, 9, 9], 24)
    ranks: Any = SimpleNamespace(from_first=lambda own: own | first, together=lambda work: work())
    data = RunData(rows, rows, {"tokens": "2a", "eval_tokens": None}, ())
    if said is None:
        check_rows(data, ranks)
        return
    with pytest.raises(DataError, match=f"all ranks must have the same rows, {said}"):
        check_rows(data, ranks)


def test_a_backend_is_chosen_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-2 takes short sequences, however long the row."""
    from lorakernels.fusion.fuse import FuseReport

    asked: list[bool] = []
    monkeypatch.setattr(
        attention, "choose_packed", lambda wanted, q, k, v, short: asked.append(short) or "packed"
    )
    report = mock.Mock(spec=FuseReport, parts=[], attention="auto")
    q = torch.zeros(1, 2, 300, 64)
    for longest in (None, 128, 129):
        found = FuseReport.backend_for(report, q, q, q, "packed", longest)
        assert found == ("packed", "")  # a CPU has no graphs that were faster
    assert asked == [False, True, False]


@pytest.fixture
def short_run(base_args: list[str], model_dir: Path, data_file: Path, tmp_path: Path) -> list[Any]:
    """Documents of at most 155 tokens in rows of 512, which the model's config now allows."""
    model = Path(shutil.copytree(model_dir, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 512
    (model / "config.json").write_text(json.dumps(config))
    return [*base_args, "--model", model, "--seq-len", 512]


def test_a_resumed_run_has_the_same_number(
    cli: Cli, short_run: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found: list[tuple[int, int]] = []
    real = Session.run

    def run(self: Session) -> None:
        assert self.held is not None
        found.append((self.trainer.rows.longest, self.held.longest))
        real(self)

    monkeypatch.setattr(Session, "run", run)
    given = [*short_run, "--output", tmp_path / "out", "--steps"]
    assert cli(*given, 1) == 0
    assert "documents apart, of at most 256 tokens" in capsys.readouterr().out
    assert cli(*given, 2, "--resume") == 0
    assert found[0] == found[1] and found[0][0] == 256


@pytest.mark.slow
def test_two_ranks_with_parts_of_rows_train_as_one_process(
    short_run: list[Any], tmp_path: Path
) -> None:
    """Both ranks have the number of all rows, or the run would have stopped."""
    run = [*short_run, "--no-fp8", "--lora-dropout", "0", "--fuse", "--steps", 3, "--output"]
    on_ranks([[*run, tmp_path / "one"]], tmp_path, size=1)
    on_ranks([[*run, tmp_path / "two", "--cp", 2]], tmp_path)
    check_losses(losses(tmp_path / "two"), losses(tmp_path / "one"), fp8=False)
    check_gradients(tmp_path / "two", 1, tmp_path / "one", 1, fp8=False)
    assert_same(*(torch.load(tmp_path / "two" / f"rank{rank}.pt") for rank in range(2)))


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_run_on_a_gpu_has_the_same_losses(
    fp8: bool, cli: Cli, gpu_run: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents of at most 128 tokens in rows of 256, by FlashAttention-2, replayed.

    Deterministic kernels give each document the same bits whatever its neighbours. In FP8 a scale may come from
    padding, whose tokens differ by dropout and see each other in shorter pieces: FP8 then rounds otherwise.
    """
    texts = [f"{i}: " + "the quick brown fox; " * (1 + i % 5) for i in range(40)]
    data = tmp_path / "short.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    longest: list[int] = []
    real = PackedRows.__init__

    def told_rows(self: PackedRows, *given: Any, **more: Any) -> None:
        real(self, *given, **more)
        longest.append(self.longest)
        self.longest = 256

    run = [*gpu_run, "--data", data, "--seq-len", 256, "--steps", 8, *([] if fp8 else ["--no-fp8"])]
    assert cli(*run, "--output", tmp_path / "short") == 0
    monkeypatch.setattr(PackedRows, "__init__", told_rows)
    assert cli(*run, "--output", tmp_path / "row") == 0
    assert longest[0] == 128
    found, expected = ([r["loss"] for r in records(tmp_path / n)] for n in ("short", "row"))
    assert len(found) == 8 and records(tmp_path / "short")[-1]["replayed"]
    np.testing.assert_allclose(found, expected, rtol=1e-2 if fp8 else 0)
