# SPDX-License-Identifier: Apache-2.0
"""Tokenize text into memory-mapped files of token ids, which are written once.

    <cache>/<key>/tokens.bin   uint32 [n_tokens]            every document after the other
    <cache>/<key>/docs.bin     uint64 [n_documents + 1]     where each one starts
    <cache>/<key>/meta.json    counts, written last

``key`` hashes the bytes of the data files, the tokenizer and the special tokens. Changed inputs therefore never find
old tokens. The directory is written under another name, synced and renamed, so it is complete or absent.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lorakernels.train.errors import DataError
from lorakernels.train.files import replace_dir, write_bytes

FORMAT = 1
# A text file is tokenized in blocks of about this many characters. Each block ends after a newline if it has one.
BLOCK = 1 << 20
_TABLE = (
    'is a table: write it as .jsonl, one object with "text" per line, e.g. with '
    'datasets.Dataset.{reader}(PATH).to_json("data.jsonl")'
)
_PACKED = "is compressed: unpack it first, e.g. with {command}"
REFUSED = {
    ".json": "is one JSON value: write a list as .jsonl, one object with \"text\" per line, e.g. with jq -c '.[]'",
    ".ndjson": "has another name for .jsonl: rename it",
    ".csv": _TABLE.format(reader="from_csv"),
    ".tsv": _TABLE.format(reader="from_csv"),
    ".parquet": _TABLE.format(reader="from_parquet"),
    ".arrow": _TABLE.format(reader="from_file"),
    ".gz": _PACKED.format(command="gunzip -k"),
    ".zst": _PACKED.format(command="unzstd"),
    ".xz": _PACKED.format(command="unxz -k"),
    ".bz2": _PACKED.format(command="bunzip2 -k"),
    ".zip": _PACKED.format(command="unzip"),
}
# key of a row in other trainers' formats → the kind of row it marks
_ROWS = {
    "messages": "a chat",
    "conversations": "a chat",
    "conversation": "a chat",
    "prompt": "a prompt and its completion",
    "instruction": "an instruction and its answer",
}


def check_kind(path: Path) -> None:
    """Raise DataError if the file is missing, empty, or of a kind that must not be read as text."""
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise DataError(f"data file {path} {what}")
    if reason := REFUSED.get(path.suffix.lower()):
        raise DataError(f"data file {path} {reason}; text and .jsonl files are read")
    if path.stat().st_size == 0:
        raise DataError(f"data file {path} is empty")


def is_jsonl(path: Path) -> bool:
    return path.suffix.lower() == ".jsonl"


def read_documents(path: Path) -> Iterator[str]:
    """The documents of one file: a whole text file, or each line of a .jsonl file. Blank documents are left out.

    Raises:
        DataError: the file cannot be used (`check_kind`), is not UTF-8 or valid .jsonl, or holds only white space.
    """
    check_kind(path)
    found = False
    for text in _jsonl(path) if is_jsonl(path) else [_decode(path.read_bytes(), path, 0)]:
        if text.strip():
            found = True
            yield text
    if not found:
        raise DataError(f"data file {path} holds no text, only white space")


def _decode(raw: bytes, path: Path, offset: int, where: str = "") -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}{where}: byte {raw[error.start]:#04x} at offset {offset + error.start} is not UTF-8 "
            f"({error.reason}); convert the file to UTF-8 first"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


def _jsonl(path: Path) -> Iterator[str]:
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = _decode(raw, path, offset, f" line {number}")
            offset += len(raw)
            if line.strip():
                yield _text_of(line, f"{path} line {number}")


def _text_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of too many digits
        raise DataError(f"{where}: not a JSON object ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f'{where}: expected an object with "text", found {type(record).__name__}')
    if not isinstance(record.get("text"), str):
        raise DataError(f'{where}: expected a string under "text", found {_found(record)}')
    text: str = record["text"]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} of the text is a lone surrogate"
        ) from error
    return text


def _found(record: dict[str, Any]) -> str:
    if "text" in record:
        return type(record["text"]).__name__
    key = next((key for key in _ROWS if key in record), None)
    if key is None:
        return f"only {sorted(record)[:8]}"
    return (
        f'"{key}", {_ROWS[key]}: finetune learns whole texts; TRL\'s SFTTrainer takes such rows, with our layers after '
        "lorakernels.integrations.peft.patch(peft_model)"
    )


@dataclass(frozen=True)
class TokenFile:
    """The token ids of all documents, memory-mapped.

    Attributes:
        path: the cache directory.
        tokens: uint32 [n_tokens].
        docs: uint64 [n_documents + 1], where each document starts, and the end of the last.
        max_token: the largest id.
    """

    path: Path
    tokens: np.ndarray[Any, np.dtype[np.uint32]]
    docs: np.ndarray[Any, np.dtype[np.uint64]]
    max_token: int

    @property
    def spans(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 [n_documents, 2]: start and stop of each document."""
        docs = self.docs.astype(np.int64)
        return np.stack([docs[:-1], docs[1:]], axis=1)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = (
        backend.to_str()
        if backend is not None
        else json.dumps(sorted(tokenizer.get_vocab().items()))
    )
    specials = (type(tokenizer).__name__, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return hashlib.sha256(f"{specials}{body}".encode()).hexdigest()


def cache_key(paths: Sequence[Path], tokenizer: Any) -> str:
    digest = hashlib.sha256(f"{FORMAT} {tokenizer_fingerprint(tokenizer)}".encode())
    for path in paths:
        digest.update(f"|{is_jsonl(path)}|{path.stat().st_size}|".encode())
        try:
            file = path.open("rb")
        except OSError as error:
            raise DataError(f"data file {path} cannot be read: {error.strerror}") from error
        with file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:24]


def tokenize_files(paths: Sequence[Path], tokenizer: Any, cache: Path) -> TokenFile:
    """The tokens of the files, read from the cache if the same inputs were tokenized before."""
    for path in paths:
        check_kind(path)
    target = cache / cache_key(paths, tokenizer)
    if not (target / "meta.json").is_file():
        with replace_dir(target) as temporary:
            _write_tokens(paths, tokenizer, temporary)
    return open_tokens(target)


def _write_tokens(paths: Sequence[Path], tokenizer: Any, directory: Path) -> None:
    starts = array("Q", [0])
    max_token = 0
    with (directory / "tokens.bin").open("wb") as out:
        for path in paths:
            for ids in encode_documents(read_documents(path), tokenizer):
                if not len(ids):
                    continue
                max_token = max(max_token, int(ids.max()))
                starts.append(starts[-1] + len(ids))
                out.write(ids.tobytes())
    write_bytes(directory / "docs.bin", np.asarray(starts, dtype=np.uint64).tobytes())
    meta = {"tokens": starts[-1], "documents": len(starts) - 1, "max_token": max_token}
    write_bytes(directory / "meta.json", json.dumps(meta).encode())


def encode_documents(
    texts: Iterator[str], tokenizer: Any
) -> Iterator[np.ndarray[Any, np.dtype[np.uint32]]]:
    """Each document as uint32 [BOS] ids [EOS]. A special token that the tokenizer lacks is left out."""
    head = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    tail = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    while batch := list(islice(texts, 64)):
        blocks = [list(_blocks(text)) for text in batch]
        flat = [block for document in blocks for block in document]
        encoded = iter(tokenizer(flat, add_special_tokens=False, verbose=False)["input_ids"])
        for document in blocks:
            ids = [token for _ in document for token in next(encoded)]
            yield np.asarray(head + ids + tail, dtype=np.uint32)


def _blocks(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > BLOCK:
        cut = text.rfind("\n", start, start + BLOCK) + 1 or start + BLOCK
        yield text[start:cut]
        start = cut
    yield text[start:]


def open_tokens(directory: Path) -> TokenFile:
    """Map the two files. Raises DataError if a size differs from the size in meta.json."""
    meta = json.loads((directory / "meta.json").read_text())
    for name, size in (
        ("tokens.bin", 4 * meta["tokens"]),
        ("docs.bin", 8 * (meta["documents"] + 1)),
    ):
        found = (directory / name).stat().st_size
        if found != size:
            raise DataError(
                f"{directory / name} has {found} bytes, expected {size}: delete {directory} and run again"
            )
    tokens = np.memmap(directory / "tokens.bin", dtype=np.uint32, mode="r")
    docs = np.memmap(directory / "docs.bin", dtype=np.uint64, mode="r")
    return TokenFile(directory, tokens, docs, meta["max_token"])


Spans = np.ndarray[Any, np.dtype[np.int64]]


def hold_out(file: TokenFile, fraction: float, seed: int) -> tuple[Spans, Spans, str]:
    """Split into (training spans, held-out spans, a sentence about the split), by a hash of each document's tokens.

    The choice depends on content and seed, not on the order of the files. Documents are held out while they fit into
    `fraction` of all tokens. If none fits, as with one big file, the end of the longest document is held out instead.

    Raises:
        DataError: there are too few tokens to hold out that fraction.
    """
    spans = file.spans
    if fraction == 0:
        return spans, spans[:0], "nothing held out"
    lengths = spans[:, 1] - spans[:, 0]
    target = fraction * int(lengths.sum())
    held = np.zeros(len(spans), dtype=bool)
    room = target
    for index in _by_hash(file, spans, seed):
        if lengths[index] <= room and held.sum() < len(spans) - 1:
            held[index] = True
            room -= int(lengths[index])
    if held.any():
        return spans[~held], spans[held], f"{int(held.sum())} of {len(spans)} documents held out"
    longest = int(lengths.argmax())
    cut = int(spans[longest, 1]) - max(2, round(target))
    if cut - int(spans[longest, 0]) < 2:
        raise DataError(f"{int(lengths.sum())} tokens are too few to hold {fraction:g} of them out")
    train = spans.copy()
    train[longest, 1] = cut
    tail = np.array([[cut, spans[longest, 1]]], dtype=np.int64)
    return (
        train,
        tail,
        f"the last {int(spans[longest, 1]) - cut} tokens of the longest document held out",
    )


def _by_hash(file: TokenFile, spans: Spans, seed: int) -> list[int]:
    salt = seed.to_bytes(8, "little")
    keys = [
        hashlib.blake2b(file.tokens[start:stop].tobytes(), digest_size=8, key=salt).digest()
        for start, stop in spans
    ]
    return sorted(range(len(keys)), key=keys.__getitem__)
