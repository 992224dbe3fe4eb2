# SPDX-License-Identifier: Apache-2.0
"""How tests reach what is in benchmarks/, run it, and read what it wrote."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def load() -> Callable[[str], ModuleType]:
    """load("KIND.NAME") → that module of benchmarks/, imported as the test runs: many need more than torch."""
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """run(module, *options) → its exit code, on the CPU; of an op's benchmark too."""

    def start(module: ModuleType, *arguments: object) -> int:
        options = ["--device", "cpu", "--repetitions", "2", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", ["bench", *options])
        return module.main(module.BENCH) if hasattr(module, "BENCH") else module.main()

    return start


@pytest.fixture
def rows_of() -> Callable[[Path], list[dict[str, str]]]:
    """The rows of a CSV file."""

    def read(path: Path) -> list[dict[str, str]]:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    return read
