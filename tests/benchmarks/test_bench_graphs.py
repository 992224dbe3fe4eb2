# SPDX-License-Identifier: Apache-2.0
"""bench_graphs.py on the CPU, with the graphs that tests/graphs/fake.py imitates: its check, its columns, its gaps."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.graphs.fake import FakeBackend

CPU = torch.device("cpu")


@pytest.fixture
def bench(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load("bench_graphs")
    graphed = partial(module.graph_manager, backend=FakeBackend)
    monkeypatch.setitem(module.PROVIDERS, "GraphManager", graphed)

    @contextmanager
    def wrong(stack: Any) -> Iterator[Any]:
        yield module.Run([lambda *a, layer=layer: 1.1 * layer(*a) for layer in stack.layers])

    @contextmanager
    def broken(stack: Any) -> Iterator[Any]:
        raise RuntimeError("no such library")
        yield

    monkeypatch.setitem(module.PROVIDERS, "wrong", wrong)
    monkeypatch.setitem(module.PROVIDERS, "broken", broken)
    return module


def test_rows(bench: Any) -> None:
    args = argparse.Namespace(
        sizes=["tiny"],
        layers=[1, 2],
        providers=["eager", "GraphManager", "wrong", "broken"],
        repetitions=2,
        budget_s=300.0,
        timeout_s=60.0,
        output=None,
    )
    rows = {(r["provider"], r["layers"]): r for r in bench.bench(args, CPU)}
    assert len(rows) == 8
    for count in (1, 2):
        for name in ("eager", "GraphManager"):
            row = rows[name, count]
            assert row["check"] == "bit-equal" and row["ms"] > 0 and row["CPU µs/layer"] > 0
        assert (
            rows["wrong", count]["check"].startswith("WRONG: ") and rows["wrong", count]["ms"] == ""
        )
        assert rows["broken", count]["check"] == "raised: RuntimeError: no such library"
        assert rows["GraphManager", count]["÷ GraphManager"] == 1.0
    assert len({tuple(row) for row in rows.values()}) == 1, "one table"


def test_time_that_is_spent_is_said(bench: Any) -> None:
    args = argparse.Namespace(
        sizes=["tiny"],
        layers=[1],
        providers=["eager"],
        repetitions=1,
        budget_s=0.0,
        timeout_s=1.0,
        output=None,
    )
    assert bench.bench(args, CPU)[0]["check"] == "raised: not run: --budget-s was spent"


def test_gaps_between_overlapping_kernels(bench: Any) -> None:
    """Busy 0–4, 2–3 within, 6–7, 7–9, 12–13: 9 ns of kernels, gaps 4–6 and 9–12."""
    total, gaps = bench.busy_and_gaps([(0, 4), (2, 3), (6, 7), (7, 9), (12, 13)])
    assert (round(total * 1e9), round(gaps * 1e9)) == (9, 5)


def test_a_pair_of_functions(bench: Any) -> None:
    assert 0.5 < bench.function_pair_us(CPU, 20) < 1e4
