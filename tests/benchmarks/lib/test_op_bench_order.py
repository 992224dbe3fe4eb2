# SPDX-License-Identifier: Apache-2.0
"""lib/op_bench.py: what heats the GPU comes behind everything that is timed."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.lib import op_bench


def test_joules_are_counted_behind_all_times(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def joules(run: Any, device: torch.device) -> float:
        order.append("joules")
        return 0.25

    class Setting(op_bench.Setting):
        def time(self, step: Any) -> op_bench.Row:
            order.append("time")
            return {"ms": 2.0, "p20 ms": 2.0, "p80 ms": 2.0, "CPU µs": 1.0}

    monkeypatch.setattr(op_bench, "joules_of", joules)
    setting = Setting(Namespace(), torch.device("cpu"), 1.0, frozenset())
    good, wrong = {"check": "ok"}, {"check": "WRONG: y"}
    calls = {
        name: op_bench.Call(partial(int), lambda _, check=check: check, 10)
        for name, check in (("a", good), ("wrong", wrong), ("b", good))
    }
    rows = op_bench.against_cublaslt({"shape": "1"}, calls, int, setting, 1)
    assert order == ["time"] * 5 + ["joules"] * 2
    assert [row["mJ"] for row in rows] == [250.0, "", 250.0]
    assert [row["÷ cublaslt"] for row in rows] == [1.0, "", 1.0]
