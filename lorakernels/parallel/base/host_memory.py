# SPDX-License-Identifier: Apache-2.0
"""How much memory of the host this process may take. Plain reading of files: no torch in here.

The limit is that of the control groups in which the process is. A group's limit holds for all groups within it, so the
smallest one counts. MemTotal says nothing in a container. In a virtual machine it may promise what is not there yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

UNLIMITED = 1 << 60  # version 1 writes the largest number of whole pages where there is no limit


class Group(NamedTuple):
    """A control group's memory in bytes. `used` leaves out cached files, which the kernel drops before it refuses."""

    limit: int
    used: int


def host_memory_limit(root: Path = Path("/")) -> int | None:
    """The smallest limit of this process's control groups in bytes, or None if they set none.

    Args:
        root: where /proc and /sys are.
    """
    return min((group.limit for group in _groups(root)), default=None)


def host_memory_left(root: Path = Path("/")) -> int | None:
    """What the control groups let this process take besides what is used, in bytes, or None if they set no limit."""
    return min((max(0, group.limit - group.used) for group in _groups(root)), default=None)


def check_host_memory(needed: int, given: int | None, root: Path = Path("/")) -> None:
    """Refuse to take `needed` bytes that the host does not have.

    Without a limit, the kernel's MemAvailable is taken, with a warning: other processes may take it meanwhile.

    Args:
        needed: for all processes on this host, in bytes.
        given: what they may take in all, in bytes. None reads the control groups' limit.
        root: where /proc and /sys are.

    Raises:
        ValueError: `needed` is more, or `given` is None and nothing says how much there is.
    """
    left, what = given, "host_memory"
    if left is None:
        left, what = host_memory_left(root), "what is left of the control group's memory"
    if left is None:
        left, what = _available(root), "MemAvailable of /proc/meminfo"
        warnings.warn(
            "no control group limits this process's memory, so MemAvailable counts, which other processes may take: "
            "say host_memory= in bytes",
            stacklevel=3,
        )
    if needed > left:
        raise ValueError(
            f"offload needs {needed:,} bytes of host memory in all, but {what} is {left:,}: offload less, or say "
            "host_memory= if there is more"
        )


def _available(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("host_memory must be given in bytes: /proc/meminfo has no MemAvailable")


def _groups(root: Path) -> Iterator[Group]:
    """The groups of this process that have a limit, outer ones too."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top, read = root / "sys/fs/cgroup", _version_2
        elif "memory" in controllers.split(","):
            top, read = root / "sys/fs/cgroup/memory", _version_1
        else:
            continue
        for folder in _upwards(top, path):
            found = read(folder)
            if found is not None and found.limit < UNLIMITED:
                yield found


def _upwards(top: Path, path: str) -> Iterator[Path]:
    """The folders of a group and of those around it. A container may see its own group as `top`, and not at `path`."""
    folder = top / path.lstrip("/")
    if ".." not in folder.parts:
        while folder != top:
            yield folder
            folder = folder.parent
    yield top


def _version_1(folder: Path) -> Group | None:
    files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return _group(folder, *files)


def _version_2(folder: Path) -> Group | None:
    return _group(folder, "memory.max", "memory.current", "inactive_file")


def _group(folder: Path, limit: str, usage: str, cached: str) -> Group | None:
    most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
    if not most.isdecimal():  # "max", or no such file
        return None
    stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
    dropped = int(stat.get(cached, 0))
    return Group(int(most), max(0, int(used or 0) - dropped))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
