# SPDX-License-Identifier: Apache-2.0
"""How much memory of the host this process may take, read from files of the kernel. This file does not import torch.

The control groups of the process limit it. A group's limit holds for all groups within it, so the smallest limit
counts. MemTotal is of no use: in a container it is the host's, and in a virtual machine it may exceed what is there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

UNLIMITED = 1 << 60  # without a limit, version 1 reports the largest number of whole pages


class ControlGroup(NamedTuple):
    """A control group's memory in bytes. `used` leaves out cached files, which the kernel can drop."""

    limit: int
    used: int


def host_memory_limit(root: Path = Path("/")) -> int | None:
    """The smallest limit of this process's control groups in bytes, or None if they set none.

    Args:
        root: the folder that has /proc and /sys.
    """
    return min((group.limit for group in _groups(root)), default=None)


def host_memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that the control groups still let this process take, or None if they set no limit."""
    return min((max(0, group.limit - group.used) for group in _groups(root)), default=None)


def check_host_memory(needed: int, budget: int | None, root: Path = Path("/")) -> None:
    """Refuse to take `needed` bytes that the host does not have.

    If no control group has a limit, the kernel's MemAvailable counts, with a warning.

    Args:
        needed: bytes for all processes on this host.
        budget: bytes that they may take in all. None reads the control groups' limit.
        root: the folder that has /proc and /sys.

    Raises:
        ValueError: `needed` is more, or `budget` is None and no file says how much memory there is.
    """
    left, source = budget, "host_memory"
    if left is None:
        left, source = host_memory_left(root), "the memory left in the control group"
    if left is None:
        left, source = _available(root), "MemAvailable of /proc/meminfo"
        warnings.warn(
            "no control group limits this process's memory, so MemAvailable counts, which other processes may take: "
            "pass host_memory= in bytes",
            stacklevel=3,
        )
    if needed > left:
        raise ValueError(
            f"offload needs {needed:,} bytes of host memory in all, but {source} is {left:,}: offload less, or pass "
            "host_memory= if there is more"
        )


def _available(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("host_memory must be given in bytes: /proc/meminfo has no MemAvailable")


def _groups(root: Path) -> Iterator[ControlGroup]:
    """The control groups of this process that have a limit, with the groups around them."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top, read = root / "sys/fs/cgroup", _version_2
        elif "memory" in controllers.split(","):
            top, read = root / "sys/fs/cgroup/memory", _version_1
        else:
            continue
        for folder in _upwards(top, path):
            group = read(folder)
            if group is not None and group.limit < UNLIMITED:
                yield group


def _upwards(top: Path, path: str) -> Iterator[Path]:
    """The folders of a group and of the groups around it. In a container `top` may be the group itself."""
    folder = top / path.lstrip("/")
    if ".." not in folder.parts:
        while folder != top:
            yield folder
            folder = folder.parent
    yield top


def _version_1(folder: Path) -> ControlGroup | None:
    files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return _group(folder, *files)


def _version_2(folder: Path) -> ControlGroup | None:
    return _group(folder, "memory.max", "memory.current", "inactive_file")


def _group(folder: Path, limit: str, usage: str, cached: str) -> ControlGroup | None:
    most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
    if not most.isdecimal():  # "max", or no such file
        return None
    stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
    dropped = int(stat.get(cached, 0))
    return ControlGroup(int(most), max(0, int(used or 0) - dropped))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
