# SPDX-License-Identifier: Apache-2.0
"""bench_floor.py: what it multiplies is compared before it is timed; the rows of a small model on a GPU."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from benchmarks.models import bench_floor
from benchmarks.report.pages import _floor_table


def test_a_product_that_is_off_ends_the_run() -> None:
    expected = torch.randn(4, 32, dtype=torch.float64)
    bench_floor.check(expected.bfloat16(), expected)
    with pytest.raises(RuntimeError, match=r"off by 0\.0\d+ of its norm"):
        bench_floor.check((expected * 1.02).bfloat16(), expected)
    with pytest.raises(RuntimeError, match="off by nan"):
        bench_floor.check(torch.full((4, 32), math.nan), expected)


def test_it_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_floor.py", "--device", "cpu"])
    with pytest.raises(SystemExit, match="2"):
        bench_floor.main()
    assert "--device must be a GPU" in capsys.readouterr().err


def test_the_page_divides_by_the_floor_with_the_same_head() -> None:
    floor = {"model": "L", "tokens": "1x8", "ms": "1", "J": "1", "W": "1"}
    facts = {"device": "cuda: X", "torch": "2", "commit": "c"}
    rows = [
        {**floor, **facts, "part": "together, head in bf16", "tokens/s ≤": "100"},
        {**floor, **facts, "part": "together, head in FP8", "tokens/s ≤": "200"},
    ]
    trained = [
        {"model": "L", "LoRA on": "qkvo", "provider": name, "tokens/s": rate}
        for name, rate in [
            ("ours, eager", "50"),
            ("ours, one graph", "80"),
            ("hf + peft bf16", "99"),
        ]
    ]
    text = _floor_table(rows, trained)
    assert "| 100 | 80 | 0.80 |" in text and "| 200 | – | – |" in text


@pytest.mark.gpu
def test_rows_of_a_small_model() -> None:
    rows = bench_floor.rows_of("tiny", torch.device("cuda"), seconds=0.05)
    assert [row["part"] for row in rows][-1] == "together, head in FP8" and len(rows) == 6
    assert all(row["ms"] > 0 for row in rows)
