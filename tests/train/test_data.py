# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lorakernels.train.data import encode
from lorakernels.train.data.byte_tokenizer import byte_tokenizer
from lorakernels.train.data.sources import DataSource
from lorakernels.train.data.split import hold_out
from lorakernels.train.data.tokens import TokenFile, cache_key, tokenize_files
from lorakernels.train.errors import DataError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def file_of(tmp_path: Path, name: str, content: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", b" \n\t", "a.txt holds no text, only white space"),
        ("a.jsonl", b"\n\n", "a.jsonl holds no text"),
        ("a.txt", b"caf\xc3\xa9 \xff", "a.txt: byte 0xff at offset 6 is not UTF-8"),
        ("a.txt", b"cut \xe2\x82", "a.txt: byte 0xe2 at offset 4 is not UTF-8"),
        (
            "a.jsonl",
            b'{"text": "\xc3\xa9"}\n{"text": "\xe9"}\n',
            "a.jsonl line 2: byte 0xe9 at offset 25 is not UTF-8",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"text": "b"\n',
            "a.jsonl line 3: not a JSON object (Expecting ',' delimiter at character 13)",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "cut sh\n',
            "a.jsonl line 2: not a JSON object (Unterminated string starting at character 10)",
        ),
        (
            "a.jsonl",
            b'{"text": "a"} {"text": "b"}\n',
            "a.jsonl line 1: not a JSON object (Extra data at",
        ),
        (
            "a.jsonl",
            b"[1, 2]\n",
            'line 1: expected an object, such as {"messages": [...]} or {"text": "..."}, found list',
        ),
        (
            "a.json",
            b'[{"text": "a"}]\n{"text": "b"}',
            "a.json line 2: expected another list or the end of the file, found '{'",
        ),
        (
            "a.json",
            b'[{"text": "a"}]\n]',
            "line 2: expected another list or the end of the file, found ']'; nothing of the",
        ),
        (
            "a.json",
            b'[{"text": "a"}]\n\n[{"text": "b"},\n {"te',
            "a.json line 4: not a whole JSON value",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n["b"]\n',
            'a.jsonl line 2: expected an object with "text", found list',
        ),
        (
            "a.jsonl",
            b'{"txt": "a"}\n',
            "a.jsonl line 1: found only the fields ['txt'], expected one of: \"messages\"; ",
        ),
        ("a.jsonl", b'{"text": 3}\n', 'a.jsonl line 1: expected a string under "text", found int'),
        (
            "a.jsonl",
            b'{"text": "\\ud800"}\n',
            "a.jsonl line 1: character 0 of the text is a lone surrogate",
        ),
        ("a.jsonl", b"[" * 100_000, "a.jsonl line 1: not a JSON object"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "b", "n": ' + b"9" * 5000 + b"}\n",
            "a.jsonl line 2: not a JSON object (Exceeds the limit",
        ),
        ("a.JSONL", b'{"txt": 3}\n', "a.JSONL line 1: found only the fields ['txt']"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"messages": []}\n',
            "a.jsonl line 2: the field \"text\" is missing, which the first row of the file has; found ['messages']",
        ),
        (
            "a.json",
            b'[{"text": "a"},\n\n {"text": 3}]',
            'a.json line 3: expected a string under "text"',
        ),
        ("a.json", b'[{"text": "a"},\n {"te', "a.json line 2: not a whole JSON value"),
        (
            "a.json",
            b'[{"text": "a"}',
            "a.json line 1: expected a comma or ] after this value, found the end",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "b", "n": 1, "text": "c"}\n',
            "a.jsonl line 2: one object has 'text' twice: leave one of them",
        ),
        (
            "a.jsonl",
            b'{"text": "a", "more": [{"n": 1, "m": {}, "n": 1, "m": 2}]}\n',
            "a.jsonl line 1: one object has 'm', 'n' twice",
        ),
        (
            "a.json",
            b'[{"text": "a"},\n\n {"text": "b", "text": "b"}]',
            "a.json line 3: one object has 'text' twice",
        ),
        (
            "a.csv",
            b'messages\n"[{""role"": ""user"", ""role"": ""system""}]"\n',
            "a.csv line 2: the text under \"messages\": one object has 'role' twice",
        ),
        ("a.json", b"[]", "a.json holds no text"),
        ("a.ndjson", b'{"txt": "a"}', "a.ndjson line 1: found only the fields ['txt']"),
        ("a.csv", b"id,text\n1,a\n2\n", "a.csv line 3: 1 cells, the header has 2 names"),
        ("a.csv", b'text\n"a\n', "a.csv line 2: unexpected end of data"),
        ("a.csv", b'text,n\n"a,1\nb,2\n"c",3\n', "a.csv lines 2 to 4: ',' expected after '\"'"),
        ("a.csv", b"text\n\xff\n", "a.csv line 1: 'utf-8' codec can't decode byte 0xff"),
        ("a.tsv", b"text\tn\na\n", "a.tsv line 2: 1 cells, the header has 2 names"),
        ("a.parquet", b"PAR1", "a.parquet is not a parquet file that can be read"),
        ("a.jsonl.gz", b"\x1f\x8b", "a.jsonl.gz cannot be unpacked"),
        ("a.jsonl.gz", b"text", "a.jsonl.gz cannot be unpacked: Not a gzipped file"),
        ("a.jsonl.xz", b"text", "a.jsonl.xz cannot be unpacked"),
        ("a.txt.bz2", b"text", "a.txt.bz2 cannot be read: Invalid data stream"),
        ("a.txt.ZST", b"\x28\xb5", "a.txt.ZST"),
        ("a.zip", b"PK", "a.zip is an archive: unpack it first"),
    ],
)
def test_bad_file_says_where(
    tmp_path: Path, tokenizer: Any, name: str, content: bytes, message: str
) -> None:
    path = file_of(tmp_path, name, content)
    with pytest.raises(DataError) as caught:
        tokenize_files([path], tokenizer, tmp_path / "cache")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    cache = tmp_path / "cache"
    assert not cache.exists() or not list(cache.iterdir()), (
        "a failed run leaves no half-written token file"
    )


def test_every_file_is_looked_at_before_the_first_is_read(tmp_path: Path, tokenizer: Any) -> None:
    """Tokenizing may take hours: a file of another kind at the end of the list is refused at once."""
    first = file_of(tmp_path, "a.txt", b"\xff")
    with pytest.raises(DataError, match=r"b\.zip is an archive"):
        tokenize_files([first, file_of(tmp_path, "b.zip", b"PK")], tokenizer, tmp_path / "cache")


def test_missing_file(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"nowhere\.txt does not exist"):
        tokenize_files([tmp_path / "nowhere.txt"], tokenizer, tmp_path)


def test_a_token_is_found_in_the_document_that_has_it_first(tmp_path: Path, tokenizer: Any) -> None:
    """Of the documents that a file gave: rows without text are none."""
    one = file_of(tmp_path, "a.jsonl", b'{"text": "a"}\n{"text": " "}\n{"text": "b"}\n')
    two = file_of(tmp_path, "b.jsonl", b'{"text": "a"}\n{"text": "ac"}\n{"text": "c"}\n')
    found = tokenize_files([one, two], tokenizer, tmp_path / "cache")
    places = [found.place_of(ord(letter)) for letter in "abc"]
    assert places == [f"{one}, document 1", f"{one}, document 2", f"{two}, document 2"]
    with pytest.raises(ValueError, match="no document has token 100"):
        found.place_of(ord("d"))


def test_tokens_are_the_documents(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes in, bytes out, with <bos> and <eos>; a block cut changes nothing at byte level."""
    monkeypatch.setattr(encode, "BLOCK", 7)
    text = file_of(tmp_path, "a.txt", "\ufeffzwölf\nBoxkämpfer\n jagen\n".encode())
    lines = file_of(
        tmp_path, "b.jsonl", b'{"text": "one"}\n\n{"text": " "}\n{"text": "two", "n": 1}'
    )
    found = tokenize_files([text, lines], tokenizer, tmp_path / "cache")
    documents = [
        bytes(found.tokens[a + 1 : b - 1].astype(np.uint8)).decode() for a, b in found.spans
    ]
    assert documents == ["zwölf\nBoxkämpfer\n jagen\n", "one", "two"]
    assert {(int(found.tokens[a]), int(found.tokens[b - 1])) for a, b in found.spans} == {
        (257, 258)
    }
    assert found.tokens.dtype == np.uint32 and isinstance(found.tokens, np.memmap)


def test_the_largest_token_is_that_of_all_documents(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without special tokens, of which one is the largest of this tokenizer."""
    for name in ("bos_token_id", "eos_token_id"):
        monkeypatch.setattr(type(tokenizer), name, None, raising=False)
    lines = file_of(tmp_path, "a.jsonl", b'{"text": "az"}\n{"text": "b"}\n')
    found = tokenize_files([lines], tokenizer, tmp_path / "cache")
    assert found.max_token == ord("z") and found.tokens.tolist() == list(b"azb")


def test_written_once_and_keyed_by_content(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path, "a.txt", b"first")
    first = tokenize_files([path], tokenizer, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(encode.Tokens, "encode", lambda *_: pytest.fail("tokenized again"))
        assert tokenize_files([path], tokenizer, tmp_path / "cache").path == first.path
    path.write_bytes(b"other")
    assert tokenize_files([path], tokenizer, tmp_path / "cache").path != first.path


def sources_of(*paths: Path) -> list[DataSource]:
    return [DataSource(entry, path) for entry, path in enumerate(paths)]


def stub(**changes: Any) -> Any:
    """A tokenizer without a file of its own, in whose bytes its special tokens would show."""
    special = {"bos_token_id": 1, "eos_token_id": 2, "get_vocab": lambda: {"a": 0, "b": 1, "c": 2}}
    return SimpleNamespace(**{**special, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token_id": 0},
        {"eos_token_id": None},
        {"bos_token_id": 0},
        {"bos_token_id": None},
        {"get_vocab": lambda: {"a": 1, "b": 0, "c": 2}},
        {"chat_template": "{{ messages }}"},
        {"backend_tokenizer": SimpleNamespace(to_str=lambda: "{}")},
    ],
    ids=["eos", "no eos", "bos", "no bos", "vocabulary", "template", "backend"],
)
def test_another_tokenizer_is_another_key(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Each of these would make other tokens of the same file."""
    path = sources_of(file_of(tmp_path, "a.txt", b"text"))
    assert cache_key(path, stub(**changes)) != cache_key(path, stub()) == cache_key(path, stub())


def test_other_files_are_another_key(tmp_path: Path) -> None:
    """The order, where one file ends and the kind count as well as the bytes."""
    one, two, both = (
        file_of(tmp_path, *f) for f in (("1.txt", b"a"), ("2.txt", b"b"), ("3.txt", b"ab"))
    )
    lines = file_of(tmp_path, "3.jsonl", b"ab")
    border = file_of(tmp_path, "4.txt", b"a|False|b")
    lists = ([one, two], [two, one], [both], [lines], [one], [border])
    keys = [cache_key(sources_of(*paths), stub()) for paths in lists]
    assert len(set(keys)) == len(keys)
    upper = file_of(tmp_path, "5.JSONL", b"ab")
    assert cache_key(sources_of(upper), stub()) == cache_key(sources_of(lines), stub()), (
        "named otherwise, read alike"
    )


def test_truncated_token_file_is_noticed(tmp_path: Path, tokenizer: Any) -> None:
    path = file_of(tmp_path, "a.txt", b"some text")
    cache = tokenize_files([path], tokenizer, tmp_path / "cache").path
    with (cache / "tokens.bin").open("r+b") as file:
        file.truncate(8)
    with pytest.raises(DataError, match="has 8 bytes, expected 44"):
        tokenize_files([path], tokenizer, tmp_path / "cache")


def corpus(tmp_path: Path, tokenizer: Any, texts: list[str]) -> TokenFile:
    path = file_of(
        tmp_path, "c.jsonl", "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    )
    return tokenize_files([path], tokenizer, tmp_path / "cache")


def test_hold_out_depends_on_content_not_order(tmp_path: Path, tokenizer: Any) -> None:
    texts = [f"document {i} " * (1 + i % 5) for i in range(50)]

    def held(order: list[str], seed: int) -> set[bytes]:
        file = corpus(tmp_path, tokenizer, order)
        train, spans, _ = hold_out(file, 0.2, seed)
        assert len(train) + len(spans) == 50
        tokens = sum(b - a for a, b in spans)
        assert 0.1 < tokens / len(file.tokens) <= 0.2
        return {file.tokens[a:b].tobytes() for a, b in spans}

    assert held(texts, 0) == held(texts[::-1], 0) != held(texts, 1)


def test_one_document_gives_its_end(tmp_path: Path, tokenizer: Any) -> None:
    file = corpus(tmp_path, tokenizer, ["x" * 98])
    train, held, how = hold_out(file, 0.1, 0)
    assert train.tolist() == [[0, 90]] and held.tolist() == [[90, 100]]
    assert how == "the last 10 tokens of the longest document held out"
    with pytest.raises(DataError, match="3 tokens are too few"):
        hold_out(corpus(tmp_path, tokenizer, ["x"]), 0.1, 0)
