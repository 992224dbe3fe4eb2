# SPDX-License-Identifier: Apache-2.0
"""The limit of host memory: control groups of both versions, nested, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorakernels.parallel.base.host_memory import (
    check_host_memory,
    host_memory_left,
    host_memory_limit,
)

GIB = 2**30
V1_NONE = 9223372036854771712  # what version 1 writes without a limit


def files(root: Path, contents: dict[str, object]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
CASES: dict[str, tuple[dict[str, object], int | None, int | None]] = {
    "version 2": (
        {
            "proc/self/cgroup": "0::/a",
            f"{V2}/a/memory.max": 8 * GIB,
            f"{V2}/a/memory.current": 3 * GIB,
            f"{V2}/a/memory.stat": f"anon 5\ninactive_file {GIB}",
        },
        8 * GIB,
        6 * GIB,
    ),
    "version 2, an outer group has less": (
        {
            "proc/self/cgroup": "0::/a/b",
            f"{V2}/a/memory.max": 4 * GIB,
            f"{V2}/a/memory.current": 2 * GIB,
            f"{V2}/a/b/memory.max": 5 * GIB,
            f"{V2}/a/b/memory.current": 4 * GIB,
        },
        4 * GIB,
        1 * GIB,
    ),
    "version 2, no limit": (
        {"proc/self/cgroup": "0::/a", f"{V2}/a/memory.max": "max"},
        None,
        None,
    ),
    "version 2, a container's own root": (
        {
            "proc/self/cgroup": "0::/../outside",
            f"{V2}/memory.max": GIB,
            f"{V2}/memory.current": GIB // 2,
        },
        GIB,
        GIB // 2,
    ),
    "version 1, nested": (
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/x/y",
            f"{V1}/memory.limit_in_bytes": V1_NONE,
            f"{V1}/x/memory.limit_in_bytes": 2 * GIB,
            f"{V1}/x/memory.usage_in_bytes": 1 * GIB,
            f"{V1}/x/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}",
            f"{V1}/x/y/memory.limit_in_bytes": V1_NONE,
        },
        2 * GIB,
        GIB + GIB // 4,
    ),
    "version 1, mounted at its own group": (
        {"proc/self/cgroup": "4:memory:/docker/1", f"{V1}/memory.limit_in_bytes": 7},
        7,
        7,
    ),
    "no control groups": ({}, None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_limit_counts(tmp_path: Path, name: str) -> None:
    contents, limit, left = CASES[name]
    root = files(tmp_path, contents)
    assert (host_memory_limit(root), host_memory_left(root)) == (limit, left)


def test_too_little_is_refused(tmp_path: Path) -> None:
    root = files(tmp_path, CASES["version 2"][0])
    check_host_memory(6 * GIB, None, root)
    with pytest.raises(
        ValueError, match=r"offload needs 6,442,450,945 .* left .* is 6,442,450,944"
    ):
        check_host_memory(6 * GIB + 1, None, root)


def test_what_is_given_comes_first(tmp_path: Path) -> None:
    root = files(tmp_path, CASES["version 2"][0])
    check_host_memory(7 * GIB, 7 * GIB, root)
    with pytest.raises(ValueError, match="host_memory is 5"):
        check_host_memory(6, 5, root)


def test_without_a_limit_what_is_available_counts(tmp_path: Path) -> None:
    """Never MemTotal."""
    text = "MemTotal: 900 kB\nMemAvailable: 3 kB"
    root = files(tmp_path, {"proc/meminfo": text})
    with pytest.warns(UserWarning, match="pass host_memory= in bytes"):
        check_host_memory(3 * 1024, None, root)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="MemAvailable"):
        check_host_memory(3 * 1024 + 1, None, root)


def test_nothing_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be given"):
        check_host_memory(1, None, tmp_path)
