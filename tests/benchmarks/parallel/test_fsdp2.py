# SPDX-License-Identifier: Apache-2.0
"""bench_fsdp2: whatever is sharded computes the whole copy's loss."""

from __future__ import annotations

import pytest

from tests.benchmarks.aliases import Load, RowsOf, Run


def test_what_is_sharded_computes_the_loss_of_the_whole_copy(
    load: Load, run: Run, rows_of: RowsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("parallel.bench_fsdp2")
    cases = [module.Case(module.UNFUSED, how) for how in (module.WHOLE, module.ALL, module.BASE)]
    monkeypatch.setattr(module, "CASES", cases)
    monkeypatch.setattr(module, "WARMUP", 1)
    assert run(module, "--layers", "1") == 0
    rows = rows_of("fsdp2")
    assert [row["check"] for row in rows] == ["ok"] * 3
    assert all(float(row["÷ whole"]) > 0 for row in rows)


def test_the_short_form_has_a_ratio_of_each_kind_of_layer(
    load: Load, run: Run, rows_of: RowsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("parallel.bench_fsdp2")
    monkeypatch.setattr(module, "WARMUP", 1)
    assert run(module, "--layers", "1", "--short", "--repetitions", "1") == 0
    rows = rows_of("fsdp2")
    assert [row["check"] for row in rows] == ["ok"] * len(module.SHORT)
    sharded = {row["layers"] for row in rows if row["sharded"] != module.WHOLE and row["÷ whole"]}
    assert sharded == {module.FUSED, module.UNFUSED, module.PEFT}


def test_what_would_begin_after_the_budget_is_not_run(
    load: Load, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("parallel.bench_fsdp2")
    assert run(module, "--layers", "1", "--budget-s", "0") == 0
    assert "budget" in capsys.readouterr().out
