# SPDX-License-Identifier: Apache-2.0
"""bench_graphs.py on the CPU, with the graphs that tests/graphs/fake.py imitates: its check, its columns, its gaps."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.lib.rows import write_csv
from tests.benchmarks.aliases import Load, RowsOf, Run
from tests.graphs.fake import FakeBackend

CPU = torch.device("cpu")


@pytest.fixture
def bench(load: Load, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load("graphs.bench_graphs")
    graphed = partial(load("lib.graph_providers").graph_manager, backend=FakeBackend)
    monkeypatch.setitem(module.PROVIDERS, "GraphManager", graphed)

    @contextmanager
    def wrong(stack: Any) -> Iterator[Any]:
        yield load("lib.graph_providers").Run(
            [lambda *a, layer=layer: 1.1 * layer(*a) for layer in stack.layers]
        )

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
        compile_s=60.0,
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


@pytest.mark.parametrize(
    ("provider", "check", "code"),
    [
        ("GraphManager", "bit-equal", 0),
        ("GraphManager", "raised: CaptureError: capture of layer '0'", 1),
        ("GraphManager, grads by autograd", "raised: no answer within 40 s", 1),
        ("GraphManager", "WRONG: 1.0e-01 of output", 1),
        ("GraphManager", "raised: not run: --budget-s was spent", 0),
        ("GraphManager", "raised: not finished: --budget-s was spent", 0),
        ("TE make_graphed_callables", "raised: ImportError: no such library", 0),
    ],
)
def test_it_fails_where_ours_does(bench: Any, provider: str, check: str, code: int) -> None:
    row = {"size": "small", "layers": 4, "provider": provider, "check": check}
    row |= {name: "" for name in bench.COLUMNS}
    assert {provider, *bench.OURS} <= {*bench.PROVIDERS}
    assert (
        bench.conclude([row | {"provider": "eager", "check": "bit-equal"}, row], {}, None) == code
    )


@pytest.mark.parametrize(
    ("budget", "late", "expected", "code"),
    [
        (20.0, None, "not finished: --budget-s was spent", 0),
        (90.0, None, "no answer within 40 s", 1),
        (20.0, "CaptureError: capture of layer '0'", "CaptureError: capture of layer '0'", 1),
    ],
    ids=["the budget cuts it off", "it had all of its time", "an error as the budget ends"],
)
def test_only_an_answer_that_the_budget_cuts_off_is_no_failure(
    bench: Any,
    monkeypatch: pytest.MonkeyPatch,
    budget: float,
    late: str | None,
    expected: str,
    code: int,
) -> None:
    now = [100.0]
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow:
        def ask(self, request: str, timeout: float, **options: Any) -> None:
            if request == "measure":
                now[0] += timeout
                if late is not None:
                    raise bench.WorkerError(late)
                raise bench.WorkerTimeout(f"no answer within {timeout:.0f} s")

    args = argparse.Namespace(layers=[1], repetitions=1, timeout_s=40.0, compile_s=1.0)
    rows = list(bench.rows_of("tiny", "GraphManager", Slow(), args, 100.0 + budget))
    assert [row["check"] for row in rows] == [f"raised: {expected}"]
    eager = rows[0] | {"provider": "eager", "check": "bit-equal"}
    assert bench.conclude([eager, *rows], {}, None) == code


def test_time_that_is_spent_is_said(bench: Any) -> None:
    args = argparse.Namespace(
        sizes=["tiny"],
        layers=[1],
        providers=["eager"],
        repetitions=1,
        budget_s=0.0,
        timeout_s=1.0,
        compile_s=1.0,
        output=None,
    )
    assert bench.bench(args, CPU)[0]["check"] == "raised: not run: --budget-s was spent"


def test_parts_are_merged_into_one_table(
    bench: Any,
    run: Run,
    rows_of: RowsOf,
    tmp_path: Path,
) -> None:
    facts = {
        name: "x" for name in ("device", "torch", "cuda", "triton", "driver", "commit", "date")
    }
    columns = {name: "" for name in bench.COLUMNS}

    def write(folder: str, size: str, commit: str = "x") -> Path:
        rows = [
            {"size": size, "layers": 4, "provider": name, "check": "ok", **columns, "ms": ms}
            for name, ms in (("GraphManager", 2.0), ("eager", 6.0))
        ]
        path = tmp_path / folder / "graphs.csv"
        write_csv(path, bench.in_order(rows), facts | {"commit": commit})
        return path.parent

    parts = [write("b", "medium"), write("a", "small")]
    assert run(bench, "--merge", *parts) == 0
    found = rows_of("graphs")
    kept = [(r["size"], r["provider"], r["ms"], r["÷ GraphManager"]) for r in found]
    small = [("small", "eager", "6.0", "3.0"), ("small", "GraphManager", "2.0", "1.0")]
    assert kept == small + [("medium", *rest) for _, *rest in small]
    assert found[0]["commit"] == "x"
    with pytest.raises(ValueError, match="commit is 'y', the others' 'x'"):
        run(bench, "--merge", *parts, write("c", "large", "y"))
    with pytest.raises(ValueError, match="in more than one"):
        run(bench, "--merge", *parts, parts[0])


def test_packing_changes_no_value_and_no_parameter(load: Load) -> None:
    """Weights above 1 MiB come to lie in one piece of memory, the others stay."""
    large = torch.nn.Parameter(torch.randn(300, 1000))
    small, also = torch.randn(8), torch.randn(1 << 20).to(torch.bfloat16)
    before = [x.detach().clone() for x in (large, small, also)]
    storage, there = small.untyped_storage().data_ptr(), large.data_ptr()
    load("lib.graph_providers").pack([large, small, also, large])
    assert all(torch.equal(x, y) for x, y in zip((large, small, also), before, strict=True))
    assert large.requires_grad and large.is_leaf and large.data_ptr() != there
    assert small.untyped_storage().data_ptr() == storage
    assert also.untyped_storage().data_ptr() == large.untyped_storage().data_ptr()


def test_gaps_between_overlapping_kernels(load: Load) -> None:
    """Busy 0–4, 2–3 within, 6–7, 7–9, 12–13: 9 ns of kernels, gaps 4–6 and 9–12."""
    total, gaps = load("lib.graph_measure").busy_and_gaps(
        [(0, 4), (2, 3), (6, 7), (7, 9), (12, 13)]
    )
    assert (round(total * 1e9), round(gaps * 1e9)) == (9, 5)
