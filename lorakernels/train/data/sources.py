# SPDX-License-Identifier: Apache-2.0
"""Find the data files and read their rows.

A row is what one line of a .jsonl file holds. Every reader yields rows and, for a row that cannot be read, its error,
so that the caller may go on.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorakernels.train.data.unpack import COMPRESSED, Opened, opened
from lorakernels.train.errors import DataError, require
from lorakernels.train.files.searched import ON_DISK, SPLITS, is_searched
from lorakernels.train.files.unique_names import NameTwice, load_json, load_json_at, twice

TEXT = ".txt"
KINDS = {
    ".jsonl": ".jsonl",
    ".ndjson": ".jsonl",
    ".json": ".json",
    ".csv": ".csv",
    ".tsv": ".tsv",
    ".parquet": ".parquet",
    ".arrow": ".arrow",
    ".txt": TEXT,
}
REFUSED = {
    ".zip": "is an archive: unpack it first, e.g. with unzip",
    ".tar": "is an archive: unpack it first, e.g. with tar -xf",
    ".tgz": "is an archive: unpack it first, e.g. with tar -xf",
    ".xlsx": "is a spreadsheet: write it as .csv",
}
_HELD_BACK = re.compile(r"(^|[^a-z])(test|val|valid|validation|dev|eval)([^a-z]|$)")
_TRAINED = re.compile(r"(^|[^a-z])train([^a-z]|$)")


class RowError(DataError):
    """One row cannot be used. The message names its file, its place in the file, and its field."""


@dataclass(frozen=True)
class Row:
    """One row of a data file.

    ``where`` names file and line; ``value`` is what the row holds. ``read`` is the share of the file up to its end, 0
    of a file that is one document.
    """

    where: str
    value: Any
    read: float = 0.0


Rows = Iterator[Row | RowError]


@dataclass(frozen=True)
class DataSource:
    """One file, or one folder of the datasets library. ``entry`` is the place in --data that brought it."""

    entry: int
    path: Path


def kind_of(path: Path) -> str:
    """How the file is read: one of the values of KINDS, or "datasets" for a folder of the datasets library."""
    if path.is_dir():
        return "datasets"
    return KINDS.get(_suffix(path), TEXT)


def _suffix(path: Path) -> str:
    """The last suffix of a file's name, in small letters. A suffix for compression does not count."""
    suffixes = ["", *(suffix.lower() for suffix in path.suffixes)]
    return suffixes[-2] if suffixes[-1] in COMPRESSED else suffixes[-1]


def find_sources(paths: Sequence[Path]) -> tuple[list[DataSource], list[str]]:
    """The files that the entries of --data stand for, and sentences about files that were left out.

    Raises:
        DataError: a file is missing, empty, or of a kind that cannot be read.
    """
    sources: list[DataSource] = []
    notes: list[str] = []
    for entry, path in enumerate(paths):
        if path.is_dir() and not (path / ON_DISK).is_file():
            files, left = _files_of(path)
            notes.extend(left)
        else:
            files = [path]
            if path.is_file() and _suffix(path) not in KINDS:
                notes.append(f"{path}: read as plain text, one document, by its name")
        for file in files:
            check_kind(file)
        sources.extend(DataSource(entry, file) for file in files)
    return sources, notes


def held_entries(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The entries of --eval-data, and sentences about training data in the same folders, which is left out.

    If a folder has training and held-out splits, --eval-data reads the held-out split and --data the training split.

    Raises:
        DataError: a folder has several splits of held-out data.
    """
    entries: list[Path] = []
    notes: list[str] = []
    for path in paths:
        held = _held_in(path)
        entries += held or [path]
        notes += [f"{path}: evaluated on {', '.join(p.name for p in held)} alone"] if held else []
    return entries, notes


def _held_in(path: Path) -> list[Path]:
    """The parts of an entry that are held-out data by their names, if it has training data, too."""
    if (path / SPLITS).is_file():
        inside = [path / name for name in _splits(path)]
    else:
        inside = list(filter(_is_data, _visible(path))) if is_searched(path) else []
    names = [p.stem.lower() for p in inside]
    if not any(map(_TRAINED.search, names)):
        return []
    held = [p for p, name in zip(inside, names, strict=True) if _HELD_BACK.search(name)]
    if (path / SPLITS).is_file() and len(held) > 1:
        raise DataError(
            f"data folder {path} has several splits to evaluate on: name one, {path}/SPLIT of {[p.name for p in held]}"
        )
    return held


def _files_of(folder: Path) -> tuple[list[Path], list[str]]:
    if (folder / SPLITS).is_file():
        return _split_of(folder)
    shown = _visible(folder)
    files = list(filter(_is_data, shown))
    if not files:
        raise DataError(f"data folder {folder} holds none of {', '.join(KINDS)}")
    left = [str(path.relative_to(folder)) for path in shown if not _is_data(path)]
    notes = [f"{folder}: {len(left)} files of other kinds left out: {some(left)}"] if left else []
    if any(_TRAINED.search(p.stem.lower()) for p in files):
        held = [p for p in files if _HELD_BACK.search(p.stem.lower())]
        files = [p for p in files if p not in held]
        notes += [
            f"{p} left out: its name is that of held-out data (see --eval-data)" for p in held
        ]
    return files, notes


def _visible(folder: Path) -> list[Path]:
    """All files in a folder, at any depth, that are not hidden."""
    inside = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return [p for p in inside if not any(x[0] == "." for x in p.relative_to(folder).parts)]


def _is_data(path: Path) -> bool:
    return _suffix(path) in KINDS


def some(names: Sequence[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    rest = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _splits(folder: Path) -> list[str]:
    """The names of a DatasetDict's splits. Raises DataError if its list of them cannot be read."""
    try:
        return [str(name) for name in json.loads((folder / SPLITS).read_bytes())["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DataError(
            f'{folder / SPLITS} must be JSON with a list of "splits", found {what}'
        ) from error


def _split_of(folder: Path) -> tuple[list[Path], list[str]]:
    splits = _splits(folder)
    if "train" not in splits:
        raise DataError(
            f'data folder {folder} has no split "train": name one, {folder}/SPLIT of {splits}'
        )
    others = [name for name in splits if name != "train"]
    left = f"{folder}: the split train is read, not {', '.join(others)}"
    return [folder / "train"], [left] if others else []


def check_kind(path: Path) -> None:
    """Raise DataError if the file is missing, empty, or of a kind that cannot be read."""
    if path.is_dir():
        return
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise DataError(f"data file {path} {what}")
    if reason := REFUSED.get(path.suffix.lower()) or REFUSED.get(_suffix(path)):
        raise DataError(f"data file {path} {reason}")
    if path.stat().st_size == 0:
        raise DataError(f"data file {path} is empty")
    if kind_of(path) in (".parquet", ".arrow") and path.suffix.lower() in COMPRESSED:
        raise DataError(f"data file {path} is compressed twice: unpack it once")


def read_rows(path: Path) -> Rows:
    """The rows of one file, in their order. A row that cannot be read is replaced by an error."""
    return _READERS[kind_of(path)](path)


def decode(raw: bytes, where: str, offset: int = 0) -> str:
    """UTF-8 text without a byte order mark. Raises RowError, which names the byte."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            f"{where}: byte {raw[error.start]:#04x} at offset {offset + error.start} is not UTF-8 "
            f"({error.reason}); convert the file to UTF-8 first"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


def _text(path: Path) -> Rows:
    with opened(path) as opening:
        raw = opening.file.read()
    if (place := raw.find(b"\0")) >= 0:
        raise DataError(f"data file {path} is no text: byte {place} is 0")
    try:
        yield Row(str(path), {"text": decode(raw, str(path))})
    except RowError as error:
        yield error


def _lines(path: Path) -> Rows:
    offset = 0
    with opened(path) as opening:
        for number, raw in enumerate(opening.file, start=1):
            where = f"{path} line {number}"
            try:
                line = decode(raw, where, offset)
                if line.strip():
                    yield Row(where, _parse(line, where), opening.share())
            except RowError as error:
                yield error
            offset += len(raw)


def _parse(line: str, where: str) -> Any:
    try:
        return load_json(line.rstrip("\r\n"))
    except NameTwice as error:
        raise RowError(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of too many digits
        what = str(error)
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        raise RowError(f"{where}: not a JSON object ({what})") from error


def _json(path: Path) -> Rows:
    """The elements of JSON lists, one list behind another. A file that does not begin with a list is read as .jsonl."""
    try:
        with opened(path) as opening:
            text = decode(opening.file.read(), str(path))
    except RowError as error:
        yield error
        return
    start = _skip(text, 0)
    if text[start : start + 1] == "[":
        yield from _lists(_Text(path, text), start)
    else:
        yield from _lines(path)


class _Text:
    """The text of a file, and the line of a place in it. Places come in their order."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
        self._line, self._counted = 1, 0

    def where(self, place: int) -> str:
        self._line += self.text.count("\n", self._counted, place)
        self._counted = place
        return f"{self.path} line {self._line}"


def _lists(file: _Text, start: int) -> Rows:
    """The elements of one list behind another. The last is an error where the text ends otherwise."""
    while file.text[start : start + 1] == "[":
        start = yield from _elements(file, _skip(file.text, start + 1))
    if start < len(file.text):
        what = f"expected another list or the end of the file, found {file.text[start]!r}"
        yield _broken(file.where(start), what)


def _elements(file: _Text, start: int) -> Generator[Row | RowError, None, int]:
    """The elements of a list from `start` on. Returns where the text behind it begins.

    A list that was cut off gives those elements that are whole, and an error.
    """
    text = file.text
    while text[start : start + 1] != "]":
        where = file.where(start)
        try:
            value, stop = load_json_at(text, start)
        except (ValueError, RecursionError) as error:
            yield _broken(where, f"not a whole JSON value ({error})")
            return len(text)
        if isinstance(value, NameTwice):
            yield RowError(f"{where}: {value}")
        else:
            yield Row(where, value, stop / len(text))
        start = _skip(text, stop)
        if text[start : start + 1] == ",":
            start = _skip(text, start + 1)
        elif text[start : start + 1] != "]":
            following = repr(text[start]) if start < len(text) else "the end of the file"
            yield _broken(where, f"expected a comma or ] after this value, found {following}")
            return len(text)
    return _skip(text, start + 1)


def _broken(where: str, what: str) -> RowError:
    """The last error of a file. Nothing after it can be read."""
    return RowError(f"{where}: {what}; nothing of the file behind it was read")


_SPACE = re.compile(r"[ \t\r\n]*")


def _skip(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    assert space is not None
    return space.end()


def _table(delimiter: str) -> Callable[[Path], Rows]:
    def read(path: Path) -> Rows:
        before = csv.field_size_limit(2**31 - 1)
        try:
            with opened(path) as opening:
                yield from _cells(path, opening, delimiter)
        finally:
            csv.field_size_limit(before)

    return read


def _cells(path: Path, opening: Opened, delimiter: str) -> Rows:
    file = io.TextIOWrapper(opening.file, "utf-8-sig", newline="")
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        first = reader.line_num + 1
        where = f"{path} line {first}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except UnicodeDecodeError as error:
            yield _broken(where, str(error))
            return
        except csv.Error as error:
            if reader.line_num > first:  # a quoted cell took them
                where = f"{path} lines {first} to {reader.line_num}"
            yield RowError(f"{where}: {error}")
            continue
        if not header:
            header = cells
            _check_header(where, header)
        elif len(cells) == len(header):
            yield Row(where, dict(zip(header, cells, strict=True)), opening.share())
        elif cells:
            yield RowError(f"{where}: {len(cells)} cells, the header has {len(header)} names")


def _check_header(where: str, names: Sequence[str]) -> None:
    """Raise DataError for columns of one name, as a row could keep only one. Nameless columns are no fields."""
    if several := twice(filter(None, names)):
        raise DataError(
            f"{where}: there are several columns named {', '.join(map(repr, several))}: give each another name"
        )


def _parquet(path: Path) -> Rows:
    parquet = require("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
        _check_header(str(path), file.schema_arrow.names)
        batches = file.iter_batches(batch_size=1024)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from _records(path, rows, file.metadata.num_rows)
    except (OSError, ValueError) as error:  # pyarrow's errors are among them
        raise DataError(f"{path} is not a parquet file that can be read: {error}") from error


def _arrow(path: Path) -> Rows:
    datasets = require("datasets")
    try:
        rows = datasets.Dataset.from_file(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a file of the datasets library: {error}") from error
    yield from _records(path, rows, len(rows))


def _on_disk(path: Path) -> Rows:
    datasets = require("datasets")
    try:
        rows = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a folder of the datasets library: {error}") from error
    yield from _records(path, rows, len(rows))


def _records(path: Path, records: Iterable[Any], total: int) -> Rows:
    """Tables fill up what a row lacks with nulls: those are taken out."""
    for number, record in enumerate(records, start=1):
        yield Row(f"{path} row {number}", _without_nulls(record), number / total)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


_READERS: dict[str, Callable[[Path], Rows]] = {
    TEXT: _text,
    ".jsonl": _lines,
    ".json": _json,
    ".csv": _table(","),
    ".tsv": _table("\t"),
    ".parquet": _parquet,
    ".arrow": _arrow,
    "datasets": _on_disk,
}
