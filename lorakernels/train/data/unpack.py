# SPDX-License-Identifier: Apache-2.0
"""The bytes of a data file, unpacked."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lorakernels.train.errors import DataError, require

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_CHUNK = 1 << 16


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, to its end.

    Raises:
        DataError: the file cannot be read, is cut short, or has something else behind what is compressed.
    """
    try:
        with _unpacked(path) as file:
            yield file
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} cannot be unpacked: {error}") from error
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error.strerror or error}") from error


def _unpacked(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".zst":
        return io.BufferedReader(require("pyarrow").input_stream(str(path), compression="zstd"))
    if suffix == ".gz":
        return gzip.open(path, "rb")
    if suffix in (".bz2", ".xz"):
        make = bz2.BZ2Decompressor if suffix == ".bz2" else lzma.LZMADecompressor
        return io.BufferedReader(_Streams(path.open("rb"), make))
    return path.open("rb")


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
