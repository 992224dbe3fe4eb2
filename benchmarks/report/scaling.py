# SPDX-License-Identifier: Apache-2.0
"""One table, and one picture, of runs of bench_scaling.py on other numbers of GPUs.

    python benchmarks/report/scaling.py --output DIR n1/scaling.csv n2/scaling.csv n4/scaling.csv n8/scaling.csv

"÷ one GPU" is of the most tokens/s that one GPU has with the same model and row, in the runs that are given.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.rows import FACTS, ratio, write_csv
from benchmarks.report.ops import number
from benchmarks.report.plots import draw_all

ONE = "÷ one GPU"


def joined(tables: list[list[dict[str, str]]]) -> list[dict[str, str]]:
    """The rows of all tables, with every column that one of them has, and "÷ one GPU"."""
    rows = [row for table in tables for row in table]
    columns = [c for c in dict.fromkeys(c for row in rows for c in row) if c not in (*FACTS, ONE)]
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        rate = number(row["tokens/s"])
        if row["ranks"] == "1" and rate is not None:
            key = row["model"], row["row"]
            best[key] = max(rate, best.get(key, 0.0))
    found = []
    for row in rows:
        part = str(ratio(number(row["tokens/s"]), best.get((row["model"], row["row"]))))
        values = {column: row.get(column, "") for column in columns}
        found.append({**values, ONE: part, **{fact: row.get(fact, "") for fact in FACTS}})
    return found


def write(folder: Path, rows: list[dict[str, str]]) -> Path:
    """scaling.csv and scaling.png in `folder`."""
    write_csv(folder / "scaling.csv", [dict(row) for row in rows], {})
    (picture,) = draw_all(folder, {"scaling": rows}, ("scaling",))
    return picture


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--output", type=Path, required=True, metavar="DIR")
    options.add_argument("runs", type=Path, nargs="+", metavar="CSV")
    args = options.parse_args()
    tables = []
    for path in args.runs:
        with path.open(newline="", encoding="utf-8") as file:
            tables.append([*csv.DictReader(file)])
    print(f"wrote {write(args.output, joined(tables))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
