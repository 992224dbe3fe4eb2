# SPDX-License-Identifier: Apache-2.0
"""bench_plan: a shape's row has the prediction beside what was measured."""

from __future__ import annotations

from tests.benchmarks.aliases import Load, RowsOf, Run


def test_a_prediction_stands_beside_what_was_measured(
    load: Load, run: Run, rows_of: RowsOf
) -> None:
    assert run(load("parallel.bench_plan")) == 0
    (row,) = rows_of("plan")
    assert row["check"] == "ok" and float(row["predicted ms"]) > 0 < float(row["measured ms"])
