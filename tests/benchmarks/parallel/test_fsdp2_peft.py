# SPDX-License-Identifier: Apache-2.0
"""bench_fsdp2_peft: the peer trains the same adapters, over layers that are sharded as they are made."""

from __future__ import annotations

from tests.benchmarks.aliases import Load, RowsOf, Run


def test_the_peer_runs(load: Load, run: Run, rows_of: RowsOf) -> None:
    assert run(load("parallel.bench_fsdp2_peft")) == 0
    (row,) = rows_of("fsdp2_peft")
    assert row["check"] == "ok"
    assert float(row["tokens/s a GPU"]) > 0
