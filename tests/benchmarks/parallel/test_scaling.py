# SPDX-License-Identifier: Apache-2.0
"""bench_scaling: every way trains on what one GPU alone trains on, and a loss that is far off is WRONG."""

from __future__ import annotations

from tests.benchmarks.aliases import Load, RowsOf, Run


def test_every_way_has_its_row_on_one_rank(load: Load, run: Run, rows_of: RowsOf) -> None:
    bench = load("parallel.bench_scaling")
    assert run(bench) == 0
    rows = rows_of("scaling")
    assert [row["way"] for row in rows] == [*bench.WAYS]
    assert [row["check"] for row in rows] == ["ok"] * len(rows)
    assert all(float(row["tokens/s"]) > 0 for row in rows)


def test_a_loss_that_is_far_off_is_wrong(load: Load) -> None:
    bench = load("parallel.bench_scaling")
    alone = {"way": "alone, eager", "first loss": 10.0, "tokens/s": 100.0}
    rows = bench.compared([alone, {"way": "tp", "first loss": 10.3, "tokens/s": 150.0}])
    assert [str(row["check"])[:5] for row in rows] == ["ok", "WRONG"]
    assert rows[1]["÷ eager"] == 1.5 and rows[1]["÷ alone"] == ""
