# SPDX-License-Identifier: Apache-2.0
"""Write safetensors files tensor by tensor, into a directory that appears whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}


class ShardWriter:
    """Writes one safetensors file. The dtypes and shapes of all its tensors are known from the start.

    Args:
        path: the file.
        layout: {name: (safetensors' dtype, shape, bytes)}.
    """

    def __init__(self, path: Path, layout: dict[str, tuple[str, tuple[int, ...], int]]) -> None:
        self._file = path.open("wb")
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        # The widest dtypes come first, so every tensor is aligned.
        for name in sorted(layout, key=lambda name: (-_width(layout[name]), name)):
            dtype, shape, size = layout[name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            self._places[name] = (end, size)
            end += size
        data = json.dumps(header).encode()
        data += b" " * (-len(data) % 8)
        self._start = 8 + len(data)
        self._file.write(len(data).to_bytes(8, "little") + data)
        self._file.truncate(self._start + end)

    def write(self, name: str, tensor: Tensor) -> None:
        start, size = self._places.pop(name)
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        assert flat.numel() == size, f"{name}: {flat.numel()} bytes where {size} were announced"
        self._file.seek(self._start + start)
        self._file.write(flat.numpy().data)

    def close(self) -> None:
        """Check that every tensor was written, sync the file and close it."""
        assert not self._places, f"never written: {sorted(self._places)}"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        self._file.close()


def _width(entry: tuple[str, tuple[int, ...], int]) -> int:
    count = torch.Size(entry[1]).numel()
    return entry[2] // count if count else 0


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory to fill. On leaving, it is synced and replaces `target`.

    On an error the temporary directory is removed. If the process is killed, the next call removes the leftovers.
    Two renames replace an old `target`. Between them the old one is beside it as `.old-NAME`, and the next call
    restores it.

    Raises:
        BlockingIOError: another process is filling the directory.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (target.with_name(f".{what}-{target.name}") for what in ("partial", "old"))
    recover(target)
    partial.mkdir(exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        _lock(lock, target)
        for path in partial.iterdir():
            _remove(path)
        try:
            yield partial
            _sync(partial)
            shutil.rmtree(old, ignore_errors=True)
            if target.exists():
                target.rename(old)
            partial.rename(target)
        except BaseException:
            recover(target)
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync_one(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        os.close(lock)


def recover(target: Path) -> None:
    """Restore the old `target` if a process was killed between the two renames of `new_directory`."""
    old = target.with_name(f".old-{target.name}")
    if old.exists() and not target.exists():
        old.rename(target)


def _lock(descriptor: int, target: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(
            error.errno, "another process is writing this directory", str(target)
        ) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    """fsync the files in `folder` and `folder` itself."""
    for path in [*(p for p in folder.iterdir() if p.is_file()), folder]:
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
