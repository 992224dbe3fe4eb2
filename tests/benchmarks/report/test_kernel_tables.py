# SPDX-License-Identifier: Apache-2.0
"""report/kernels.py: parts beside their budget, products by depth, an H100's ops beside an H200's."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.layers import bench_step_parts
from benchmarks.ops import gemm_depths
from benchmarks.report import kernels, pages

RUN = {"device": "cuda: NVIDIA H200", "torch": "2.11", "commit": "abc"}


def test_every_part_that_is_measured_has_its_budget() -> None:
    measured = {*bench_step_parts.PARTS, bench_step_parts.REST, *bench_step_parts.HEADS}
    rows: list[dict[str, str]] = []
    for model, budget in kernels.BUDGET.items():
        alone = [part for part in budget if part.what != kernels.TOGETHER]
        told = {name for part in alone for name in part.of}
        assert told == measured - ({kernels.FP8} if model == "Llama-2-70B" else set())
        said = {"model": model, "tokens": "4096", **RUN}
        rows += [{"part": part, "ms": "39.16", **said} for part in measured]
    assert set(kernels.BUDGET) == {bench_step_parts.SPECS[m].name for m in ("8b", "70b", "1b")}
    text = kernels.parts_table({"step_parts": rows})
    assert "| Llama-3.1-8B, 4,096 tokens | FP8 GEMMs, forward | 41 | 38.7 | 38 | 39.2 |" in text
    assert "|  | FP8 GEMMs | 1,690 | 1,620 | – | 78.3 |" in text
    assert f"|  | {kernels.TOGETHER} | – | – | – | 352.4 |" in text, "nine of 39.16"
    assert f"|  | {kernels.OTHER} | 2.6 | 2.2 | 1 | – |" in text
    for row in rows:
        row["ms"] = "in FP8 GEMMs, dgrad" if row["part"] == kernels.TURNED else "39.16"
    assert f"| {kernels.TURNED} | 3.7 | 0 | 0 | – |" in kernels.parts_table({"step_parts": rows})
    assert kernels.parts_table({}) == ""


@pytest.mark.parametrize(
    ("note", "now"),
    [("42 × fp8-offload, 38 × fp8", "0"), ("19 × checkpoint, 61 × fp8", "–"), ("", "–"), (None, "–")],
)  # fmt: skip
def test_no_second_forward_is_said_where_the_record_has_no_such_layer(
    note: str | None, now: str
) -> None:
    rows = [{"part": p, "ms": "1.0", "model": "Llama-2-70B", "tokens": "8192", **RUN}
            for p in (*kernels.SUM, kernels.BF16)]  # fmt: skip
    step = {**{k: str(v) for k, v in kernels.OFFLOADED.items()}, "note": note or ""}
    text = kernels.parts_table({"step_parts": rows, "end_to_end": [] if note is None else [step]})
    line = f"| Llama-2-70B, 8,192 tokens | {kernels.SECOND} | 195 | 0 to 110 | – | {now} |"
    assert line in text


def test_a_product_s_loop_and_epilogue_stand_as_they_were_fitted() -> None:
    points: list[dict[str, Any]] = [
        {"product": product, "depth": d, "by": "ncu", "cycles a tile": 1060 * d // 128 + rest}
        | {"kernel": "fp8_gemm_kernel"}
        for product, rest in (("forward", 1300), ("forward, R = 16", 1800))
        for d in (1024, 4096, 8192)
    ]
    told = [
        [{**{k: str(v) for k, v in row.items()}, **RUN} for row in rows]
        for rows in (gemm_depths.fits(points), points)
    ]
    results = dict(zip(("gemm_depths", "gemm_depths_points"), told, strict=True))
    text = kernels.depths_table(results)
    assert "| forward | 1024 to 8192 | 1060.0 | 0.966 | 1300 | 0.0% | 3604 |" in text
    assert "An adapter adds there: 500 forward; " in text
    assert "Nsight Compute's active cycles" in text
    alone = kernels.depths_table({"gemm_depths": told[0]})
    assert "| 1300 | 0.0% | – |" in alone and "adapter adds" not in alone
    assert kernels.depths_table({}) == ""


def test_an_op_of_both_gpus_is_one_line() -> None:
    row = {"shape": "8192x8192", "provider": "ours", "ms": "0.0367", "÷ floor": "1.15", **RUN}
    h100 = {**row, "ms": "0.0401", "÷ floor": "1.2", "device": "cuda: NVIDIA H100 80GB HBM3"}
    alone = {**row, "shape": "4096x4096"}
    text = kernels.beside_table({"transpose_fp8": [row], "h100/transpose_fp8": [h100, alone]})
    assert text.count("\n|") == 3
    assert "| `transpose_fp8` 8192×8192 | 36.7 | 1.15 | 40.1 | 1.20 |" in text
    assert text.startswith("Single ops on an H100 beside an H200. ")
    assert "NVIDIA H200" in text and "NVIDIA H100 80GB HBM3" in text
    assert kernels.beside_table({"transpose_fp8": [row]}) == ""
    assert kernels.beside_table({"transpose_fp8": [row], "h100/transpose_fp8": [alone]}) == ""


def test_the_page_has_the_table_where_an_h100_has_measured_an_op() -> None:
    """Of the committed records: absent until there is one of an op that an H200 has measured too."""
    ops = {op.csv for op in kernels.OPS} & {path.stem for path in pages.H100.glob("*.csv")}
    text = (pages.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert ("Single ops on an H100 beside an H200. " in text) == bool(ops)


def test_the_records_of_an_h100_stand_beside_those_of_an_h200() -> None:
    found, here = pages.records(pages.RESULTS), pages.read(pages.RESULTS)
    assert found["scaling"] == here["scaling"] != found["h100/scaling"]
    assert "generate" in found and "h100/generate" not in found
