# SPDX-License-Identifier: Apache-2.0
"""bench_context: every way has its row, FLOPs are those by hand, and a loss that is far off is WRONG."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lorakernels import FP8State
from tests.benchmarks.aliases import Load, RowsOf, Run


def test_every_way_has_its_row_on_one_rank(load: Load, run: Run, rows_of: RowsOf) -> None:
    assert run(load("parallel.bench_context"), "--layers", "1", "--repetitions", "1") == 0
    rows = rows_of("context")
    ways = ["alone", "cp", "alone, as long", "cp, documents 32", "cp, documents 16"]
    assert [row["way"] for row in rows] == ways
    assert [row["check"] for row in rows] == ["ok"] * len(rows)
    assert all(float(row["tokens/s"]) > 0 and float(row["÷ alone"]) > 0 for row in rows)


def test_ranks_alone_have_the_scales_of_all(
    load: Load, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would share the long row with scales of its own."""
    groups: list[Any] = []
    real = FP8State.reduce_and_update

    def reduce_and_update(state: FP8State, group: Any = None) -> None:
        groups.append(None if group is None else dist.get_world_size(group))
        real(state, group)

    monkeypatch.setattr(FP8State, "reduce_and_update", reduce_and_update)
    arguments = ("--layers", "1", "--repetitions", "1", "--ways", "alone")
    assert run(load("parallel.bench_context"), *arguments) == 0
    assert groups == [1] * 4  # before the first step, two steps to warm up, and one


@pytest.mark.parametrize("seconds", [0.9, 1.1], ids=["short", "long"])
def test_long_steps_are_said_one_by_one_and_end_in_time(
    seconds: float, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is left for one more step. A run of short ones is timed as before."""
    bench = load("parallel.bench_context")
    left, said, counts = [True, False], [], []  # type: ignore[var-annotated]

    def step_seconds(step: Any, often: int, device: Any) -> list[float]:
        counts.append(often)
        return [[step(i), seconds][1] for i in range(often)]

    monkeypatch.setattr(bench, "step_seconds", step_seconds)
    monkeypatch.setattr(bench, "time_left", lambda end, device: left.pop(0))
    monkeypatch.setattr(bench, "largest", lambda value, device: value)
    made = object.__new__(bench.Bench)
    made.device, made.end, made.say = None, 0.0, said.append
    made.rows, made.ids = SimpleNamespace(step=lambda ids: ids), lambda way, number: number
    samples, losses = made.timed(bench.Way("cp", 8, 8, 2), 4)
    assert losses == [*range(len(samples))]  # each step has text of its own
    if seconds < 1:
        assert (counts, said, left) == ([1, 3], [], [True, False])
    else:
        assert counts == [1, 1] and len(samples) == 2
        assert said == ["cp: step 1 took 1.10 s", "cp: step 2 took 1.10 s"]


def test_flops_of_a_gpu_are_those_by_hand(load: Load) -> None:
    """Two documents of 4 tokens over 2 GPUs: each has 4 tokens, and half of the 2 · (1 + 2 + 3 + 4) pairs."""
    bench = load("parallel.bench_context")
    way = bench.Way("cp, documents 4", 8, 4, 2)
    assert (way.tokens, way.pairs, way.batch.tokens) == (4, 10.0, 4)
    made = SimpleNamespace(each_token=100.0, each_pair=12.0)
    assert bench.Bench.flops(made, way) == 4 * 100 + 10 * 12


def test_time_is_compared_by_tokens_and_pairs(load: Load) -> None:
    """3 s a token and 2 s a pair: 8 tokens alone take 24 + 2 · 36 s, 16 take 48 + 2 · 136 s."""
    bench = load("parallel.bench_context")
    ways = [bench.Way("alone", 8, 8, 1), bench.Way("alone, as long", 16, 16, 1)]
    ways.append(bench.Way("cp", 32, 32, 2))
    seconds = (96.0, 320.0, 2 * (3 * 16 + 2 * 264.0))
    rows = [
        {"way": way.name, "ranks": 2, "tokens/s": 2 * way.tokens / took, "TFLOP/s": 1.0,
         "check": "ok", "first loss": 5.0 if way.ranks == 1 else 5.2}
        for way, took in zip(ways, seconds, strict=True)
    ]  # fmt: skip
    found = bench.compared(rows, ways)
    assert found[2]["÷ by kind"] == pytest.approx(0.5)
    assert [str(row["check"])[:5] for row in found] == ["ok", "ok", "WRONG"]
