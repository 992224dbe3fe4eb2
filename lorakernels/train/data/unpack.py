# SPDX-License-Identifier: Apache-2.0
"""The bytes of a data file, unpacked."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lorakernels.train.errors import DataError, require

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Opened:
    """A data file. `file` has its bytes, unpacked; `packed` is the file itself, of `size` bytes."""

    file: IO[bytes]
    packed: IO[bytes]
    size: int

    def share(self) -> float:
        """How much of it was read, from 0 to 1."""
        return self.packed.tell() / self.size


@contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """A file, whose bytes are read to its end.

    Raises:
        DataError: the file cannot be read, is cut short, or has other bytes after the compressed data.
    """
    try:
        with ExitStack() as held:
            packed = held.enter_context(_packed(path))
            file = held.enter_context(_unpacked(packed, path.suffix.lower()))
            yield Opened(file, packed, path.stat().st_size)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} cannot be unpacked: {error}") from error
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error.strerror or error}") from error


def _packed(path: Path) -> Any:
    return (
        require("pyarrow").OSFile(str(path)) if path.suffix.lower() == ".zst" else path.open("rb")
    )


def _unpacked(packed: Any, suffix: str) -> Any:
    if suffix == ".zst":
        return io.BufferedReader(require("pyarrow").CompressedInputStream(packed, "zstd"))
    if suffix == ".gz":
        return gzip.open(packed, "rb")
    if suffix in (".bz2", ".xz"):
        make = bz2.BZ2Decompressor if suffix == ".bz2" else lzma.LZMADecompressor
        return io.BufferedReader(_Streams(packed, make))
    return packed


class _Streams(io.RawIOBase):
    """Compressed streams, one behind another.

    Python's own files of these kinds end without a word where something else follows a stream.
    """

    def __init__(self, file: IO[bytes], make: Callable[[], Any]) -> None:
        self._file, self._make, self._decoder = file, make, make()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = self._next(len(buffer))
            if data is None:
                return 0
            if data:
                buffer[: len(data)] = data
                return len(data)

    def _next(self, most: int) -> bytes | None:
        """The next bytes, perhaps none yet; None at the end of the file."""
        if self._decoder.eof:
            packed = self._decoder.unused_data.lstrip(b"\0") or self._file.read(_CHUNK).lstrip(
                b"\0"
            )
            if not packed:
                return None if not self._file.peek(1) else b""  # type: ignore[attr-defined]
            self._decoder = self._make()
        else:
            packed = self._file.read(_CHUNK) if self._decoder.needs_input else b""
            if self._decoder.needs_input and not packed:
                raise EOFError("it ended before its last stream did")
        return bytes(self._decoder.decompress(packed, most))

    def close(self) -> None:
        self._file.close()
        super().close()
