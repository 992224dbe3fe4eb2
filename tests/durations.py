# SPDX-License-Identifier: Apache-2.0
"""The seconds of every test, with its fixtures, in a file: what `make test` may hold is decided by them."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import TextIO

import pytest

COLUMNS = ("test", "seconds", "cpu_seconds")
BEGAN = pytest.StashKey[tuple[float, float]]()


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


class Recorder:
    """Measures where tests run, and writes where their reports come together: with pytest-xdist two processes."""

    def __init__(self, path: Path | None) -> None:
        self.file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("w", newline="", encoding="utf-8", buffering=1)
            csv.writer(self.file).writerow(COLUMNS)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[BEGAN] = (time.perf_counter(), cpu_seconds())
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            began, spent = item.stash[BEGAN]
            took = (time.perf_counter() - began, cpu_seconds() - spent)
            report.user_properties = [*report.user_properties, ("seconds", took)]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        took = dict(report.user_properties).get("seconds")
        if self.file is not None and took is not None:
            csv.writer(self.file).writerow((report.nodeid, *(f"{s:.3f}" for s in took)))

    def pytest_unconfigure(self) -> None:
        if self.file is not None:
            self.file.close()
