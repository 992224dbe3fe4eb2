# SPDX-License-Identifier: Apache-2.0
"""What an op's slower implementations cost on one H200: the table of lorakernels/cli/costs.py, from the records.

python benchmarks/report/costs.py     # prints the table
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median
from typing import NamedTuple

RESULTS = Path(__file__).resolve().parents[1] / "results" / "h200"
# Columns of a record that do not say which problem a row is of
MEASURED = ("provider", "check", "error", "ms", "p20 ms", "p80 ms", "CPU µs")


class Pair(NamedTuple):
    """Two providers of one record, of which the first runs the slower implementation."""

    record: str
    slow: str
    fast: str = "ours"
    passed: str | None = None  # only rows of this pass


PAIRS = {
    ("amax_and_scale_update", "torch"): Pair("fp8_state", "pytorch"),
    ("bias_dropout_add", "torch"): Pair("bias_dropout_add", "eager"),
    ("transpose_fp8", "torch"): Pair("transpose_fp8", "torch"),
    ("fp8_grad_input", "cublaslt"): Pair("fp8_grad_input", "pytorch", "ours, single"),
    ("fp8_linear_lora", "cublaslt"): Pair("fp8_linear_lora", "pytorch"),
    ("lora_grad_a", "torch"): Pair("lora_grad_a", "torch"),
    ("quantize_grad", "torch"): Pair("quantize_grad", "torch"),
    ("quantize_lora_down", "torch"): Pair("quantize_lora_down", "torch"),
    ("rms_norm_quantize", "torch"): Pair("rms_norm_quantize", "torch", passed="forward"),
    ("rms_norm_backward", "torch"): Pair("rms_norm_quantize", "torch", passed="backward"),
    ("rope_qkv", "torch"): Pair("rope_qkv", "torch"),
    ("swiglu_quantize", "torch"): Pair("swiglu_quantize", "torch", passed="forward"),
    ("swiglu_quantize_grad", "torch"): Pair("swiglu_quantize", "torch", passed="backward"),
}


def ratio(pair: Pair) -> float:
    """The median over the record's problems, to two digits."""
    with (RESULTS / f"{pair.record}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = list(rows[0])
    problem = [c for c in columns[: columns.index("ms")] if c not in MEASURED]
    times: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        if pair.passed in (None, row.get("pass")) and row["ms"]:
            times.setdefault(tuple(row[c] for c in problem), {})[row["provider"]] = float(row["ms"])
    both = [t for t in times.values() if pair.slow in t and pair.fast in t]
    return float(f"{median(t[pair.slow] / t[pair.fast] for t in both):.2g}")


def table() -> dict[tuple[str, str], float]:
    """{(op, implementation): its time ÷ the fastest implementation's}"""
    return {key: ratio(pair) for key, pair in PAIRS.items()}


if __name__ == "__main__":
    print(table())
