# SPDX-License-Identifier: Apache-2.0
"""bench_generate.py: its rows of a small model, and what they judge."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.models import bench_generate
from benchmarks.models.bench_generate import FUSED, PEFT, UNFUSED, wrong


def test_rows_of_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--device", "cpu", "--new", "5", "--prompt", "6", "--batch", "2"]
    options += ["--repetitions", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_generate.py", *options])
    assert bench_generate.main() == 0
    with (tmp_path / "generate.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["provider"] for row in rows] == [PEFT, UNFUSED, FUSED]
    assert {row["check"] for row in rows} == {"ok"}
    assert float(rows[0]["error"]) == 0.0 < float(rows[1]["error"])
    for row in rows:
        assert float(row["tokens/s"]) == pytest.approx(2e3 / float(row["ms a token"]), rel=1e-2)


def test_what_is_wrong() -> None:
    tokens = torch.arange(6).view(2, 3)
    others = tokens.clone()
    others[1, 2] = 0
    assert wrong(tokens, {"x's": tokens.clone()}, 0.1) == ""
    assert wrong(tokens, {"x's": tokens, "y's": others}, 0.1) == "1 tokens differ from y's"
    assert "off by nan" in wrong(tokens, {}, float("nan"))
