# SPDX-License-Identifier: Apache-2.0
"""bench_sharded_base: the sharded base computes the whole one's loss, and every row has its numbers."""

from __future__ import annotations

import warnings

from tests.benchmarks.aliases import Load, RowsOf, Run


def test_the_whole_and_the_sharded_base(load: Load, run: Run, rows_of: RowsOf) -> None:
    assert run(load("parallel.bench_sharded_base")) == 0
    rows = rows_of("sharded_base")
    assert [row["base"] for row in rows] == ["whole", "sharded, gloo"]
    assert [row["check"] for row in rows] == ["ok", "ok"]
    assert all(float(row["tokens/s a GPU"]) > 0 for row in rows)
    assert float(rows[1]["gather ms"]) > 0 and rows[0]["gather ms"] == ""


def test_embedding_and_head_too(load: Load, run: Run, rows_of: RowsOf) -> None:
    assert run(load("parallel.bench_sharded_base"), "--embeddings", "--layers", "1") == 0
    _, row = rows_of("sharded_base")
    assert (row["base"], row["check"]) == ("sharded, gloo, embedding and head too", "ok")


def test_an_offloaded_base(load: Load, run: Run, rows_of: RowsOf) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no control group limits")
        assert run(load("parallel.bench_sharded_base"), "--offload", "0.3", "--layers", "1") == 0
    (row,) = rows_of("sharded_base")
    assert (row["base"], row["check"]) == ("offloaded, 0.3", "finite")
    assert row["model"] == "1 layers of a Llama of two layers"
    assert float(row["tokens/s a GPU"]) > 0 and float(row["no copies ms"]) > 0
