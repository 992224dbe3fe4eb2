# SPDX-License-Identifier: Apache-2.0
"""bench_decoder_layer: peers are one layer, a wrong one is not timed, a broken one stops no other; floors count."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

CPU = torch.device("cpu")
SAVES = ("full", "recompute", "fp8", "checkpoint")
OURS = ("ours, not fused", *(f"ours, {save}" for save in SAVES), "ours, recompute, both")
ON_CPU = ("hf bf16, no lora", "hf + peft bf16", *OURS)


@pytest.fixture
def bench(load: Callable[[str], ModuleType]) -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    return load("layers.bench_decoder_layer")


@pytest.fixture
def layers(load: Callable[[str], ModuleType]) -> Any:
    pytest.importorskip("transformers")
    return load("peers.layers")


@pytest.mark.parametrize("name", ON_CPU)
def test_the_layers_of_this_machine_are_one_layer(name: str, bench: Any, layers: Any) -> None:
    case = layers.make_layer_case(layers.SIZES["tiny"], 0.0, CPU)
    peer = bench.MAKE[name](case)
    found = layers.errors(peer, layers.truth(case, peer.lora)).found
    assert layers.fault(peer, layers.Errors(found)) == ""
    names = {"y", "dx", "qkv.A", "qkv.B", "o_proj.A", "o_proj.B"}
    assert set(found) == (names if peer.lora else {"y", "dx"})
    assert (found["y"] > 1e-3) == name.startswith("ours"), "rounded to FP8 or not"


@pytest.mark.parametrize("changed", ["o_proj", "down_proj", "input_layernorm", "A", "B"])
def test_a_layer_of_other_weights_is_wrong(changed: str, bench: Any, layers: Any) -> None:
    case = layers.make_layer_case(layers.SIZES["tiny"], 0.0, CPU)
    field = {"A": "A", "B": "B", "input_layernorm": "norms"}.get(changed, "weights")
    name = "v_proj" if changed in "AB" else changed
    values = {**getattr(case, field), name: -getattr(case, field)[name]}
    peer = bench.MAKE["ours, recompute"](dataclasses.replace(case, **{field: values}))
    assert layers.fault(peer, layers.errors(peer, layers.truth(case, True)))


class Broken:
    """Stands in for a layer: breaks as it is built, or as it is asked to run."""

    def __init__(self, when: str, layers: Any) -> None:
        self.when, self.made, self.layers = when, 0, layers

    def __call__(self, case: Any) -> Any:
        self.made += 1
        if self.when == "build":
            raise NotImplementedError("no such size\nand more")
        peer = self.layers.HfPlain(case)
        if self.when == "wrong":
            peer.layer = lambda x: 2 * type(peer).layer(peer, x)
        if self.when == "measure" and self.made == 2:  # the one that is timed
            calls: list[int] = []

            def layer(x: Tensor) -> Tensor:
                calls.append(1)
                if len(calls) > 3:
                    raise RuntimeError("it broke")
                return type(peer).layer(peer, x)

            peer.layer = layer
        return peer


@pytest.mark.parametrize(
    ("when", "name", "check", "code"),
    [("build", "hf + te fp8 + lora", "raised: NotImplementedError: no such size", 0),
     ("build", "ours, fp8", "WRONG: NotImplementedError: no such size", 1),
     ("wrong", "hf + te fp8 + lora", "WRONG: y ", 1),
     ("measure", "hf + te fp8 + lora", "raised: RuntimeError: it broke", 0)],
    ids=["peer-unbuilt", "ours-unbuilt", "wrong", "breaks-when-timed"],
)  # fmt: skip
def test_what_breaks_says_so_and_the_rest_is_timed(
    when: str,
    name: str,
    check: str,
    code: int,
    bench: Any,
    layers: Any,
    run: Callable[..., int],
    rows_of: Callable[[Path], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(bench.MAKE, name, Broken(when, layers))
    chosen = ["--providers", name, "hf bf16, no lora", "--output", tmp_path]
    assert run(bench, *chosen) == code
    rows = {row["provider"]: row for row in rows_of(tmp_path / "decoder_layer.csv")}
    assert rows[name]["check"].startswith(check) and not rows[name]["ms"]
    other = rows["hf bf16, no lora"]
    assert other["check"] == "ok" and float(other["fwd ms"]) > 0 and float(other["wall ms"]) > 0


def test_it_writes_rows_kernels_and_plot(
    bench: Any,
    run: Callable[..., int],
    rows_of: Callable[[Path], list[dict[str, str]]],
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    chosen = ["te layer fp8, no lora", "hf + peft bf16, compiled", "ours, recompute"]
    assert run(bench, "--providers", *chosen, "--output", tmp_path) == 0
    te, compiled, ours, graphed = rows_of(tmp_path / "decoder_layer.csv")
    assert "cannot be imported" in te["check"] or te["check"] == "needs a GPU"
    assert compiled["check"] == graphed["check"] == "needs a GPU" and ours["check"] == "ok"
    assert graphed["provider"] == "ours, recompute, graphed" and not graphed["ms"]
    assert float(ours["ms"]) > 0 and ours["÷ te layer"] == ""
    size = bench.SIZES["tiny"]
    rows = 2 * size.hidden + (2 * size.heads + 2 * size.kv_heads) * size.head_dim + 4 * 16
    predicted = size.tokens * (4 * (rows + 2 * size.ffn) + 4 * size.heads + 8)
    assert float(ours["predicted MB"]) == round(predicted / 1e6, 1), (
        "the formula of fusion/memory.py"
    )
    kernels = rows_of(tmp_path / "decoder_layer_kernels.csv")
    assert {row["pass"] for row in kernels} == {"forward", "backward", "both"}
    assert kernels[-1]["op"] == "sum" and float(kernels[-1]["% of step"]) == 100
    assert "lorakernels.fp8_linear_lora" in {row["op"] for row in kernels}
    assert (tmp_path / "decoder_layer.png").read_bytes().startswith(b"\x89PNG")


def test_providers_are_asked_in_order_and_back(
    bench: Any, load: Callable[[str], ModuleType]
) -> None:
    asked: list[tuple[str, str]] = []

    def worker(name: str) -> Any:
        def note(request: str, answer: Any) -> Any:
            asked.append((request, name))
            return answer

        samples = {"forward": [1.0], "backward": [1.0], "host": [1.0], "wall": [1.0]}
        check = {"a": "ok", "b": "ok", "c": "needs a GPU"}[name]
        handlers = {
            "build": lambda size: note("build", {name: {"check": check, "error": ""}}),
            "measure": lambda seconds, at_most: note("measure", {name: samples}),
            "free": lambda: note("free", None),
        }
        return load("lib.workers").Local(handlers)

    args = type("", (), {"repetitions": 3})
    rows, kernels = bench.bench_size("tiny", {n: worker(n) for n in "abc"}, args, 1e9)
    assert "".join(name for request, name in asked if request == "measure") == "abba"
    assert "".join(name for request, name in asked if request != "measure") == "abcabc"
    assert [row["ms"] for row in rows] == [2000.0, 2000.0, ""] and kernels == []


def test_te_is_best_of_its_two_and_medians_are_of_both_rounds(bench: Any) -> None:
    def part(*steps: float) -> dict[str, list[float]]:
        halves = [s / 2 for s in steps]
        return {"forward": halves, "backward": halves, "host": [1e-3], "wall": [2e-3]}

    te = bench.TE_LAYER
    names = (te, te + bench.GRAPHED, "ours, recompute", "hf bf16, no lora")
    heads = {name: {"check": "ok", "error": ""} for name in names}
    late = {"forward": [], "backward": [], "host": [5e-3], "wall": [6e-3]}
    rounds = {
        te: [part(4e-3), part(4e-3)],
        te + bench.GRAPHED: [part(2e-3), part(2e-3)],
        "ours, recompute": [part(1e-3, 1e-3), part(5e-3)],
        "hf bf16, no lora": [part(1e-3), late],
    }
    rows = {row["provider"]: row for row in bench.rows_of("tiny", heads, rounds)}
    assert [rows[n]["÷ te layer"] for n in names] == [2.0, 1.0, 0.5, ""]
    assert [rows[n]["wall ÷ te layer"] for n in names] == [1.0, 1.0, 1.0, 2.0]
    ours = rows["ours, recompute"]
    assert (ours["fwd ms"], ours["ms"], ours["p80 ms"]) == (0.5, 1.0, 5.0)
    host_bound = rows["hf bf16, no lora"]
    assert host_bound["ms"] == "host-bound" and host_bound["wall ms"] == 4.0


def test_operations_of_a_layer_are_those_of_its_products(layers: Any) -> None:
    size = layers.SIZES["large"]
    kv, t = 1024, 8192
    weights = 2 * 8192 * 8192 + 2 * kv * 8192 + 3 * 8192 * 28672
    adapters = 16 * (4 * 8192 + 2 * (kv + 8192))
    attention = 3 * 2 * t * t * 8192  # forward 2, backward 4 products of 2 T² H, half of each
    assert size.flops(False) == 4 * t * weights + attention
    assert size.flops(True) == size.flops(False) + 6 * t * adapters


def test_floors_count_bytes_once_and_operations_by_format(
    load: Callable[[str], ModuleType],
) -> None:
    breakdown = load("lib.breakdown")
    import lorakernels  # noqa: F401  (registers its ops)

    m, n, k, r = 32, 64, 128, 16
    x8, w8 = (torch.zeros(s, k, dtype=torch.uint8) for s in (m, n))
    one, s, b = torch.ones(1), torch.zeros(m, r), torch.zeros(n, r)
    a, c = torch.zeros(m, n), torch.zeros(n, k)
    recorder = breakdown.Recorder()
    with recorder:
        ops = torch.ops.lorakernels
        ops.fp8_linear_lora(x8, one, w8, one, None, s, b, 2.0, torch.float32)
        a @ c
        a.add_(1.0)
        state = torch.zeros(1025, 4)
        ops.quantize_lora_down(torch.ones(m, k), None, state, 0, True, None, 0.0, 0)
    gemm, mm, add, quantize = (
        next(call for call in recorder.calls if call.name == f"{name}")
        for name in ("lorakernels.fp8_linear_lora", "aten.mm", "aten.add_.Tensor",
                     "lorakernels.quantize_lora_down")
    )  # fmt: skip
    assert gemm.operations == {"fp8": 2 * m * n * k, "bf16": 2 * m * n * r}
    # the two scales are one tensor here, and so counted once
    assert gemm.bytes == m * k + n * k + 4 + 4 * (m * r + n * r) + 4 * m * n
    assert mm.operations == {"bf16": 2 * m * n * k} and add.operations == {}
    assert add.bytes == 2 * 4 * m * n, "read and written"
    assert quantize.bytes == 4 * m * k + m * k + 4, "the state is not read as a whole"
    call = breakdown.Call("x", [], 4000, {"fp8": int(breakdown.PEAKS["fp8"])})
    assert breakdown.floor(call, 1e3) == (4.0, "bytes")
    assert breakdown.floor(call, 1e4) == (1.0, "operations")


def test_kernels_follow_the_step_and_their_sum_is_the_step(
    load: Callable[[str], ModuleType],
) -> None:
    breakdown = load("lib.breakdown")
    x = torch.randn(64, 64, requires_grad=True)
    calls, split = breakdown.record(
        lambda: (x @ x).sum(), lambda y: torch.autograd.grad(y, x), CPU, steps=2
    )
    rows = breakdown.rows(calls, split, 1e9)
    assert [r["op"] for r in rows[:2]] == ["aten.mm", "aten.sum"]
    assert [r["op"] for r in rows if r["pass"] == "backward"].count("aten.mm") == 2
    *ops, total = rows
    assert math.isclose(sum(r["µs"] for r in ops), total["µs"], rel_tol=0.01)
    assert math.isclose(sum(r["floor µs"] for r in ops), total["floor µs"], rel_tol=0.05)


@pytest.mark.parametrize(
    ("name", "short"),
    [("void lk::(anonymous namespace)::gemm_kernel<(lk::(anonymous namespace)::Product)0, f>(P)",
      "gemm_kernel"),
     ("cudnn_generated_fprop_kernel0_0", "cudnn_generated_fprop_kernel0_0"),
     ("lk::(anonymous namespace)::sum_kernel(lk::Params, int)", "sum_kernel"),
     ("Memset (Device)", "Memset ")],
    ids=["template", "plain", "parameters", "memset"],
)  # fmt: skip
def test_a_kernels_name_is_short(name: str, short: str, load: Callable[[str], ModuleType]) -> None:
    assert load("lib.breakdown")._short(name) == short


@pytest.mark.gpu
def test_the_layers_of_the_gpu_are_one_layer_or_say_why_not(bench: Any, tmp_path: Path) -> None:
    """Each in a process of its own: a peer that breaks says so in its row, one of ours fails here by name."""
    args = argparse.Namespace(
        providers=[*bench.MAKE], output=tmp_path, device="cuda", repetitions=3
    )
    with bench.started(args, torch.device("cuda")) as workers:
        rows, _ = bench.bench_size("tiny", workers, args, 4e12)
    checks = {str(row["provider"]): str(row["check"]) for row in rows}
    gone = {f"{row}, graphed" for row, check in checks.items() if check != "ok"}
    assert set(checks) | gone >= set(bench.PROVIDERS) >= set(checks)
    assert not {row: check for row, check in checks.items() if "WRONG" in check}
    assert all(checks[row] == "ok" for row in checks if row.startswith("ours")), checks


@pytest.mark.gpu
def test_every_kernel_of_the_gpu_has_its_op(bench: Any) -> None:
    provider = bench.Provider("ours, recompute", torch.device("cuda"))
    provider.build("tiny")
    *rows, total = provider.kernels(4e12)
    names = {row["op"] for row in rows}
    assert {"lorakernels.fp8_linear_lora", "lorakernels.fp8_grad_input"} <= names
    assert total["µs"] > 0 and all(row["µs"] > 0 and row["kernels"] != "cpu" for row in rows)
