# SPDX-License-Identifier: Apache-2.0
"""One table, and one picture, of several runs of benchmarks/parallel/quality_ranks.py on as many ranks.

    python benchmarks/report/quality_ranks.py --output DIR run1 run2 …

Each run is the folder that quality_ranks.py wrote. A way counts in the runs that have all of its steps.

    runs                that count
    largest difference  of the mean curve of these runs from the mean of one GPU's in them, at any step
    of one run          the same of each run by itself
    held-out ÷ one GPU  the mean over these runs
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.curves import farthest
from benchmarks.lib.rows import FACTS, Row, write_csv
from benchmarks.report.plots import draw_all

ONE = "one GPU"
Curve = list[float]


@dataclass(frozen=True)
class Run:
    """The rows of one run's table, and the losses of each way, by its name."""

    rows: dict[str, dict[str, str]]
    curves: dict[str, Curve]

    @classmethod
    def of(cls, folder: Path) -> Run:
        rows = {row["way"]: row for row in _read(folder / "quality_ranks.csv")}
        curves: dict[str, Curve] = {}
        for point in _read(folder / "quality_ranks_curves.csv"):
            curves.setdefault(point["way"], []).append(float(point["loss"]))
        whole = {way: curve for way, curve in curves.items() if way in rows}
        return cls(rows, {w: c for w, c in whole.items() if len(c) == len(whole[ONE])})


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def mean(curves: Sequence[Curve]) -> Curve:
    return [statistics.fmean(losses) for losses in zip(*curves, strict=True)]


def joined(runs: Sequence[Run]) -> list[Row]:
    """A row for each way, in the order in which the runs have them."""
    found: list[Row] = []
    for way in dict.fromkeys(way for run in runs for way in run.curves):
        having = [run for run in runs if way in run.curves]
        off, step = farthest(
            mean([run.curves[way] for run in having]), mean([run.curves[ONE] for run in having])
        )
        alone = [farthest(run.curves[way], run.curves[ONE])[0] for run in having]
        held = [
            float(run.rows[way]["held-out loss"]) / float(run.rows[ONE]["held-out loss"])
            for run in having
        ]
        found.append(
            {
                "way": way,
                "ranks": having[0].rows[way]["ranks"],
                "runs": len(having),
                "steps": len(having[0].curves[way]),
                "largest difference": f"{off:.3%}",
                "from step": step,
                "of one run": ", ".join(f"{value:.3%}" for value in alone),
                "held-out ÷ one GPU": round(statistics.fmean(held), 5),
            }
        )
    return found


def write(folder: Path, runs: Sequence[Run]) -> Path:
    """quality_ranks.csv, .png, and the mean curves of the ways that all runs have, in `folder`."""
    first = next(iter(runs[0].rows.values()))
    everywhere = [row for run in runs for row in run.rows.values()]
    facts = {f: first[f] for f in FACTS if all(row[f] == first[f] for row in everywhere)}
    rows = joined(runs)
    write_csv(folder / "quality_ranks.csv", rows, facts)
    ways = [way for way in runs[0].curves if all(way in run.curves for run in runs)]
    curves = {way: mean([run.curves[way] for run in runs]) for way in ways}
    points: list[Row] = [
        {"way": way, "step": step, "loss": round(loss, 6)}
        for way, curve in curves.items()
        for step, loss in enumerate(curve)
    ]
    write_csv(folder / "quality_ranks_curves.csv", points, {})
    drawn = [{key: str(value) for key, value in point.items()} for point in points]
    (picture,) = draw_all(folder, {"quality_ranks_curves": drawn}, ("quality_ranks",))
    return picture


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--output", type=Path, required=True, metavar="DIR")
    options.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a folder of one run")
    args = options.parse_args()
    print(f"wrote {write(args.output, [Run.of(folder) for folder in args.runs])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
