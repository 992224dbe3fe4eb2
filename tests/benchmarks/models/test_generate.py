# SPDX-License-Identifier: Apache-2.0
"""bench_generate.py: its rows of a small model, and what they judge."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.lib.generation import Generation
from benchmarks.models import bench_generate
from benchmarks.models.bench_generate import FUSED, PEFT, UNFUSED, case, wrong


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
    assert wrong({"x": tokens, "z": tokens.clone()}, 0.1) == ""
    assert wrong({"x": tokens, "y": others}, 0.1) == "1 tokens of x differ from y's"
    assert "off by nan" in wrong({"x": tokens}, float("nan"))


def test_tokens_that_differ_are_said_once_attention_repeats_its_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fused model that says something else, and one whose attention alone does not repeat itself."""
    on: list[bool] = []

    def said(model: float, ids: torch.Tensor, *_: int, static: bool, graphed: bool) -> Generation:
        on.append(torch.backends.cuda.cudnn_sdp_enabled())
        return Generation(ids + int(model) + (len(on) if on[-1] else 0), 1.0, model or 1.0)

    monkeypatch.setattr(bench_generate, "generation", said)
    monkeypatch.setattr(bench_generate, "last_logits", lambda model, ids: torch.ones(2))
    ids, models = torch.zeros(2, 3, dtype=torch.int64), {PEFT: 0.0, UNFUSED: 0.0, FUSED: 0.0}
    assert [row["check"] for row in case(models, ids, 4, 1, False)] == ["ok"] * 3
    assert on == [True] * 6 + [False] * 3 and torch.backends.cuda.cudnn_sdp_enabled()
    *_, row = case({**models, FUSED: 1.0}, ids, 4, 1, False)
    assert row["check"] == f"WRONG: 6 tokens of {FUSED} differ from {UNFUSED}'s"
