# SPDX-License-Identifier: Apache-2.0
"""bench_experts: its providers agree with float32, and what is wrong is said and not timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.benchmarks.aliases import Load, RowsOf, Run

pytest.importorskip("transformers")
pytest.importorskip("peft")


def test_rows_on_a_cpu(load: Load, run: Run, rows_of: RowsOf) -> None:
    module = load("layers.bench_experts")
    assert run(module) == 0
    rows = rows_of("experts")
    assert [r["provider"] for r in rows] == list(module.PROVIDERS)
    stack, *others = rows
    assert stack["check"] == "not taken: the weights are on cpu" and not stack["ms"]
    assert all(r["check"] == "ok" and float(r["ms"]) > 0 for r in others)


@pytest.mark.parametrize("which", range(3), ids=["y", "dx", "dweights"])
def test_a_wrong_result_is_not_timed(
    which: int, load: Load, run: Run, rows_of: RowsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("layers.bench_experts")
    own = module.both

    def wrong(*given: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = own(*given)
        found[which] = found[which].roll(1, 0)
        return found

    monkeypatch.setattr(module, "both", wrong)
    assert run(module, "--providers", "ours, one by one") == 1
    (row,) = rows_of("experts")
    assert row["check"].startswith(f"WRONG: {('y', 'dx', 'dweights')[which]} is ") and not row["ms"]
