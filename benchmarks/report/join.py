# SPDX-License-Identifier: Apache-2.0
"""One record of several runs of a benchmark, which had a part of its rows each.

    python benchmarks/report/join.py NAME --by COLUMN … --output DIR run1 run2 …
    python benchmarks/report/join.py quality --output DIR run1 run2 …

A run is a folder with NAME.csv. Rows belong together where they have the same values in the columns of --by. Those of a
later run take the place of all that an earlier one has. So a size is replaced as a whole by `--by size`, one provider
of it by `--by size provider`. Ratios stay those of the run that a row is of.

"quality" joins quality.py's seeds and curves, and means are taken anew over all seeds.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.rows import FACTS, write_csv

SEED = ("model", "variant", "seed")  # what belongs together in quality.py's files
Table = list[dict[str, str]]


def read(path: Path) -> Table:
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def joined(tables: Sequence[Table], by: Sequence[str]) -> Table:
    """The rows of all tables, with every column that one of them has; a later table's replace an earlier one's.

    Raises:
        ValueError: a table lacks a column of `by`, or none has a row.
    """
    found: dict[tuple[str, ...], Table] = {}
    for table in tables:
        if missing := [column for column in by if table and column not in table[0]]:
            raise ValueError(f"--by names {missing}, the columns are {[*table[0]]}")
        groups: dict[tuple[str, ...], Table] = {}
        for row in table:
            groups.setdefault(tuple(row[column] for column in by), []).append(row)
        found |= groups
    rows = [row for group in found.values() for row in group]
    if not rows:
        raise ValueError("no run has a row")
    columns = dict.fromkeys(c for row in rows for c in row if c not in FACTS)
    facts = dict.fromkeys(c for c in FACTS if any(c in row for row in rows))
    return [{column: row.get(column, "") for column in (*columns, *facts)} for row in rows]


def write(folder: Path, name: str, rows: Table) -> None:
    write_csv(folder / f"{name}.csv", [dict(row) for row in rows], {})


def join_quality(folder: Path, runs: Sequence[Path]) -> None:
    """quality_seeds, quality_curves and their summary in `folder`."""
    from benchmarks.lib.quality_summary import summary
    from benchmarks.lib.quality_variants import VARIANTS

    def ordered(table: Table) -> Table:
        """As one run would have written it."""
        models = list(dict.fromkeys(row["model"] for row in table))
        variants = list(VARIANTS)
        return sorted(
            table,
            key=lambda r: (models.index(r["model"]), variants.index(r["variant"]), int(r["seed"])),
        )

    seeds = ordered(joined([read(run / "quality_seeds.csv") for run in runs], SEED))
    write(folder, "quality_seeds", seeds)
    curves = ordered(joined([read(run / "quality_curves.csv") for run in runs], SEED))
    write_csv(folder / "quality_curves.csv", [dict(row) for row in curves], {})
    rows: Table = []
    for row in summary([dict(row) for row in seeds]):
        first = next(
            s for s in seeds if (s["model"], s["variant"]) == (row["model"], row["variant"])
        )
        rows.append({**{k: str(v) for k, v in row.items()}, **{f: first[f] for f in FACTS}})
    write(folder, "quality", rows)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("name", metavar="NAME", help="of the CSV, or quality")
    options.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a folder of one run")
    options.add_argument("--by", nargs="+", default=[], metavar="COLUMN")
    options.add_argument("--output", type=Path, required=True, metavar="DIR")
    args = options.parse_args()
    if (args.name == "quality") == bool(args.by):
        options.error("--by belongs to every NAME but quality")
    if args.name == "quality":
        join_quality(args.output, args.runs)
    else:
        tables = [read(run / f"{args.name}.csv") for run in args.runs]
        write(args.output, args.name, joined(tables, args.by))
    print(f"wrote {args.output / args.name}.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
