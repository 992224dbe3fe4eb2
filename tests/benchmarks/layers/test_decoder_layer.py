# SPDX-License-Identifier: Apache-2.0
"""bench_decoder_layer: peers are one layer, a wrong one is not timed, a broken one stops no other; floors count."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import layer_case
from tests.benchmarks.aliases import Load, RowsOf, Run

CPU = torch.device("cpu")
SAVES = ("full", "recompute", "fp8", "checkpoint")
OURS = ("ours, not fused", *(f"ours, {save}" for save in SAVES))
ON_CPU = ("hf bf16, no lora", "hf + peft bf16", *OURS)


@pytest.fixture
def bench(load: Load) -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    return load("layers.bench_decoder_layer")


@pytest.fixture
def layers(load: Load) -> Any:
    pytest.importorskip("transformers")
    return load("peers.layers")


@pytest.mark.parametrize("name", ON_CPU)
def test_the_layers_of_this_machine_are_one_layer(name: str, bench: Any, layers: Any) -> None:
    case = layer_case.make_layer_case(layer_case.SIZES["tiny"], 0.0, CPU)
    peer = bench.MAKE[name](case)
    found = layers.errors(peer, layers.truth(case, peer.lora)).found
    assert layers.fault(peer, layers.Errors(found)) == ""
    names = {"y", "dx", "qkv.A", "qkv.B", "o_proj.A", "o_proj.B"}
    assert set(found) == (names if peer.lora else {"y", "dx"})
    assert (found["y"] > 1e-3) == name.startswith("ours"), "rounded to FP8 or not"


def test_a_layer_in_blocks_is_that_layer_where_its_sizes_are_blocks(
    bench: Any, layers: Any
) -> None:
    make = bench.MAKE["ours, blocks"]
    case = layer_case.make_layer_case(layer_case.Size(256, 384, 4, 2, 32), 0.0, CPU)
    found = layers.errors(make(case), layers.truth(case, True)).found
    assert layers.fault(make(case), layers.Errors(found)) == "" and found["y"] > 1e-3
    with pytest.raises(layers.Unavailable, match="must be a multiple of 128"):
        make(layer_case.make_layer_case(layer_case.SIZES["tiny"], 0.0, CPU))


@pytest.mark.parametrize("changed", ["o_proj", "down_proj", "input_layernorm", "A", "B"])
def test_a_layer_of_other_weights_is_wrong(changed: str, bench: Any, layers: Any) -> None:
    case = layer_case.make_layer_case(layer_case.SIZES["tiny"], 0.0, CPU)
    field = {"A": "A", "B": "B", "input_layernorm": "norms"}.get(changed, "weights")
    name = "v_proj" if changed in "AB" else changed
    values = {**getattr(case, field), name: -getattr(case, field)[name]}
    peer = bench.MAKE["ours, recompute"](dataclasses.replace(case, **{field: values}))
    assert layers.fault(peer, layers.errors(peer, layers.truth(case, True)))


def test_it_writes_rows_and_kernels(
    bench: Any,
    run: Run,
    rows_of: RowsOf,
) -> None:
    chosen = ["te layer fp8, no lora", "hf + peft bf16, compiled", "ours, recompute"]
    assert run(bench, "--providers", *chosen) == 0
    te, compiled, ours, graphed = rows_of("decoder_layer")
    assert "cannot be imported" in te["check"] or te["check"] == "needs a GPU"
    assert compiled["check"] == graphed["check"] == "needs a GPU" and ours["check"] == "ok"
    assert graphed["provider"] == "ours, recompute, graphed" and not graphed["ms"]
    assert float(ours["ms"]) > 0 and ours["÷ te layer"] == ""
    size = bench.SIZES["tiny"]
    rows = 2 * size.hidden + (2 * size.heads + 2 * size.kv_heads) * size.head_dim + 4 * 16
    predicted = size.tokens * (4 * (rows + 2 * size.ffn) + 4 * size.heads + 8)
    assert float(ours["predicted MB"]) == round(predicted / 1e6, 1), "the formula of fuse_memory.py"
    kernels = rows_of("decoder_layer_kernels")
    assert {row["pass"] for row in kernels} == {"forward", "backward", "both"}
    assert kernels[-1]["op"] == "sum" and float(kernels[-1]["% of step"]) == 100
    assert "lorakernels.fp8_linear_lora" in {row["op"] for row in kernels}


def test_providers_are_asked_in_order_and_back(bench: Any, load: Load) -> None:
    asked: list[tuple[str, str]] = []

    def worker(name: str) -> Any:
        def note(request: str, answer: Any) -> Any:
            asked.append((request, name))
            return answer

        samples = {
            "forward": [1.0],
            "backward": [1.0],
            "host": [1.0],
            "wall": [1.0],
            "joules": [1.0],
        }
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
        return {
            "forward": halves,
            "backward": halves,
            "host": [1e-3],
            "wall": [2e-3],
            "joules": [0.5],
        }

    te = bench.TE_LAYER
    names = (te, te + bench.GRAPHED, "ours, recompute", "hf bf16, no lora")
    heads = {name: {"check": "ok", "error": ""} for name in names}
    late = {"forward": [], "backward": [], "host": [5e-3], "wall": [6e-3], "joules": [0.5]}
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
    assert host_bound["J"] == 0.5


def test_operations_of_a_layer_are_those_of_its_products() -> None:
    size = layer_case.SIZES["large"]
    kv, t = 1024, 8192
    weights = 2 * 8192 * 8192 + 2 * kv * 8192 + 3 * 8192 * 28672
    adapters = 16 * (4 * 8192 + 2 * (kv + 8192))
    attention = 3 * 2 * t * t * 8192  # forward 2, backward 4 products of 2 T² H, half of each
    assert size.flops(False) == 4 * t * weights + attention
    assert size.flops(True) == size.flops(False) + 6 * t * adapters


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
