# SPDX-License-Identifier: Apache-2.0
"""report/kernels.py: parts beside their budget, products by depth, an H100's ops beside an H200's."""

from __future__ import annotations

from typing import Any

from benchmarks.layers import bench_step_parts
from benchmarks.ops import gemm_depths
from benchmarks.report import kernels, pages

RUN = {"device": "cuda: NVIDIA H200", "torch": "2.11", "commit": "abc"}


def test_every_part_that_is_measured_has_its_budget() -> None:
    measured = {*bench_step_parts.PARTS, bench_step_parts.REST, *bench_step_parts.HEADS}
    assert {part for _, of, _, _ in kernels.BUDGET["Llama-3.1-8B"] for part in of} == measured
    rows: list[dict[str, str]] = []
    for model, budget in kernels.BUDGET.items():
        assert {part for _, of, _, _ in budget for part in of} <= measured
        said = {"model": model, "tokens": "4096", **RUN}
        rows += [{"part": part, "ms": "39.16", **said} for part in measured]
    assert set(kernels.BUDGET) == {bench_step_parts.SPECS[m].name for m in ("8b", "70b", "1b")}
    text = kernels.parts_table({"step_parts": rows})
    assert "| Llama-3.1-8B, 4,096 tokens | FP8 GEMMs, forward | 41 | 38.7 | 39.2 |" in text
    assert "| Llama-2-70B, 4,096 tokens | FP8 GEMMs | 1,690 | 1,620 | 78.3 |" in text
    for row in rows:
        row["ms"] = "in FP8 GEMMs, dgrad" if row["part"] == kernels.TURNED else "39.16"
    assert f"| {kernels.TURNED} | 3.7 | 0 | – |" in kernels.parts_table({"step_parts": rows})
    assert kernels.parts_table({}) == ""


def test_a_product_s_loop_and_epilogue_stand_as_they_were_fitted() -> None:
    points: list[dict[str, Any]] = [
        {"product": "forward", "depth": d, "by": "ncu", "cycles a tile": 1060 * d / 128 + 1300}
        for d in (1024, 4096, 16384)
    ]
    (row,) = gemm_depths.fits(points)
    text = kernels.depths_table({"gemm_depths": [{**{k: str(v) for k, v in row.items()}, **RUN}]})
    assert "| forward | 1060.0 | 0.966 | 1300 | 0.0% |" in text
    assert "over depths of 1024 to 16384" in text and "Nsight Compute's active cycles" in text


def test_an_op_of_both_gpus_is_one_line() -> None:
    row = {"shape": "8192x8192", "provider": "ours", "ms": "0.0367", "÷ floor": "1.15", **RUN}
    h100 = {**row, "ms": "0.0401", "÷ floor": "1.2", "device": "cuda: NVIDIA H100 80GB HBM3"}
    alone = {**row, "shape": "4096x4096"}
    text = kernels.beside_table({"transpose_fp8": [row], "h100/transpose_fp8": [h100, alone]})
    assert text.count("\n|") == 3
    assert "| `transpose_fp8` 8192×8192 | 36.7 | 1.15 | 40.1 | 1.20 |" in text
    assert "NVIDIA H200" in text and "NVIDIA H100 80GB HBM3" in text
    assert kernels.beside_table({"transpose_fp8": [row]}) == ""


def test_the_records_of_an_h100_stand_beside_those_of_an_h200() -> None:
    found, here = pages.records(pages.RESULTS), pages.read(pages.RESULTS)
    assert found["scaling"] == here["scaling"] != found["h100/scaling"]
    assert "generate" in found and "h100/generate" not in found
