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


def test_replays_are_compared_with_eager_steps_of_their_own_model(load: Load) -> None:
    bench = load("parallel.bench_scaling")
    rows = [
        {"model": model, "way": way, "graphs": graphs, "tokens/s": speed}
        for model, way, graphs, speed in (
            ("1B", "tp", "layer", 300.0),
            ("1B", "tp, eager", "none", 100.0),
            ("70B", "tp", "layer", 30.0),
            ("70B", "tp, eager", "none", 20.0),
            ("tiny", "tp", "none", 3.0),
            ("tiny", "tp, eager", "none", 2.0),
        )
    ]
    found = [row["graphs on ÷ off"] for row in bench.compared(rows)]
    assert found == [3.0, "", 1.5, "", "", ""]


def test_the_percentile_is_one_of_the_samples(load: Load) -> None:
    bench = load("parallel.bench_scaling")
    hundred = [float(i) for i in range(100, 0, -1)]
    assert bench.percentile(hundred, 0.99) == 99.0 and bench.percentile(hundred, 1.0) == 100.0
    assert bench.percentile([3.0, 1.0], 0.99) == 3.0 and bench.percentile([5.0], 0.5) == 5.0
