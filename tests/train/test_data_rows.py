# SPDX-License-Identifier: Apache-2.0
"""From token files to packed rows: loss masks, weights, truncation, held-out data, and what a run says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorakernels.train.data.prepare import RunData, load_data
from lorakernels.train.errors import DataError
from lorakernels.train.loop import Trainer
from lorakernels.train.model import load_model, summed_loss
from lorakernels.train.options import FinetuneOptions
from lorakernels.train.packing import IGNORE, PackedRows
from lorakernels.train.ranks import Ranks
from tests.train.chats import jsonl, tokenizer_with, turns
from tests.train.replays import assert_same, trained

Load = Callable[..., tuple[RunData, list[str]]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(*data: Path, **options: Any) -> tuple[RunData, list[str]]:
        made = FinetuneOptions(
            **{"seq_len": 64, "eval_fraction": 0.0, "data": [str(d) for d in data], **options}
        )
        said: list[str] = []
        found = load_data(made, tokenizer_with(), tmp_path / "tokens", said.append, Ranks())
        return found, said

    return load


def chats(path: Path, *answers: str) -> Path:
    return jsonl(path, [{"messages": turns("q", answer)} for answer in answers])


def learned(rows: PackedRows) -> list[str]:
    """The trained labels of all rows as text, one string for each document."""
    found = []
    for number in range(len(rows)):
        batch = rows.batch([number])
        for segment in range(int(batch.segments.max()) + 1):
            labels = batch.labels[batch.segments == segment]
            found.append(
                bytes(labels[(labels != IGNORE) & (labels < 256)].tolist()).decode().strip()
            )
    return found


def test_labels_of_prompts_are_ignored_and_shapes_stay(tmp_path: Path, load: Load) -> None:
    path = chats(tmp_path / "a.jsonl", "one", "two", "three")
    data, said = load(path)
    assert sorted(learned(data.train)) == ["one", "three", "two"]
    everything, _ = load(path, train_on_inputs=True)
    for number in range(len(data.train)):
        masked, whole = data.train.batch([number]), everything.train.batch([number])
        assert masked.targets == data.train.targets_of(number) < whole.targets
        for name in ("input_ids", "positions", "segments", "starts"):
            assert torch.equal(getattr(masked, name), getattr(whole, name)), "only labels differ"
    assert data.train.targets == 11 + 3 * 2, "the answers, each with <eos> and a new line"
    assert f"{path}: 3 rows of messages" in said
    assert "loss on 17 of the 77 tokens of an epoch, those of answers" in said
    assert said[-2:] == [
        "the first chat or completion, its trained parts in ⟦⟧:",
        "<bos>user: q<eos>\nassistant: ⟦one<eos>\n⟧",
    ]


def test_a_rendered_text_beside_its_fields_is_not_read(tmp_path: Path, load: Load) -> None:
    row = {"instruction": "q", "output": "an answer", "text": "### Instruction: q ### Response: "}
    data, _ = load(jsonl(tmp_path / "alpaca.jsonl", [row]))
    assert learned(data.train) == ["an answer"]


def test_chats_are_truncated_and_texts_are_split(tmp_path: Path, load: Load) -> None:
    """What is cut off of a chat would lack its question. A chat whose answer begins after the cut is dropped."""
    path = chats(tmp_path / "a.jsonl", "x" * 100, "yes")
    jsonl(tmp_path / "b.jsonl", [{"messages": turns("q" * 100, "unseen")}])
    jsonl(tmp_path / "c.jsonl", [{"text": "t" * 100}])
    data, said = load(path, tmp_path / "b.jsonl", tmp_path / "c.jsonl")
    assert sorted(filter(None, learned(data.train))) == ["t" * 36, "t" * 64, "x" * 44, "yes"]
    assert "training data: 2 documents are longer than seq_len 64 and were truncated" in said
    assert "training data: 1 of them were dropped, because their answers begin after that" in said
    assert "1 documents are longer than seq_len 64 and were split" in said


def test_weights_are_how_often_an_epoch_takes_the_documents(tmp_path: Path, load: Load) -> None:
    one = chats(tmp_path / "a.jsonl", *(f"a{i}" for i in range(8)))
    two = chats(tmp_path / "b.jsonl", "b0", "b1")
    data, _ = load(one, two, data_weights=[0.5, 2])
    found = learned(data.train)
    chosen = [text for text in found if text[0] == "a"]
    assert len(chosen) == len(set(chosen)) == 4
    assert sorted(text for text in found if text[0] == "b") == ["b0", "b0", "b1", "b1"]
    again, _ = load(two, one, data_weights=[2, 0.5])
    assert sorted(learned(again.train)) == sorted(found), "the choice is of the content"
    assert load(one, two, data_weights=[0.5, 2], seed=1)[0].train.targets == data.train.targets


def test_eval_data_is_all_that_is_held_out(tmp_path: Path, load: Load) -> None:
    one, two = chats(tmp_path / "a.jsonl", "a", "b"), chats(tmp_path / "b.jsonl", "c")
    data, said = load(one, eval_data=[str(two)], eval_fraction=0.5)
    assert sorted(learned(data.train)) == ["a", "b"] and learned(data.held) == ["c"]
    assert any("1 documents of eval_data held out" in line for line in said)
    without, _ = load(one)
    assert without.identity == {**data.identity, "eval_tokens": None} != data.identity


def test_whole_chats_are_held_out(tmp_path: Path, load: Load) -> None:
    """Of plain text the end of the longest document would be; the end of a chat alone says nothing."""
    path = chats(tmp_path / "a.jsonl", "first", "second", "third")
    data, _ = load(path, eval_fraction=0.01)
    assert len(learned(data.held)) == 1 and len(learned(data.train)) == 2
    assert {*learned(data.held), *learned(data.train)} == {"first", "second", "third"}
    with pytest.raises(DataError, match="one document, of which no part can be held out"):
        load(chats(tmp_path / "b.jsonl", "alone"), eval_fraction=0.5)


def test_the_loss_is_the_mean_over_trained_tokens(
    tmp_path: Path, load: Load, model_dir: Path
) -> None:
    """As TRL's: the sum over labels that are not −100, divided by their number in the whole step."""
    data, _ = load(chats(tmp_path / "a.jsonl", *("word " * n for n in range(1, 9))))
    model = load_model(model_dir, torch.float32, torch.device("cpu"))
    options = FinetuneOptions(seq_len=64, steps=4, batch_size=2, grad_accum=2)
    trainer = Trainer(model, options, data.train, None)
    trainer.optimizer.step = lambda: None  # type: ignore[method-assign]
    batches = [data.train.batch(trainer.order.take(at, 2)) for at in (0, 2)]
    assert batches[0].targets != batches[1].targets
    with torch.no_grad():
        total = 0.0
        for batch in batches:
            documents = [
                (batch.input_ids[r][keep], batch.labels[r][keep])
                for r in range(2)
                for s in range(int(batch.segments[r].max()) + 1)
                for keep in [batch.segments[r] == s]
            ]
            for ids, labels in documents:
                logits = model(input_ids=ids[None]).logits[0]
                total += float(
                    torch.nn.functional.cross_entropy(
                        logits, labels, ignore_index=-100, reduction="sum"
                    )
                )
    result = trainer.step()
    trainer.close()
    trained_tokens = sum(batch.targets for batch in batches)
    assert result.loss == pytest.approx(total / trained_tokens, rel=1e-5)
    assert result.tokens == sum(int((b.segments >= 0).sum()) for b in batches) > trained_tokens


def test_a_chunk_without_a_trained_token(model_dir: Path) -> None:
    tokens = np.arange(60, dtype=np.uint32)
    only = np.zeros(60, dtype=np.uint8)
    only[50:52] = 1
    rows = PackedRows(tokens, np.array([[0, 60]]), 64, trained=only)
    model = load_model(model_dir, torch.float32, torch.device("cpu"))
    whole, parts = (summed_loss(model, rows.batch([0]), chunk) for chunk in (64, 8))
    assert rows.targets == 2 and torch.isfinite(whole)
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=0)


def test_pieces_without_a_trained_token_are_left_out() -> None:
    tokens = np.arange(40, dtype=np.uint32)
    last = np.zeros(40, dtype=np.uint8)
    last[30:] = 1
    rows = PackedRows(tokens, np.array([[0, 40]]), 10, trained=last)
    assert rows.untrained_pieces == 2 and rows.targets == 10, "label 30 ends the third piece"
    labels = torch.cat([rows.batch([n]).labels.flatten() for n in range(len(rows))])
    assert sorted(labels[labels != IGNORE].tolist()) == list(range(30, 40))


def test_graphs_replay_masked_labels(make: Any, rows: PackedRows) -> None:
    """Masks differ from step to step, shapes do not: one graph serves them all, with the eager steps' bits."""
    mask = (np.arange(len(rows.tokens)) % 7 > 3).astype(np.uint8)
    spans = np.stack([rows.starts, rows.starts + rows.lengths + 1], 1)
    masked = PackedRows(rows.tokens, spans, 24, trained=mask)
    trainers = []
    for replay in (False, True):
        trainer, _ = make(replay)
        trainer.rows = masked
        trainers.append(trainer)
    eager, graphed = trainers
    assert len(masked) == len(rows)
    results = [[trainer.step() for _ in range(6)] for trainer in trainers]
    assert [r.loss for r in results[0]] == [r.loss for r in results[1]]
    assert results[1][-1].replayed
    assert_same(trained(eager), trained(graphed))
    eager.close(), graphed.close()
