# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, refuse what is wrong, and time what they say they time. No speed is asserted here."""

from __future__ import annotations

import csv
import importlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

FOLDER = Path(__file__).parents[2] / "benchmarks"
TIMES = ("ms", "p20 ms", "p80 ms", "CPU µs")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a file of benchmarks/ as its scripts see each other."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    options = ["--device", "cpu", "--repetitions", "2", *map(str, arguments)]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    return module.main()


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("name", "options", "count", "column"),
    [
        ("lora_linear", ["--shapes", "8x16x32"], 4, "provider"),
        ("bias_dropout_add", ["--shapes", "40x64", "33x65"], (4 + 2) * 2 * 2, "÷ floor"),
        ("philox", ["--shapes", "40x64"], 7, "Gelement/s"),
        ("fp8_state", ["--tensors", "5", "--histories", "1", "4"], 2 * 4, "÷ ours"),
        ("fp8_linear_lora", ["--shapes", "32x64x128", "--ranks", "3", "16"], 2 * 4, "÷ cublaslt"),
    ],
    ids=["lora_linear", "bias_dropout_add", "philox", "fp8_state", "fp8_linear_lora"],
)
def test_it_runs_and_writes_what_it_printed(
    name: str,
    options: list[str],
    count: int,
    column: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(load(f"bench_{name}"), monkeypatch, *options, "--output", tmp_path) == 0
    rows = rows_of(tmp_path / f"{name}.csv")
    assert len(rows) == count
    assert {*TIMES, column, "device", "commit"} <= set(rows[0])
    timed = [row for row in rows if row.get("check", "ok") == "ok"]
    assert timed and all(float(row[time]) > 0 for row in timed for time in TIMES)
    table = [line for line in (tmp_path / f"{name}.md").read_text().splitlines() if "|" in line]
    assert len(table) == 2 + count
    printed = capsys.readouterr().out
    assert all(row["ms"] in printed for row in rows)


def another_mask(bench: Any, i: Any) -> Tensor:
    return bench.plain(i.x, i.bias, i.residual, i.p)


def scaled(bench: Any, i: Any) -> Tensor:
    return bench.ours(i) * 1.02


def without_bias(bench: Any, i: Any) -> Tensor:
    return bench.ours(i) - i.bias.detach()


def steeper(bench: Any, i: Any) -> Tensor:
    out = bench.ours(i)
    return out + (out - out.detach())


def a_bias_of_its_own(bench: Any, i: Any) -> Tensor:
    return bench.ours(i) + 4 * (i.bias - i.bias.detach())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (another_mask, "WRONG: mask"),
        (scaled, "WRONG: out"),
        (without_bias, "WRONG: out"),
        (steeper, "WRONG: dx"),
        (a_bias_of_its_own, "WRONG: dbias"),
    ],
    ids=["mask", "scaled", "bias", "dx", "dbias"],
)
def test_a_wrong_provider_is_not_timed(
    broken: Callable[[Any, Any], Tensor],
    message: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = load("bench_bias_dropout_add")
    monkeypatch.setitem(bench.PROVIDERS, "ours", lambda: lambda i: broken(bench, i))
    cpu = torch.device("cpu")
    inputs = bench.make_inputs("40x64", 0.1, True, torch.bfloat16, cpu)
    assert bench.timed("ours", inputs, cpu, 1) == (message, {})


def test_a_wrong_update_of_scales_is_exit_code_1(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = load("bench_fp8_state")

    def stale(problem: Any) -> Any:
        return bench.Provider(lambda: None, lambda: None, lambda: problem.before)

    monkeypatch.setitem(bench.PROVIDERS, "ours", stale)
    options = ["--tensors", 3, "--histories", 4, "--output", tmp_path]
    assert run(bench, monkeypatch, *options) == 1
    row = rows_of(tmp_path / "fp8_state.csv")[0]
    assert row["check"].startswith("WRONG") and not any(row[time] for time in TIMES)


def test_spread_and_what_could_not_be_measured(load: Callable[[str], ModuleType]) -> None:
    common = load("common")
    timing = common.Timing.of([5e-3, 1e-3, 2e-3, 3e-3, 4e-3, 6e-3], 7e-6)
    assert timing.columns() == {"ms": 3.5, "p20 ms": 2.0, "p80 ms": 5.0, "CPU µs": 7.0}
    late = common.Timing.of([math.nan], 7e-6).columns()
    assert late["ms"] == "host-bound" and late["CPU µs"] == 7.0
    assert common.ratio(late["ms"], 2.0) == "" and common.ratio(3.0, 2.0) == 1.5


@pytest.mark.gpu
def test_a_slow_host_is_not_in_the_device_s_time(load: Callable[[str], ModuleType]) -> None:
    device = torch.device("cuda")
    x = torch.zeros(1024, device=device)

    def dawdle() -> None:
        x.add_(1)
        time.sleep(2e-3)
        x.add_(1)

    timing = load("common").time_of(dawdle, device, 5)
    assert timing.host > 2e-3
    assert timing.high < 0.2e-3  # two tiny kernels: some µs


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_is_host_bound(load: Callable[[str], ModuleType]) -> None:
    device = torch.device("cuda")
    timing = load("common").time_of(lambda: torch.cuda.synchronize(), device, 2)
    assert timing.columns()["ms"] == "host-bound"
