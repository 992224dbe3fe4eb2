# SPDX-License-Identifier: Apache-2.0
"""bench_step_parts: every kernel is of one part, and their sum is the layers'."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.lib.breakdown import Call
from tests.benchmarks.aliases import Load, RowsOf, Run


@pytest.fixture
def bench(load: Load) -> Any:
    pytest.importorskip("transformers")
    return load("layers.bench_step_parts")


def call(name: str, seconds: float, *kernels: str) -> Call:
    return Call(name, [], 0, {}, seconds, list(kernels))


def test_a_layer_of_this_machine_has_all_parts_but_transpositions(
    bench: Any, run: Run, rows_of: RowsOf
) -> None:
    assert run(bench) == 0
    rows = rows_of("step_parts")
    assert [row["part"] for row in rows] == [*bench.PARTS, bench.REST, *bench.HEADS]
    idle = [row["part"] for row in rows if float(row["ms"]) == 0]
    assert idle == ["transpositions of W"]
    kernels = {row["part"]: row["kernels"] for row in rows}
    # q, k and v are one product, and so are gate and up; two layers
    assert kernels["FP8 GEMMs, forward"] == kernels["FP8 GEMMs, dgrad"] == "8"
    assert {row["check"] for row in rows} == {"ok"} and {row["save"] for row in rows} == {
        "recompute"
    }
    assert bench.size_of(bench.SPECS["8b"]) == bench.Size(4096, 14336, 32, 8, 4096)


def test_parts_are_sums_over_the_layers(bench: Any) -> None:
    calls = [
        call("lorakernels.quantize_grad", 2e-6, "a", "b"),
        call("lorakernels.quantize_lora_down", 1e-6, "c"),
        call("lorakernels.rms_norm_quantize", 4e-6, "d"),
        call("aten.add.Tensor", 8e-6, "e"),
    ]
    rows = {row["part"]: row for row in bench.layer_parts(calls, 32)}
    assert rows["quantize_grad, LoRA-down, dA"]["ms"] == round(32 * 3e-3, 3)
    assert rows["quantize_grad, LoRA-down, dA"]["kernels"] == 96
    assert rows["norms, RoPE and their gradients"]["ms"] == round(32 * 4e-3, 3)
    assert rows[bench.REST]["ms"] == round(32 * 8e-3, 3)


def test_a_product_that_turns_w_beside_itself_is_told(bench: Any) -> None:
    calls = [call("lorakernels.fp8_grad_input", 1e-6, "transpose_fp8_kernel<1>", "fp8_gemm_kernel")]
    rows = {row["part"]: row for row in bench.layer_parts(calls, 32)}
    assert rows["transpositions of W"]["ms"] == "in FP8 GEMMs, dgrad"
    assert rows["transpositions of W"]["kernels"] == 32
    assert rows["FP8 GEMMs, dgrad"]["ms"] == 0.032
