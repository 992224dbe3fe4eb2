# SPDX-License-Identifier: Apache-2.0
"""report/scaling.py: runs on 1, 2, … GPUs become one table beside one GPU's best, and a picture."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from tests.benchmarks.aliases import Load


def table(ranks: int, rates: dict[str, str], **more: str) -> list[dict[str, str]]:
    same = {"model": "70B", "row": "1 x 8192", "ranks": str(ranks), "÷ alone": "", **more}
    return [{**same, "way": way, "tokens/s": rate, "date": "today"} for way, rate in rates.items()]


def test_all_runs_are_beside_the_best_of_one_gpu(load: Load, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, plots = load("report.scaling"), load("report.plots")
    one = table(1, {"alone": "100.0", "alone, eager": "90.0"}, old="x")
    two = table(2, {"tp": "180.0", "cp": ""}) + table(2, {"dp": "198.0"}, **{"÷ alone": "0.9"})
    four = [{**row, "model": "8B", "÷ alone": "0.5"} for row in table(4, {"tp": "300.0"})]
    rows = report.joined([one, two, four])
    assert [row["÷ one GPU"] for row in rows] == ["1.0", "0.9", "1.8", "", "1.98", ""]
    assert [row["old"] for row in rows] == ["x", "x", "", "", "", ""]
    # dp by one GPU's run; 8B has none, so that "÷ alone" of its own run counts
    assert [plots.scaled(row) for row in rows] == [1.0, 0.9, 1.8, None, 1.98, 2.0]
    for number, runs in enumerate((one, two, four)):
        with (tmp_path / f"{number}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*runs[0]])
            writer.writeheader()
            writer.writerows(runs)
    files = [str(tmp_path / f"{number}.csv") for number in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["scaling", "--output", str(tmp_path), *files])
        assert report.main() == 0
    with (tmp_path / "scaling.csv").open(newline="") as file:
        assert [row["÷ one GPU"] for row in csv.DictReader(file)] == [
            row["÷ one GPU"] for row in rows
        ]
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
