# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: poisoned memory, fresh random inputs per test, the `gpu` marker, devices to run on."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import tests.other_sums  # noqa: F401
from tests.durations import Recorder
from tests.poison import AVAILABLE, poisoned_memory

HAS_CUDA = torch.cuda.is_available()
SLOW_FOLDERS = [Path(__file__).parent / "benchmarks"]


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "leave new memory as it is: a tool that looks for reads of unwritten memory finds them"
    parser.addoption("--unpoisoned", action="store_true", help=what)
    parser.addoption(
        "--seconds-file", type=Path, help="write the seconds of every test there, as CSV"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("seconds_file")
    if path is not None:  # the processes of pytest-xdist measure, and the first one writes
        here = None if hasattr(config, "workerinput") else config.rootpath / path
        config.pluginmanager.register(Recorder(here))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA GPU: torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords and not HAS_CUDA:
            item.add_marker(skip)
        if any(folder in item.path.parents for folder in SLOW_FOLDERS):
            item.add_marker(pytest.mark.slow)
    # a long file that begins last would leave the other processes idle
    slow = {item.path for item in items if "slow" in item.keywords}
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))


@pytest.fixture(scope="session", autouse=True)
def _poison(request: pytest.FixtureRequest) -> Iterator[None]:
    """An element that nobody writes is NaN in every test; tests/poison.py says where it is not."""
    leave = request.config.getoption("unpoisoned") or not AVAILABLE
    with nullcontext() if leave else poisoned_memory():
        yield


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Every test draws its own inputs, the same on every machine."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each test that asks for it runs on the CPU and, marked `gpu`, on the GPU."""
    return torch.device(request.param)
