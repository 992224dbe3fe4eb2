# SPDX-License-Identifier: Apache-2.0
"""The seconds of every test, with its fixtures, in a file: what `make test` may hold is decided by them."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

COLUMNS = ("test", "seconds", "cpu_seconds")


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


class Recorder:
    """Measures where tests run, and writes where their reports come together: with pytest-xdist two processes."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[tuple[str, float, float]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        began, spent = time.perf_counter(), cpu_seconds()
        item.user_properties.append(("began", (began, spent)))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            began, spent = dict(item.user_properties)["began"]
            took = (time.perf_counter() - began, cpu_seconds() - spent)
            report.user_properties = [*report.user_properties, ("seconds", took)]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        took = dict(report.user_properties).get("seconds")
        if report.when == "teardown" and took is not None:
            self.rows.append((report.nodeid, *took))

    def pytest_sessionfinish(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(COLUMNS)
            for test, seconds, cpu in sorted(self.rows, key=lambda row: -row[1]):
                table.writerow((test, f"{seconds:.3f}", f"{cpu:.3f}"))
