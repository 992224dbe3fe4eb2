# SPDX-License-Identifier: Apache-2.0
"""Every benchmark of an op runs, writes what it printed, and does not time what is wrong. No speed is asserted here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.lib import bias_dropout_add, layer_ops
from benchmarks.ops import bench_fp8_grad_input
from lorakernels import ops
from lorakernels.numerics.dropout import drawn_mask, dropped_bits
from lorakernels.values import Weight
from tests.benchmarks.aliases import Load, RowsOf, Run

TIMES = ("ms", "p20 ms", "p80 ms", "CPU µs")
# The options of each, its rows with them, and a column of its own
BENCHES: dict[str, tuple[str, int, str]] = {
    "bias_dropout_add": ("--shapes 40x64 33x65", (4 + 2) * 2 * 2, "÷ floor"),
    "philox": ("--shapes 40x64", 7, "Gelement/s"),
    "fp8_state": ("--tensors 5 --histories 1 4", 2 * 4, "÷ ours"),
    "fp8_block_grad_input": ("--shapes 32x64x144 --ranks 3 16", 2 * 3, "÷ cublaslt"),
    "fp8_block_linear": ("--shapes 32x64x144 --ranks 3 16", 2 * 3, "÷ cublaslt"),
    "fp8_linear_lora": ("--shapes 32x64x128 --ranks 3 16", 2 * 4, "÷ cublaslt"),
    "fp8_grad_input": ("--shapes 32x64x128 --ranks 16", 4 + 5, "÷ cublaslt"),
    "lora_grad_a": ("--shapes 40x64 --ranks 5 --x x8 x blocks", 3 * (2 + 3), "÷ floor"),
    "quantize_grad": ("--shapes 40x64 --ranks 0 5 --modes eval delayed", 2 * (2 + 3), "÷ floor"),
    "quantize_lora_down": ("--shapes 40x64 --ranks 0 5", 3 * 2, "÷ floor"),
    "transpose_fp8": ("--shapes 40x64 64x64", 2 * 3, "÷ floor"),
    "cross_entropy": ("--shapes 16x257", 3, "÷ floor"),
    "rms_norm_quantize": ("--shapes 40x64", 3 * 2, "÷ floor"),
    "rope_qkv": ("--shapes 40x4x2x8", 3 * 2, "÷ floor"),
    "swiglu_quantize": ("--shapes 40x64", 7 * 2, "÷ floor"),
}


@pytest.mark.parametrize("name", BENCHES)
def test_it_runs_and_writes_what_it_printed(
    name: str,
    load: Load,
    run: Run,
    rows_of: RowsOf,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options, count, column = BENCHES[name]
    assert run(load(f"ops.bench_{name}"), *options.split()) == 0
    rows = rows_of(name)
    assert len(rows) == count
    assert {*TIMES, column, "device", "commit"} <= set(rows[0])
    timed = [row for row in rows if row["check"] == "ok"]
    assert timed and all(float(row[time]) > 0 for row in timed for time in TIMES)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.csv"]
    printed = capsys.readouterr().out
    assert column in printed and all(row["ms"] in printed for row in rows)


Change = Callable[[Any, Any], Any]  # (inputs, a provider's result) → a wrong one


def first_bit(i: Any, found: Any) -> Any:
    return found ^ 1 if isinstance(found, Tensor) else (found[0] ^ 1, *found[1:])


def last_scaled(i: Any, found: Any) -> Any:
    if isinstance(found, Tensor):
        return found * 0.97
    *head, last = found
    return *head, last * 0.97


def another_slot(i: Any, found: Any) -> Any:
    dropout = i.dropout and i.dropout._replace(slot=i.dropout.slot + 1)
    return ops.quantize_lora_down(i.x, i.lora_A, i.scaling, dropout)


def dx_with(**changed: Callable[[Any], Any]) -> Change:
    def change(i: Any, found: Any) -> Tensor:
        new = {k: changed[k](getattr(i, k)) for k in changed}
        return bench_fp8_grad_input.through_op(replace(i, **new))

    return change


def two_percent_larger(weight: Weight) -> Weight:
    assert weight.scale_inv is not None
    return weight._replace(scale_inv=1.02 * weight.scale_inv)


def nearly(i: Any, found: Any) -> Any:
    """The first tensor with elements 5% off, bytes by an FP8 step."""
    results = list(found) if isinstance(found, tuple) else [found]
    first = next(i for i, t in enumerate(results) if t.numel())
    wrong = results[first]
    results[first] = wrong + 8 if wrong.dtype == torch.uint8 else wrong * 1.05
    return tuple(results) if len(results) > 1 else results[0]


def another_mask(i: Any, out: Tensor) -> Tensor:
    return bias_dropout_add.plain(i.x, i.bias, i.residual, i.p) if i.p else out


def without_bias(i: Any, out: Tensor) -> Tensor:
    return out if i.bias is None else out - i.bias.detach()


def a_bias_of_its_own(i: Any, out: Tensor) -> Tensor:
    return out if i.bias is None else out + 4 * (i.bias - i.bias.detach())


def stale(problem: Any, provider: Any) -> Any:
    return type(provider)(lambda: None, lambda: None, lambda: problem.before)


# What is wrong: whose result, how, what the row says
WRONG: dict[str, tuple[str, str, Change, str]] = {
    "bias_dropout_add: mask": ("bias_dropout_add", "ours", another_mask, "mask"),
    "bias_dropout_add: out": ("bias_dropout_add", "ours", lambda i, out: out * 1.02, "out"),
    "bias_dropout_add: bias": ("bias_dropout_add", "ours", without_bias, "out"),
    "bias_dropout_add: dx": (
        "bias_dropout_add", "ours", lambda i, out: out + (out - out.detach()), "dx",
    ),
    "bias_dropout_add: dbias": ("bias_dropout_add", "ours", a_bias_of_its_own, "dbias"),
    "fp8_state": ("fp8_state", "ours", stale, "scales or histories differ"),
    "fp8_block_grad_input: dx": ("fp8_block_grad_input", "ours", nearly, "dx"),
    "fp8_block_linear: y": ("fp8_block_linear", "ours", nearly, "y"),
    "fp8_linear_lora: y": ("fp8_linear_lora", "ours", nearly, "error"),
    "fp8_grad_input: mask": ("fp8_grad_input", "ours, single", dx_with(dropout=lambda _: None), "error"),
    "fp8_grad_input: LoRA": (
        "fp8_grad_input", "ours, single", dx_with(ds=torch.zeros_like), "error",
    ),
    "fp8_grad_input: scale": (
        "fp8_grad_input", "ours, single", dx_with(weight=two_percent_larger), "error",
    ),
    "lora_grad_a: dA": ("lora_grad_a", "ours", last_scaled, "dA"),
    "quantize_grad: dy8": ("quantize_grad", "ours", first_bit, "dy8"),
    "quantize_grad: dB": (
        "quantize_grad", "ours", lambda i, found: (*found[:3], 0.97 * found[3], found[4]), "dB",
    ),
    "quantize_grad: mask": (
        "quantize_grad", "ours, drawing a mask", lambda i, found: (*found[:4], found[4] ^ 1), "dropped",
    ),
    "quantize_lora_down: x8": ("quantize_lora_down", "ours", first_bit, "x8"),
    "quantize_lora_down: s": ("quantize_lora_down", "ours", last_scaled, "s"),
    "quantize_lora_down: mask": ("quantize_lora_down", "ours", another_slot, "s"),
    "transpose_fp8: a bit": ("transpose_fp8", "ours", first_bit, "bytes"),
    "transpose_fp8: not transposed": (
        "transpose_fp8", "ours", lambda w, found: w.clone(), "bytes",
    ),
    "cross_entropy: losses": (
        "cross_entropy", "ours", lambda i, found: (1.01 * found[0], found[1]), "losses",
    ),
    "cross_entropy: dz": ("cross_entropy", "ours", last_scaled, "dz"),
    "rms_norm_quantize": ("rms_norm_quantize", "ours", nearly, ""),
    "rope_qkv": ("rope_qkv", "ours", nearly, ""),
    "swiglu_quantize": ("swiglu_quantize", "ours", nearly, ""),
}  # fmt: skip


def change_provider(module: Any, name: str, change: Change, patch: pytest.MonkeyPatch) -> None:
    """Let the provider of that name return what `change` makes of its result."""
    if not hasattr(module, "PROVIDERS"):
        right = layer_ops.runs

        def runs(each: Any, providers: list[str]) -> dict[str, Callable[[], object]]:
            found = right(each, providers)
            return {**found, name: lambda: change(None, found[name]())}

        return patch.setattr(layer_ops, "runs", runs)
    made = module.PROVIDERS[name]
    if isinstance(made, tuple):
        call, lora = made
        return patch.setitem(module.PROVIDERS, name, (lambda i: change(i, call(i)), lora))
    if module.PROVIDERS is bias_dropout_add.PROVIDERS:  # of what makes a provider
        return patch.setitem(module.PROVIDERS, name, lambda: lambda i: change(i, made()(i)))
    patch.setitem(module.PROVIDERS, name, lambda i: change(i, made(i)))


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_not_timed(
    what: str, load: Load, run: Run, rows_of: RowsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, provider, change, message = WRONG[what]
    module = load(f"ops.bench_{name}")
    change_provider(module, provider, change, monkeypatch)
    assert run(module, *BENCHES[name][0].split()) == 1
    wrong = [row for row in rows_of(name) if row["check"] not in ("ok", "not installed")]
    assert wrong and {row["provider"] for row in wrong} == {provider}
    assert all(row["check"].startswith(f"WRONG: {message}") for row in wrong)
    assert not any(row[time] for row in wrong for time in TIMES)


def test_only_mask_given_is_given_the_mask_that_the_others_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU's op draws it whatever it is given, so what is asked is what it is called with."""
    bench, cpu, given = bench_fp8_grad_input, torch.device("cpu"), {}
    i = bench.make_inputs("32x64x128", 16, 0.1, cpu)
    assert i.dropout is not None and i.given is not None and i.given.dropped is not None
    assert torch.equal(i.given.dropped, dropped_bits(drawn_mask(i.dropout, 32, 128)))
    assert i.dropout == (i.dropout.slot, 0.1, bench.SITE, 0, 0, None, ())
    for name, (run, _) in bench.PROVIDERS.items():
        if name.startswith("ours"):
            call = lambda *a, name=name: given.update({name: a[5].dropped})  # noqa: E731
            monkeypatch.setattr(bench.ops, "fp8_grad_input", call)
            run(i)
    assert {name for name, mask in given.items() if mask is i.given.dropped} == set(
        bench.NEEDS_MASK
    )
    assert len(given) == 2 and bench.make_inputs("32x64x128", 16, 0.0, cpu).given is None
