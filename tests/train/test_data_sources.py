# SPDX-License-Identifier: Apache-2.0
"""The same rows give the same tokens, whatever file holds them; and what is left out is said."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from pathlib import Path

import pytest

from lorakernels.train.data.prepare import load_data
from lorakernels.train.data.sources import find_sources, held_entries
from lorakernels.train.data.tokens import tokenize_files
from lorakernels.train.errors import DataError
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks
from tests.train.chats import jsonl, shown, tokenizer_with, tokens_of, turns

ROWS = [
    {"messages": turns("a", "b"), "id": 1},
    {"messages": [*turns("c", "d"), {"role": "user", "content": 'say "e"\n'}, *turns("", "f")[1:]]},
]


def write(path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    kind = path.name.split(".", 1)[1]
    if kind == "json":
        path.write_text("\ufeff" + json.dumps(ROWS, indent=2))
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="," if kind == "csv" else "\t")
            writer.writerows([["id", "messages"], *([3, json.dumps(r["messages"])] for r in ROWS)])
    elif kind == "parquet":
        pytest.importorskip("datasets").Dataset.from_list(ROWS).to_parquet(str(path))
    elif kind == "folder":
        pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(str(path))
    elif kind == "splits":
        datasets = pytest.importorskip("datasets")
        train = datasets.Dataset.from_list(ROWS)
        datasets.DatasetDict(train=train, test=train.select([0])).save_to_disk(str(path))
    elif kind.endswith("zst"):
        pytest.importorskip("pyarrow").output_stream(str(path), compression="zstd").write(
            lines.encode()
        )
    else:
        opener = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}.get(kind[-3:].strip("."), open)
        with opener(path, "wb") as file:
            file.write(lines.encode())


@pytest.mark.parametrize(
    "kind",
    [
        *("jsonl", "ndjson", "json", "JSON.lines.json", "csv", "tsv", "parquet", "folder", "splits"),
        *("jsonl.gz", "jsonl.bz2", "jsonl.xz", "jsonl.zst"),
    ],
)  # fmt: skip
def test_every_kind_of_file_gives_the_same_tokens(tmp_path: Path, kind: str) -> None:
    tokenizer = tokenizer_with()
    expected = tokens_of(jsonl(tmp_path / "expected.jsonl", ROWS), tokenizer)
    path = tmp_path / f"a.{kind}"
    write(path)
    found = tokens_of(path, tokenizer)
    assert [shown(found, tokenizer, n) for n in (0, 1)] == [
        shown(expected, tokenizer, n) for n in (0, 1)
    ]
    assert found.docs.tolist() == expected.docs.tolist()
    assert len(found.notes) == (kind == "splits")


def test_a_table_of_texts(tmp_path: Path) -> None:
    """A blank line of a table is no row."""
    path = tmp_path / "a.csv"
    path.write_text('text,n\n"one, ""two""\nthree",1\n\nfour,2\n')
    tokenizer = tokenizer_with(None)
    file = tokens_of(path, tokenizer)
    texts = [shown(file, tokenizer, n) for n in (0, 1)]
    assert texts == ['⟦<bos>one, "two"\nthree<eos>⟧', "⟦<bos>four<eos>⟧"]


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_columns_of_one_name_are_refused(tmp_path: Path, kind: str) -> None:
    """Also where bad rows may be skipped: it is no row's fault. Nameless columns of spreadsheets are no fields."""
    path, tokenizer = tmp_path / f"a.{kind}", tokenizer_with(None)
    lines = ["text,,n,", "one,,1,", "two,,2,"]
    path.write_text("\n".join(lines).replace(",", "," if kind == "csv" else "\t"))
    assert len(tokens_of(path, tokenizer).spans) == 2
    lines[0] = "text,text,n,n"
    path.write_text("\n".join(lines).replace(",", "," if kind == "csv" else "\t"))
    for skip in (False, True):
        with pytest.raises(DataError, match=rf"a\.{kind} line 1: .* columns named 'n', 'text'"):
            tokens_of(path, tokenizer, skip_bad_rows=skip)


def test_a_folder_is_its_data_files_and_held_out_data_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    (folder / ".cache").mkdir()
    jsonl(folder / "train-0.jsonl", [{"text": "one"}])
    jsonl(folder / "more" / "notes.jsonl", [{"text": "two"}])
    jsonl(folder / "test-0.jsonl", [{"text": "secret"}])
    jsonl(folder / ".cache" / "x.jsonl", [{"text": "hidden"}])
    (folder / "README.md").write_text("about")
    tokenizer = tokenizer_with(None)
    file = tokenize_files([folder], tokenizer, tmp_path / "cache")
    texts = [shown(file, tokenizer, n) for n in range(len(file.spans))]
    assert texts == ["⟦<bos>two<eos>⟧", "⟦<bos>one<eos>⟧"]
    assert file.notes == (
        f"{folder}: 1 files of other kinds left out: README.md",
        f"{folder / 'test-0.jsonl'} left out: its name is that of held-out data (see --eval-data)",
    )
    alone = tokenize_files([folder / "test-0.jsonl"], tokenizer, tmp_path / "cache")
    assert len(alone.spans) == 1, "a file that is named itself is read"


def test_the_last_suffix_says_what_a_file_is(tmp_path: Path) -> None:
    """Backups, checksums, locks and what an editor leaves are no data, though their names hold that of some."""
    data = ["chat.jsonl", "b.JSON", "c.txt.gz", "d.tar.csv", "e.v2.parquet"]
    strays = [
        *("chat.jsonl.bak", "chat.jsonl.sha256", "a.txt.swp", "m.json.lock", "export.csv.py", "chat.jsonl~"),
        *("c.txt.gz.part", "f.tar.gz", "g.jsonl.zip", "h.gz", "x.bak"),
    ]  # fmt: skip
    for name in (*data, *strays):
        (tmp_path / name).write_text("x\n")
    files, notes = find_sources([tmp_path])
    assert [source.path.name for source in files] == sorted(data)
    (note,) = notes
    assert note.startswith(
        f"{tmp_path}: 11 files of other kinds left out: a.txt.swp, c.txt.gz.part, "
    )
    assert note.endswith(" and 3 more")


def test_a_file_whose_name_tells_no_kind_is_read_as_text_and_said(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl.bak"
    path.write_text('{"text": "a"}\n')
    file = tokens_of(path, tokenizer_with(None))
    assert file.notes == (f"{path}: read as plain text, one document, by its name",)
    assert (
        tokens_of(jsonl(tmp_path / "chat.jsonl", [{"text": "a"}]), tokenizer_with(None)).notes == ()
    )


@pytest.mark.parametrize(
    ("name", "message"), [("a.tar.gz", "is an archive"), ("a.txt", "is no text: byte 2 is 0"), ("a", "is no text")]
)  # fmt: skip
def test_what_is_no_text_is_not_read_as_one(tmp_path: Path, name: str, message: str) -> None:
    """An archive of texts is UTF-8, too."""
    raw = b"ab\0\0c\n"
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    with pytest.raises(DataError, match=message):
        tokens_of(tmp_path / name, tokenizer_with(None))


def test_what_is_evaluated_of_a_folder_that_holds_training_data_too(tmp_path: Path) -> None:
    """Never its training data. A folder without such names is evaluated whole."""
    folder, plain = tmp_path / "data", tmp_path / "plain"
    for each in (folder / "more", plain / "train"):
        each.mkdir(parents=True)
    for name in ("train-0.jsonl", "test-0.jsonl", "more/val.jsonl", "notes.jsonl"):
        jsonl(folder / name, [{"text": name}])
    (folder / "test.md").write_text("about")
    jsonl(plain / "test.jsonl", [{"text": "x"}])
    missing = tmp_path / "missing"
    assert held_entries([folder, plain, missing]) == (
        [folder / "more" / "val.jsonl", folder / "test-0.jsonl", plain, missing],
        [f"{folder}: evaluated on val.jsonl, test-0.jsonl alone"],
    )


def test_the_split_that_is_evaluated(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    for names in (["train", "test"], ["train"], ["train", "test", "validation"]):
        datasets.DatasetDict(dict.fromkeys(names, rows)).save_to_disk(tmp_path / "-".join(names))
    both, alone, three = (
        tmp_path / name for name in ("train-test", "train", "train-test-validation")
    )
    assert held_entries([both, alone]) == (
        [both / "test", alone],
        [f"{both}: evaluated on test alone"],
    )
    with pytest.raises(DataError, match=r"name one, .*/SPLIT of \['test', 'validation'\]"):
        held_entries([three])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"splits": null}', "\udcff"], ids=ascii)
def test_a_list_of_splits_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    """As data, and as held-out data."""
    (tmp_path / "dataset_dict.json").write_bytes(text.encode(errors="surrogateescape"))
    for read in (held_entries, find_sources):
        with pytest.raises(
            DataError, match=r'dataset_dict\.json must be JSON with a list of "splits"'
        ):
            read([tmp_path])


def test_a_run_s_held_out_data_are_not_its_training_data(tmp_path: Path) -> None:
    """One folder given as both."""
    jsonl(tmp_path / "train.jsonl", [{"text": "trained " * 9}])
    jsonl(tmp_path / "test.jsonl", [{"text": "held"}])
    folder, tokenizer = str(tmp_path), tokenizer_with(None)
    options = FinetuneOptions(data=[folder], eval_data=[folder], seq_len=128)
    said: list[str] = []
    data = load_data(options, tokenizer, tmp_path / ".cache", said.append, RunRanks())
    first = [
        tokenizer.decode(rows.batch([0]).input_ids[0, 1:5]) for rows in (data.train, data.held)
    ]
    assert first == ["trai", "held"]
    assert f"{tmp_path}: evaluated on test.jsonl alone" in said


def test_a_folder_without_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.py").write_text("x")
    with pytest.raises(DataError, match=r"data holds none of \.jsonl, "):
        tokenize_files([tmp_path / "data"], tokenizer_with(None), tmp_path / "cache")


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_rows_behind_one_with_a_name_twice_are_read(tmp_path: Path, kind: str) -> None:
    path, rows = (
        tmp_path / f"a.{kind}",
        ['{"text": "a"}', '{"text": 1, "text": [3]}', '{"text": "b"}'],
    )
    path.write_text("\n".join(rows) if kind == "jsonl" else f"[{','.join(rows)}]")
    file, tokenizer = (
        tokens_of(path, tokenizer_with(None), skip_bad_rows=True),
        tokenizer_with(None),
    )
    assert [shown(file, tokenizer, n) for n in (0, 1)] == ["⟦<bos>a<eos>⟧", "⟦<bos>b<eos>⟧"]
    assert (file.files[0].documents, file.files[0].bad) == (2, 1)


@pytest.mark.parametrize("between", ["", "\n", "\n\n[]\n"])
def test_lists_behind_another_are_read(tmp_path: Path, between: str) -> None:
    """As of `cat a.json b.json`."""
    path, rows = tmp_path / "a.json", json.dumps([{"text": "a"}, {"text": "b"}])
    path.write_text(rows + between + rows + "\n")
    assert len(tokens_of(path, tokenizer_with(None)).spans) == 4


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_what_follows_a_compressed_stream_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    """Python's own readers of .bz2 and .xz end there without a word."""
    packers = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    if kind == "zst":
        packers["zst"] = pytest.importorskip("pyarrow").Codec("zstd").compress
    one, two = (bytes(packers[kind](f'{{"text": "{c * 99999}"}}\n'.encode())) for c in "ab")
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(one + two)
    assert len(tokens_of(path, tokenizer_with(None)).spans) == 2
    if kind != "zst":
        path.write_bytes(one + bytes(8) + two + bytes(4))
        assert len(tokens_of(path, tokenizer_with(None)).spans) == 2, "zeros are padding"
    for rest in (b'{"text": "b"}\n', two[:-9]):
        path.write_bytes(one + rest)
        with pytest.raises(DataError, match=rf"a\.jsonl\.{kind} cannot be "):
            tokens_of(path, tokenizer_with(None), skip_bad_rows=True)


def test_rows_behind_a_quote_that_does_not_end_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,n\n"one,1\n"two",2\nthree,3\n')
    file = tokens_of(path, tokenizer_with(None), skip_bad_rows=True)
    assert (len(file.spans), file.files[0].bad) == (1, 1)
    assert "a.csv lines 2 to 3: " in file.files[0].first_bad


def test_columns_of_one_name_in_a_parquet_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: there are several columns named 'text'"):
        tokens_of(tmp_path / "a.parquet", tokenizer_with(None))


def test_a_list_that_was_cut_off_gives_its_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS * 2, indent=1)[:-30])
    file = tokens_of(path, tokenizer_with(), skip_bad_rows=True)
    assert (len(file.spans), file.files[0].bad) == (3, 1)
    assert "not a whole JSON value" in file.files[0].first_bad
