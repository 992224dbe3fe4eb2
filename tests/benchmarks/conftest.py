# SPDX-License-Identifier: Apache-2.0
"""How tests reach the files of benchmarks/, which are scripts and no package."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a file of benchmarks/ as its scripts see each other."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """run(module, *options) → its exit code, on the CPU."""

    def start(module: ModuleType, *arguments: object) -> int:
        options = ["--device", "cpu", "--repetitions", "2", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", ["bench", *options])
        return module.main()

    return start


@pytest.fixture
def rows_of() -> Callable[[Path], list[dict[str, str]]]:
    """The rows of a CSV file."""

    def read(path: Path) -> list[dict[str, str]]:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    return read
