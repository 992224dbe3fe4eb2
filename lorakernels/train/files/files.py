# SPDX-License-Identifier: Apache-2.0
"""Files that are complete or absent.

They are written under another name, synced and renamed. The directory around them is synced after that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        write_bytes(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def recover_dir(target: Path) -> bool:
    """Restore `target` if a `replace_dir` was killed between its two renames. Returns whether anything was restored."""
    old = target.with_name(f".old-{target.name}")
    if target.exists() or not old.exists():
        return False
    old.rename(target)
    return True


@contextlib.contextmanager
def replace_dir(target: Path) -> Iterator[Path]:
    """Yield a directory to fill. On leaving, it is synced and replaces `target`; on an error it is removed.

    An existing `target` survives any error. After a kill between the two renames, `recover_dir` restores it. Where it
    is a link, the directory that it names is replaced, and the link stays.
    """
    target = target.resolve() if target.is_symlink() else target
    target.parent.mkdir(parents=True, exist_ok=True)
    recover_dir(target)
    temporary = target.with_name(f".tmp-{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in [p for p in temporary.rglob("*") if p.is_file() or p.is_dir()]:
            sync(path)
        sync(temporary)
        old = target.with_name(f".old-{target.name}")
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        temporary.rename(target)
    except BaseException:
        recover_dir(target)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)
