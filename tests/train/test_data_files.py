# SPDX-License-Identifier: Apache-2.0
"""Token files: the same bits as ever for plain text, one writer, and no damage that goes unnoticed."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from pathlib import Path

import pytest

from lorakernels.train.data import encode
from lorakernels.train.data.byte_tokenizer import byte_tokenizer
from lorakernels.train.data.packing import PackedRows
from lorakernels.train.data.split import hold_out
from lorakernels.train.data.tokens import Rules, tokenize_files
from lorakernels.train.errors import DataError
from tests.train.chats import MARKED, jsonl, tokenizer_with, tokens_of, turns


def digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def test_plain_text_gives_the_bits_it_always_gave(tmp_path: Path) -> None:
    """The hashes are of the files and batches that finetune made before it read chats (36d7bc0)."""
    (tmp_path / "a.txt").write_text("zwölf Boxkämpfer\n" * 40, encoding="utf-8")
    texts = [f"{i}: " + "the quick brown fox; " * (i % 8) for i in range(40)]
    jsonl(tmp_path / "b.jsonl", [{"text": text, "n": i} for i, text in enumerate(texts)])
    file = tokenize_files(
        [tmp_path / "a.txt", tmp_path / "b.jsonl"], byte_tokenizer(), tmp_path / "cache"
    )
    assert digest((file.path / "tokens.bin").read_bytes()) == "99a54fcda00d3fc8"
    assert digest((file.path / "docs.bin").read_bytes()) == "41ac2368bbcf22e0"
    assert not (file.path / "trained.bin").exists() and file.trained is None
    train, held, how = hold_out(file, 0.1, 3)
    assert how == "10 of 41 documents held out"
    batches = b""
    for spans in (train, held):
        rows = PackedRows(file.tokens, spans, 48, trained=file.trained)
        for number in range(len(rows)):
            tensors = rows.batch([number]).tensors()
            batches += b"".join(tensor.numpy().tobytes() for tensor in tensors)
    assert digest(batches) == "ac99095e9a0ad94f"


def test_the_rules_and_the_template_are_in_the_key(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"messages": turns("a", "b")}])
    both = [tokenizer_with(), tokenizer_with(MARKED)]
    found = {
        tokens_of(path, each, train_on_inputs=on).path for each in both for on in (True, False)
    }
    assert len(found) == 4


@pytest.mark.parametrize("name", ["tokens.bin", "docs.bin", "trained.bin"])
def test_a_changed_byte_is_noticed(tmp_path: Path, name: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"messages": turns("a", "b")}])
    damaged = tokens_of(path, tokenizer_with()).path / name
    raw = bytearray(damaged.read_bytes())
    raw[-1] ^= 1
    damaged.write_bytes(raw)
    with pytest.raises(
        DataError, match=f"{name} does not match its SHA-256: delete .* and run again"
    ):
        tokens_of(path, tokenizer_with())


def _tokenize(path: Path, log: Path, start: object) -> None:
    real = encode.Tokens.encode

    def noted(*args: object) -> object:
        with log.open("a") as file:
            file.write("encoded\n")
        return real(*args)  # type: ignore[arg-type]

    encode.Tokens.encode = noted  # type: ignore[assignment, method-assign]
    start.wait()  # type: ignore[attr-defined]
    tokens = tokenize_files([path], byte_tokenizer(), path.parent / "cache")
    with log.open("a") as file:
        file.write(f"{len(tokens.tokens)}\n")


def test_of_processes_that_start_together_one_writes(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "some text " * 50}] * 200)
    context = multiprocessing.get_context("fork")
    start, log = context.Barrier(3), tmp_path / "log"
    processes = [context.Process(target=_tokenize, args=(path, log, start)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(log.read_text().split()) == [*["100400"] * 3, "encoded"]
    assert len(list((tmp_path / "cache").iterdir())) == 1, "no half-written file is left"


def test_meta_counts_what_each_file_gave(tmp_path: Path) -> None:
    one = jsonl(tmp_path / "a.jsonl", [{"messages": turns("a", "b")}, 3])
    two = jsonl(tmp_path / "b.jsonl", [{"text": "b"}])
    file = tokenize_files([one, two], tokenizer_with(), tmp_path / "cache", Rules(False, True))
    meta = json.loads((file.path / "meta.json").read_text())
    assert [(s["format"], s["documents"], s["bad"]) for s in meta["sources"]] == [
        ("messages", 1, 1),
        ("plain text", 1, 0),
    ]
    assert file.whole.tolist() == [True, False] and file.entries.tolist() == [0, 1]
