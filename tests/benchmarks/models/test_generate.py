# SPDX-License-Identifier: Apache-2.0
"""bench_generate.py: what its rows judge, and that a token's captured forward is refused when another one comes."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lib.generation import EAGER_CALLS, TokenGraph
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
    assert wrong(FUSED, tokens, tokens.clone(), 0.1) == ""
    assert wrong(FUSED, others, tokens, 0.1) == "1 tokens differ from ours, not fused's"
    assert wrong(PEFT, others, tokens, 0.0) == ""  # bf16's tokens are others
    assert "off by nan" in wrong(UNFUSED, tokens, tokens, float("nan"))


class _Graph:
    """As a CUDA graph: what it computes is computed again from the tensors it was captured with."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_a_token_is_replayed_with_its_own_values_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[torch.Tensor] = []

    def forward(input_ids: torch.Tensor, past: Any, use_cache: bool = True) -> torch.Tensor:
        seen.append(input_ids)
        return input_ids

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: torch.no_grad())
    token, cache = TokenGraph(forward), object()
    for number in range(EAGER_CALLS + 3):
        found = token(input_ids=torch.full((2, 1), number), past=cache)
        assert found.tolist() == [[number], [number]]
    assert len(seen) == EAGER_CALLS + 1 and token.graph.replays == 3
    with pytest.raises(RuntimeError, match=r"captured with tensors .*\(2, 1\).* found .*\(3, 1\)"):
        token(input_ids=torch.zeros(3, 1), past=cache)
    with pytest.raises(RuntimeError, match="a token was captured with"):
        token(input_ids=torch.zeros(2, 1), past=object())
    assert token.graph.replays == 3
