# SPDX-License-Identifier: Apache-2.0
"""From token files to packed rows: loss masks, weights, truncation, held-out data, and what a run says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorakernels.train.data.packing import IGNORE, PackedRows
from lorakernels.train.data.prepare import RunData, load_data
from lorakernels.train.errors import DataError, OptionError
from lorakernels.train.model.model import load_model, summed_loss
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks
from lorakernels.train.run.loop import Trainer
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
        found = load_data(made, tokenizer_with(), tmp_path / "tokens", said.append, RunRanks())
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


def lengths_of(data: RunData) -> int:
    """The tokens that an epoch takes of all documents, with each one's first."""
    return int(data.train.lengths.sum()) + len(data.train.lengths)


@pytest.mark.parametrize("weight", [0.02, 0.3, 0.5, 1.5, 2.5])
@pytest.mark.parametrize("sizes", [[400], [9, 400, 13], [30] * 20], ids=["one", "unequal", "equal"])
def test_a_weight_is_the_share_of_tokens_also_of_one_text(
    tmp_path: Path, load: Load, weight: float, sizes: list[int]
) -> None:
    """Each .txt is one document. The last that a share takes is cut."""
    one = jsonl(tmp_path / "a.jsonl", [{"text": "a" * 50}])
    two = jsonl(
        tmp_path / "b.jsonl", [{"text": f"{i:02}" + "b" * (n - 4)} for i, n in enumerate(sizes)]
    )
    data, said = load(one, two, data_weights=[1, weight], seq_len=512)
    taken = round(weight * sum(sizes))
    assert lengths_of(data) == 52 + taken
    assert said[0] == f"data_weights: 1 of {one} is 52 tokens an epoch, of 52"
    assert (
        said[1]
        == f"data_weights: {weight:g} of {two} is {taken:,} tokens an epoch, of {sum(sizes)}"
    )


def test_a_weight_of_chats_takes_whole_ones_by_what_is_trained_of_them(
    tmp_path: Path, load: Load
) -> None:
    """Nearest to the share: within half of the longest, which here is what seq_len leaves of it."""
    path = chats(tmp_path / "a.jsonl", *("x" * (5 * n) for n in range(9)), "y" * 5000)
    everything, _ = load(path)
    assert len(everything.train.lengths) == 10
    for weight in (0.1, 0.25, 0.5, 0.75, 1.5):
        data, _ = load(path, data_weights=[weight])
        assert abs(lengths_of(data) - weight * lengths_of(everything)) <= 33
        assert set(data.train.lengths.tolist()) <= set(everything.train.lengths.tolist())


@pytest.mark.parametrize(
    ("weight", "rows"), [(0.5, 1), (1.5, 1), (0.3, 3), (1e-4, 0)], ids=["half", "one and a half", "third", "text"]
)  # fmt: skip
def test_less_than_one_document_is_refused(
    tmp_path: Path, load: Load, weight: float, rows: int
) -> None:
    path = chats(tmp_path / "a.jsonl", *(f"a{n}" for n in range(rows)))
    if not rows:
        jsonl(path, [{"text": "a" * 100}])
    message = rf"data_weights: [0-9.e-]+ of the {rows or 1} documents of .*a\.jsonl is less than one .* for {weight:g}$"
    with pytest.raises(OptionError, match=message):
        load(path, data_weights=[weight])


def test_a_weight_takes_nothing_of_what_is_held_out(tmp_path: Path, load: Load) -> None:
    texts = [{"text": f"{n}: " + "word " * n} for n in range(30)]
    data, said = load(
        jsonl(tmp_path / "a.jsonl", texts), data_weights=[2.5], eval_fraction=0.2, seq_len=512
    )
    train, held = ({rows.tokens[s : s + n].tobytes() for s, n in zip(rows.starts, rows.lengths, strict=True)}
                   for rows in (data.train, data.held))  # fmt: skip
    assert held and not held & train
    total = int(said[0].rsplit(" ", 1)[1].replace(",", ""))
    assert lengths_of(data) == round(2.5 * total)


@pytest.mark.parametrize("times", [2, 10])
def test_rows_that_repeat_are_held_out_together(tmp_path: Path, load: Load, times: int) -> None:
    """Else the held-out loss is that of rows that are trained. A chat is what seq_len leaves of it."""
    answers = [f"answer {n}" for n in range(40)] + [f"{'z' * 80}{n}" for n in range(10)]
    one = chats(tmp_path / "a.jsonl", *answers * (times - 1))
    two = chats(tmp_path / "b.jsonl", *answers)
    data, _ = load(one, two, eval_fraction=0.3)
    train, held = learned(data.train), learned(data.held)
    assert len(train) + len(held) == 50 * times
    assert held and not set(train) & set(held)
    short = [text for text in train + held if text.startswith("answer")]
    assert all((train + held).count(text) == times for text in short)


def test_equal_documents_alone_are_refused_or_cut_alike(tmp_path: Path, load: Load) -> None:
    path = chats(tmp_path / "a.jsonl", *["same"] * 5)
    with pytest.raises(
        DataError, match="the data is 5 documents that are all equal up to seq_len, of which no"
    ):
        load(path, eval_fraction=0.2)
    texts = jsonl(tmp_path / "b.jsonl", [{"text": "a" * 38}] * 2 + [{"text": "b"}])
    data, said = load(texts, eval_fraction=0.02)
    assert any("the last 2 tokens of the longest document held out" in line for line in said)
    assert sorted(data.train.lengths.tolist()) == [2, 37, 37]


def test_eval_data_that_is_trained_too_is_said(tmp_path: Path, load: Load) -> None:
    """By tokens, whatever the file; also where a weight takes a part of a text."""
    one = chats(tmp_path / "a.jsonl", "a", "b", "c", "c")
    two = chats(tmp_path / "b.jsonl", "b", "c", "d")
    line = "held-out data: {} of its {} documents are trained, too"
    assert line.format(2, 3) in load(one, eval_data=[str(two)])[1]
    assert line.format(4, 4) in load(one, eval_data=[str(one)])[1]
    text = tmp_path / "book.txt"
    text.write_text("book " * 50)
    assert line.format(1, 1) in load(text, eval_data=[str(text)], data_weights=[0.5])[1]
    other = chats(tmp_path / "c.jsonl", "d")
    assert not any("trained, too" in line for line in load(one, eval_data=[str(other)])[1])


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
    batches = [data.train.batch(trainer.order.take(at, 2)[0]) for at in (0, 2)]
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
