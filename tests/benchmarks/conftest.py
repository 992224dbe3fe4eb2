# SPDX-License-Identifier: Apache-2.0
"""How tests reach what is in benchmarks/, run it, and read what it wrote."""

from __future__ import annotations

import csv
import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.aliases import Load, RowsOf, Run


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a benchmark without --output leaves for its reader, its logs, goes with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def load() -> Load:
    """load("KIND.NAME") → that module of benchmarks/, imported as the test runs: many need more than torch."""
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """run(script, *options) → its exit code, on the CPU, with tmp_path as its --output."""

    def start(module: ModuleType, *arguments: object) -> int:
        options = ["--device", "cpu", "--repetitions", "2", "--output", tmp_path, *arguments]
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, options)])
        return module.main(module.BENCH) if hasattr(module, "BENCH") else module.main()

    return start


@pytest.fixture
def rows_of(tmp_path: Path) -> RowsOf:
    """rows_of(name) → the rows of NAME.csv that `run` wrote."""

    def read(name: str) -> list[dict[str, str]]:
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    return read
