# SPDX-License-Identifier: Apache-2.0
"""bench_attention: its float64 rows agree with attention, and what is wrong or not taken is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.benchmarks.aliases import Load, RowsOf, Run


def test_rows_on_a_cpu(load: Load, run: Run, rows_of: RowsOf) -> None:
    """torch's choice is right for rows and documents; backends of a GPU say why they do not take them."""
    assert run(load("layers.bench_attention"), "--providers", "auto", "cudnn_graph") == 0
    rows = rows_of("attention")
    kinds = {(r["documents"], r["longest"]) for r in rows}
    assert kinds == {("dense", "row"), ("1", "row"), ("3", "row"), ("3", "document")}
    own = [r for r in rows if r["provider"] == "auto"]
    assert len(own) == 8 and all(r["check"] == "ok" and float(r["ms"]) > 0 for r in own)
    others = [r for r in rows if r["provider"] == "cudnn_graph"]
    assert len(others) == 4
    assert all("not taken: attention='cudnn_graph'" in r["check"] and not r["ms"] for r in others)


@pytest.mark.parametrize("which", range(4), ids=["out", "dq", "dk", "dv"])
def test_a_wrong_result_is_not_timed(
    which: int, load: Load, run: Run, rows_of: RowsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("layers.bench_attention")
    own = module.both

    def wrong(*given: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = own(*given)
        found[which] = found[which].roll(1, 2)
        return found

    monkeypatch.setattr(module, "both", wrong)
    assert run(module, "--providers", "auto", "--documents", "3") == 1
    name = ("out", "dq", "dk", "dv")[which]
    assert all(r["check"].startswith(f"WRONG: {name} is ") for r in rows_of("attention"))


def test_lengths_fill_the_row(load: Load) -> None:
    lengths_of = load("layers.bench_attention").lengths_of
    assert lengths_of(4096, 1) == [4096]
    assert sum(lengths_of(4096, 64)) == 4096 and min(lengths_of(4096, 64)) > 0
