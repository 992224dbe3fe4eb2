# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, refuse what is wrong, and time what they say they time. No speed is asserted here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels import ops

TIMES = ("ms", "p20 ms", "p80 ms", "CPU µs")


@pytest.mark.parametrize(
    ("name", "options", "count", "column"),
    [
        ("lora_linear", ["--shapes", "64x96x128"], 14, "÷ te base"),
        ("bias_dropout_add", ["--shapes", "40x64", "33x65"], (4 + 2) * 2 * 2, "÷ floor"),
        ("philox", ["--shapes", "40x64"], 7, "Gelement/s"),
        ("fp8_state", ["--tensors", "5", "--histories", "1", "4"], 2 * 4, "÷ ours"),
        ("fp8_linear_lora", ["--shapes", "32x64x128", "--ranks", "3", "16"], 2 * 4, "÷ cublaslt"),
        ("fp8_grad_input", ["--shapes", "32x64x128", "--ranks", "16"], 5 + 7, "÷ cublaslt"),
        ("quantize_grad", ["--shapes", "40x64", "--ranks", "0", "5"], 2 + 3, "÷ floor"),
        ("quantize_lora_down", ["--shapes", "40x64", "--ranks", "0", "5"], 3 * 2, "÷ floor"),
        ("rms_norm_quantize", ["--shapes", "40x64"], 3 * 2, "÷ floor"),
        ("rope_qkv", ["--shapes", "40x4x2x8"], 3 * 2, "÷ floor"),
        ("swiglu_quantize", ["--shapes", "40x64"], 7 * 2, "÷ floor"),
    ],
    ids=[
        "lora_linear",
        "bias_dropout_add",
        "philox",
        "fp8_state",
        "fp8_linear_lora",
        "fp8_grad_input",
        "quantize_grad",
        "quantize_lora_down",
        "rms_norm_quantize",
        "rope_qkv",
        "swiglu_quantize",
    ],
)
def test_it_runs_and_writes_what_it_printed(
    name: str,
    options: list[str],
    count: int,
    column: str,
    load: Callable[[str], ModuleType],
    run: Callable[..., int],
    rows_of: Callable[[Path], list[dict[str, str]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind = "layers" if name == "lora_linear" else "ops"
    assert run(load(f"{kind}.bench_{name}"), *options, "--output", tmp_path) == 0
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
    bench = load("lib.bias_dropout_add")
    monkeypatch.setitem(bench.PROVIDERS, "ours", lambda: lambda i: broken(bench, i))
    cpu = torch.device("cpu")
    inputs = bench.make_inputs("40x64", 0.1, True, torch.bfloat16, cpu)
    assert bench.timed("ours", inputs, cpu, 1) == (message, {})


def test_a_wrong_update_of_scales_is_exit_code_1(
    load: Callable[[str], ModuleType],
    run: Callable[..., int],
    rows_of: Callable[[Path], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    bench = load("ops.bench_fp8_state")

    def stale(problem: Any) -> Any:
        return bench.Provider(lambda: None, lambda: None, lambda: problem.before)

    monkeypatch.setitem(bench.PROVIDERS, "ours", stale)
    options = ["--tensors", 3, "--histories", 4, "--output", tmp_path]
    assert run(bench, *options) == 1
    row = rows_of(tmp_path / "fp8_state.csv")[0]
    assert row["check"].startswith("WRONG") and not any(row[time] for time in TIMES)


def test_spread_and_what_could_not_be_measured(load: Callable[[str], ModuleType]) -> None:
    common = load("lib.common")
    timing = common.Timing.of([5e-3, 1e-3, 2e-3, 3e-3, 4e-3, 6e-3], 7e-6)
    assert timing.columns() == {"ms": 3.5, "p20 ms": 2.0, "p80 ms": 5.0, "CPU µs": 7.0}
    late = common.Timing.of([math.nan], 7e-6).columns()
    assert late["ms"] == "host-bound" and late["CPU µs"] == 7.0
    assert common.ratio(late["ms"], 2.0) == "" and common.ratio(3.0, 2.0) == 1.5


def another_rounding(i: Any, results: Any) -> Any:
    return results[0].bitwise_xor(1), *results[1:]


def unscaled(i: Any, results: Any) -> Any:
    *head, last = results
    return *head, last * 0.97


def another_slot(i: Any, results: Any) -> Any:
    i = type(i)(**{**vars(i), "slot": i.slot + 1})
    return ops.quantize_lora_down(*i.arguments())


@pytest.mark.parametrize(
    ("name", "broken", "message"),
    [
        ("quantize_lora_down", another_rounding, "WRONG: x8"),
        ("quantize_lora_down", unscaled, "WRONG: s"),
        ("quantize_lora_down", another_slot, "WRONG: s"),
        ("quantize_grad", another_rounding, "WRONG: dy8"),
        ("quantize_grad", unscaled, "WRONG: dB"),
    ],
    ids=["x8", "s", "mask", "dy8", "dB"],
)
def test_a_wrong_quantization_is_not_timed(
    name: str,
    broken: Callable[[Any, Any], Any],
    message: str,
    load: Callable[[str], ModuleType],
    run: Callable[..., int],
    rows_of: Callable[[Path], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    bench = load(f"ops.bench_{name}")
    right = bench.ours
    monkeypatch.setitem(bench.PROVIDERS, "ours", lambda i: broken(i, right(i)))
    options = [
        "--shapes",
        "40x64",
        "--ranks",
        5,
        "--providers",
        "ours",
        "torch",
        "--output",
        tmp_path,
    ]
    dropout = ["--p", 0.1] if name == "quantize_lora_down" else []
    assert run(bench, *options, *dropout) == 1
    ours, torch_form = rows_of(tmp_path / f"{name}.csv")
    assert ours["check"] == message and not any(ours[time] for time in TIMES)
    assert torch_form["check"] == "ok" and torch_form["÷ ours"] == ""


def nearly(results: Any) -> Any:
    """The first tensor with elements 5% off, bytes by an FP8 step."""
    results = list(results) if isinstance(results, tuple) else [results]
    first = next(i for i, t in enumerate(results) if t.numel())
    wrong = results[first]
    results[first] = wrong + 8 if wrong.dtype == torch.uint8 else wrong * 1.05
    return tuple(results) if len(results) > 1 else results[0]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("rms_norm_quantize", "40x64"), ("rope_qkv", "40x4x2x8"), ("swiglu_quantize", "40x64")],
)
def test_a_wrong_pass_is_not_timed(
    name: str,
    shape: str,
    load: Callable[[str], ModuleType],
    run: Callable[..., int],
    rows_of: Callable[[Path], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    layer_ops = load("lib.layer_ops")
    right = layer_ops.runs

    def runs(each: Any, providers: list[str]) -> dict[str, Callable[[], object]]:
        found = right(each, providers)
        return {**found, "ours": lambda: nearly(found["ours"]())}

    monkeypatch.setattr(layer_ops, "runs", runs)
    assert run(load(f"ops.bench_{name}"), "--shapes", shape, "--output", tmp_path) == 1
    rows = rows_of(tmp_path / f"{name}.csv")
    ours = [row for row in rows if row["provider"] == "ours"]
    assert all(row["check"].startswith("WRONG") and not row["ms"] for row in ours)
    assert all(row["check"] == "ok" for row in rows if row["provider"] == "torch")


@pytest.mark.parametrize(
    "changed", [{"slot": None}, {"ds": 0}, {"weight_scale_inv": 1.02}], ids=str
)
def test_a_wrong_dx_is_not_timed(
    changed: dict[str, Any],
    load: Callable[[str], ModuleType],
    run: Callable[..., int],
    rows_of: Callable[[Path], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    bench = load("ops.bench_fp8_grad_input")

    def broken(i: Any) -> Tensor:
        new = {k: v if v is None else getattr(i, k) * v for k, v in changed.items()}
        return bench.through_op(type(i)(**{**vars(i), **new}), True)

    monkeypatch.setitem(bench.PROVIDERS, "ours, both", (broken, True))
    options = ["--shapes", "32x64x128", "--ranks", 16, "--p", 0.1, "--output", tmp_path]
    assert run(bench, *options) == 1
    rows = {row["provider"]: row for row in rows_of(tmp_path / "fp8_grad_input.csv")}
    assert rows["ours, both"]["check"].startswith("WRONG") and not rows["ours, both"]["ms"]
    for right in ("ours, single", "ours, both, mask given"):
        assert rows[right]["check"] == "ok" and float(rows[right]["error"]) < 3e-3


def test_only_mask_given_is_given_the_mask_that_the_others_draw(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's op draws it whatever it is given, so what is asked is what it is called with."""
    bench, cpu, given = load("ops.bench_fp8_grad_input"), torch.device("cpu"), {}
    i = bench.make_inputs("32x64x128", 16, 0.1, cpu)
    keep = bench.reference.drawn_mask(i.slot, 0.1, bench.SITE, 32, 128)
    assert torch.equal(i.dropped, bench.reference.dropped_bits(keep))
    for name, (run, _) in bench.PROVIDERS.items():
        if name.startswith("ours"):
            call = lambda *_, dropped, name=name: given.update({name: dropped})  # noqa: E731
            monkeypatch.setattr(bench.ops, "fp8_grad_input", call)
            run(i)
    assert {name for name, mask in given.items() if mask is i.dropped} == set(bench.NEEDS_MASK)
    assert len(given) == 4 and bench.make_inputs("32x64x128", 16, 0.0, cpu).dropped is None


def test_samples_of_two_runs_are_one_timing(load: Callable[[str], ModuleType]) -> None:
    common = load("lib.common")
    both = common.Timing.of_samples([([1.0, 2.0], [9.0]), ([3.0], [7.0, 8.0])])
    assert (both.low, both.median, both.high, both.host) == (1.0, 2.0, 3.0, 8.0)
    late = common.Timing.of_samples([([1.0], [5.0]), ([], [7.0])])
    assert math.isnan(late.median) and late.host == 6.0, "one run that the host fell behind in"


def test_as_many_repetitions_as_the_time_allows(load: Callable[[str], ModuleType]) -> None:
    within, cpu = load("lib.common").repetitions_within, torch.device("cpu")
    assert within(0.02, lambda: time.sleep(2e-3), cpu, 50) in range(3, 11)
    assert within(1.0, lambda: None, cpu, 50) == 50
    assert within(0.0, lambda: None, cpu, 50) == 3


@pytest.mark.gpu
def test_a_slow_host_is_not_in_the_device_s_time(load: Callable[[str], ModuleType]) -> None:
    device = torch.device("cuda")
    x = torch.zeros(1024, device=device)

    def dawdle() -> None:
        x.add_(1)
        time.sleep(2e-3)
        x.add_(1)

    timing = load("lib.common").time_of(dawdle, device, 5)
    assert timing.host > 2e-3
    assert timing.high < 0.2e-3  # two tiny kernels: some µs


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_is_host_bound(load: Callable[[str], ModuleType]) -> None:
    device = torch.device("cuda")
    timing = load("lib.common").time_of(lambda: torch.cuda.synchronize(), device, 2)
    assert timing.columns()["ms"] == "host-bound"
