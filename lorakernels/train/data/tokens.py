# SPDX-License-Identifier: Apache-2.0
"""Tokenize data into memory-mapped files of token ids, which are written once.

    <cache>/<key>/tokens.bin    uint32 [n_tokens]            every document after the other
    <cache>/<key>/docs.bin      uint64 [n_documents + 1]     where each one starts
    <cache>/<key>/trained.bin   uint8 [n_tokens]             1 where a token is trained; absent if all are
    <cache>/<key>/meta.json     counts and SHA-256 of the files, written last

``key`` hashes the bytes of the data files, the tokenizer, the special tokens, the chat template, the rules and
VERSION. Changed inputs therefore never find old tokens, nor those that an earlier version made of them. One process
writes, under a lock, while others wait. The directory is written under another name, synced and renamed, so it is
complete or absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lorakernels.train.data.encode import Encoded, Tokens, has_template
from lorakernels.train.data.formats import (
    PLAIN,
    Chat,
    Completion,
    Example,
    Format,
    Text,
    check_template,
    example_of,
    find_format,
    unread,
)
from lorakernels.train.data.sources import (
    DataSource,
    Row,
    RowError,
    Rows,
    find_sources,
    kind_of,
    read_rows,
)
from lorakernels.train.data.template_check import TemplateCheck
from lorakernels.train.errors import DataError
from lorakernels.train.files.files import replace_dir, write_bytes
from lorakernels.train.files.manifest import entry_of
from lorakernels.train.progress import Observer, nobody

# Of these files, and of how the files of this folder make tokens of rows, or refuse them. Without a chat template
# version 2 left out the "system", "tools" and "history" of instructions. Version 3 took the last of several
# values of one name in a JSON object. Version 4 took fields that the template does not write, and unknown roles.
VERSION = 5
Spans = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Rules:
    """How rows become tokens.

    Attributes:
        train_on_inputs: train every token, including prompts and other speakers.
        skip_bad_rows: count rows that cannot be used instead of raising.
    """

    train_on_inputs: bool = False
    skip_bad_rows: bool = False


@dataclass
class FileCounts:
    """The counts of one data file.

    Attributes:
        name: its path.
        entry: the place in --data that brought it.
        format: the name of its rows' format.
        documents: rows that became documents.
        bad, first_bad: rows that cannot be used, and the message about the first.
        empty: rows without a token that is trained.
        bare: prompts and completions that stand without the chat template, if there is one.
        unread: fields of rows that were not read.
        skipped: fields of chats that tell about them and that the chat template does not write.
    """

    name: str
    entry: int
    format: str = PLAIN
    documents: int = 0
    bad: int = 0
    first_bad: str = ""
    empty: int = 0
    bare: int = 0
    unread: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add_bad(self, error: RowError, skip: bool) -> None:
        if not skip:
            raise error
        self.first_bad = self.first_bad or str(error)
        self.bad += 1

    def add_left_out(self, unread: Sequence[str], skipped: Sequence[str]) -> None:
        self.unread += [name for name in dict.fromkeys(unread) if name not in self.unread]
        self.skipped += [name for name in dict.fromkeys(skipped) if name not in self.skipped]


@dataclass(frozen=True)
class TokenFile:
    """The token ids of all documents, memory-mapped.

    Attributes:
        path: the cache directory.
        tokens: uint32 [n_tokens].
        docs: uint64 [n_documents + 1], where each document starts, and the end of the last.
        max_token: the largest id.
        trained: uint8 [n_tokens], 1 where a token is trained. None if all are.
        files: what each data file gave, in the order of the documents.
        notes: sentences about data that was left out.
    """

    path: Path
    tokens: np.ndarray[Any, np.dtype[np.uint32]]
    docs: np.ndarray[Any, np.dtype[np.uint64]]
    max_token: int
    trained: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    files: tuple[FileCounts, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def spans(self) -> Spans:
        """int64 [n_documents, 2]: start and stop of each document."""
        docs = self.docs.astype(np.int64)
        return np.stack([docs[:-1], docs[1:]], axis=1)

    @property
    def whole(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool [n_documents]: whether a document makes sense from its start only, as all but plain text does."""
        return self._by_file([file.format != PLAIN for file in self.files], bool)

    @property
    def entries(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 [n_documents]: the place in --data that each document comes from."""
        return self._by_file([file.entry for file in self.files], np.int64)

    def place_of(self, token: int) -> str:
        """The data file that has `token` first, and which of the documents that it gave. ValueError: none has it."""
        positions = np.flatnonzero(self.tokens == token)
        if not len(positions):
            raise ValueError(f"no document has token {token}")
        number = int(np.searchsorted(self.docs, positions[0], "right")) - 1
        ends = np.cumsum([file.documents for file in self.files])
        file = int(np.searchsorted(ends, number, "right"))
        return f"{self.files[file].name}, document {number + 1 - ends[file] + self.files[file].documents}"

    def _by_file(self, values: list[Any], dtype: Any) -> Any:
        return np.repeat(np.asarray(values, dtype), [file.documents for file in self.files])


def tokenizer_fingerprint(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = (
        backend.to_str()
        if backend is not None
        else json.dumps(sorted(tokenizer.get_vocab().items()))
    )
    specials = (type(tokenizer).__name__, tokenizer.bos_token_id, tokenizer.eos_token_id)
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(f"{specials}{template}{body}".encode()).hexdigest()


def cache_key(sources: Sequence[DataSource], tokenizer: Any, rules: Rules = Rules()) -> str:
    digest = hashlib.sha256(f"{VERSION} {rules} {tokenizer_fingerprint(tokenizer)}".encode())
    for source in sources:
        digest.update(f"|{source.entry}|{kind_of(source.path)}|".encode())
        for path in _parts(source.path):
            _digest_file(digest, path)
    return digest.hexdigest()[:24]


def _parts(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]


def _digest_file(digest: Any, path: Path) -> None:
    digest.update(f"|{path.stat().st_size}|".encode())
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error.strerror}") from error
    with file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)


def tokenize_files(
    paths: Sequence[Path],
    tokenizer: Any,
    cache: Path,
    rules: Rules = Rules(),
    progress: Observer = nobody,
) -> TokenFile:
    """The tokens of the data, read from the cache if the same inputs were tokenized before.

    ``progress`` reports (bytes of files that became tokens, bytes of all files).

    Raises:
        DataError: a file or a row cannot be used; the message names file, line and field.
    """
    sources, notes = find_sources(paths)
    target = cache / cache_key(sources, tokenizer, rules)
    with _one_writer(cache):
        if not (target / "meta.json").is_file():
            with replace_dir(target) as temporary:
                tokens = Tokens(tokenizer, rules.train_on_inputs)
                _write(_Reading(sources, progress), tokens, temporary, rules.skip_bad_rows)
    file = open_tokens(target, notes)
    for counts, source in zip(file.files, sources, strict=True):
        # equal files may have had other names when they were tokenized
        counts.name = str(source.path)
    return file


@contextlib.contextmanager
def _one_writer(cache: Path) -> Iterator[None]:
    """Hold the lock of a cache, a file in the same folder. It is released with the process, however that ends."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.with_name(f".{cache.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Reading:
    """The data files in their order. It tells an observer how much of them was read."""

    def __init__(self, sources: Sequence[DataSource], progress: Observer) -> None:
        self.sources, self.progress = sources, progress
        self._sizes = [sum(p.stat().st_size for p in _parts(s.path)) for s in sources]
        self._total, self._before, self._size = sum(self._sizes), 0, 0

    def __iter__(self) -> Iterator[DataSource]:
        for source, size in zip(self.sources, self._sizes, strict=True):
            self._size = size
            yield source
            self.share(1.0)
            self._before += size

    def share(self, share: float) -> None:
        """So much of the file was read, from 0 to 1."""
        self.progress(self._before + int(share * self._size), self._total)

    def rows(self, path: Path) -> Rows:
        for row in read_rows(path):
            yield row
            if isinstance(row, Row):
                self.share(row.read)


def _write(reading: _Reading, tokens: Tokens, directory: Path, skip: bool) -> None:
    files, check = [], TemplateCheck(tokens.tokenizer)
    with _Writer(directory) as writer:
        for source in reading:
            counts = FileCounts(str(source.path), source.entry)
            files.append(counts)
            examples = _examples(reading.rows(source.path), check, counts, skip)
            encoded = tokens.encode(examples, reading.share)
            for document in _documents(source.path, encoded, counts, skip):
                writer.add(document)
    writer.finish(files)


def _documents(
    path: Path, every: Iterable[Encoded | RowError], counts: FileCounts, skip: bool
) -> Iterator[Encoded]:
    """The documents of one file that have a token to train. Blank texts are left out."""
    for encoded in every:
        if isinstance(encoded, RowError):
            counts.add_bad(encoded, skip)
        elif not len(encoded.ids):
            continue
        elif encoded.trained is not None and not encoded.trained[1:].any():
            counts.empty += 1
        else:
            counts.documents += 1
            yield encoded
    if not counts.documents:
        raise _nothing(path, counts)


def _nothing(path: Path, counts: FileCounts) -> DataError:
    if counts.bad:
        return DataError(f"data file {path} has no row that can be used: {counts.first_bad}")
    if counts.empty:
        return DataError(
            f"data file {path} has no answer to train: give --train-on-inputs to train all of it"
        )
    return DataError(f"data file {path} holds no text, only white space")


def _examples(
    rows: Rows, check: TemplateCheck, counts: FileCounts, skip: bool
) -> Iterator[Example]:
    form: Format | None = None
    template = has_template(check.tokenizer)
    for row in rows:
        try:
            if isinstance(row, RowError):
                raise row
            form = form or find_format(row)
            example = example_of(row, form, template)
            check_template(template, example)
            skipped = check.skipped(example) if isinstance(example, Chat) else ()
            counts.add_left_out(unread(row, form, example), skipped)
        except RowError as error:
            counts.add_bad(error, skip)
            continue
        counts.format = form.name
        counts.bare += template and isinstance(example, Completion)
        if not isinstance(example, Text) or example.text.strip():
            yield example


class _Writer:
    """Appends documents to the files of a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.starts = directory, array("Q", [0])
        self.max_token, self.masked = 0, False

    def __enter__(self) -> _Writer:
        self._tokens = (self.directory / "tokens.bin").open("wb")
        self._trained = (self.directory / "trained.bin").open("wb")
        return self

    def __exit__(self, *exc: object) -> None:
        self._tokens.close()
        self._trained.close()

    def add(self, document: Encoded) -> None:
        ids, trained = document.ids, document.trained
        self.max_token = max(self.max_token, int(ids.max()))
        self.starts.append(self.starts[-1] + len(ids))
        self._tokens.write(ids.tobytes())
        self.masked = self.masked or trained is not None
        everything = np.ones(len(ids), dtype=np.uint8)
        self._trained.write((everything if trained is None else trained.astype(np.uint8)).tobytes())

    def finish(self, files: list[FileCounts]) -> None:
        """Write the documents' starts, then meta.json."""
        names = ["tokens.bin", "docs.bin", *(["trained.bin"] if self.masked else [])]
        if not self.masked:
            (self.directory / "trained.bin").unlink()
        write_bytes(self.directory / "docs.bin", np.asarray(self.starts, dtype=np.uint64).tobytes())
        meta = {
            "max_token": self.max_token,
            "sources": [asdict(file) for file in files],
            "files": {name: entry_of(self.directory / name) for name in names},
        }
        write_bytes(self.directory / "meta.json", json.dumps(meta).encode())


def open_tokens(directory: Path, notes: Sequence[str] = ()) -> TokenFile:
    """Map the files. Raises DataError if one differs from what was written."""
    meta = json.loads((directory / "meta.json").read_text())
    for name, wanted in meta["files"].items():
        entry = entry_of(directory / name)
        if entry != wanted:
            what = "does not match its SHA-256"
            if entry["bytes"] != wanted["bytes"]:
                what = f"has {entry['bytes']} bytes, expected {wanted['bytes']}"
            raise DataError(f"{directory / name} {what}: delete {directory} and run again")
    masked = "trained.bin" in meta["files"]
    return TokenFile(
        directory,
        np.memmap(directory / "tokens.bin", dtype=np.uint32, mode="r"),
        np.memmap(directory / "docs.bin", dtype=np.uint64, mode="r"),
        meta["max_token"],
        np.memmap(directory / "trained.bin", dtype=np.uint8, mode="r") if masked else None,
        tuple(FileCounts(**counts) for counts in meta["sources"]),
        tuple(notes),
    )
