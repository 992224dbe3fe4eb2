# SPDX-License-Identifier: Apache-2.0
"""Tables of kernels: parts of a step beside their budget, products by depth, ops on an H100 beside those on an H200."""

from __future__ import annotations

from benchmarks.report.ops import OPS, Op, Row, lines_of, markdown, number, run_of

BESIDE = "h100/"  # begins the names of an H100's records, beside an H200's of the same ops
# The kernel plan's step of Llama-3.1-8B of 2026-11-22: part, ms before, ms as planned
BUDGET = {
    "FP8 GEMMs, forward": ("41", "38.7"),
    "FP8 GEMMs, dgrad": ("45", "40.5"),
    "transpositions of W": ("3.7", "0"),
    "attention, bf16": ("39.1", "39.1"),
    "SwiGLU and its gradient": ("6.6", "6.6"),
    "norms, RoPE and their gradients": ("5.9", "5.0"),
    "quantize_grad, LoRA-down, dA": ("5.5", "4.2"),
    "head and loss, bf16": ("13.0", "–"),
    "head and loss, FP8": ("–", "7.4"),
}


def parts_table(results: dict[str, list[Row]]) -> str:
    """Where a step of 8B goes, beside what was planned before the kernels were changed."""
    rows = results.get("step_parts", [])
    if not rows:
        return ""
    lines = [["part", "before, ms", "planned, ms", "now, ms"], ["---"] * 4]
    for row in rows:
        ms = number(row["ms"])
        now = row["ms"] if ms is None else f"{ms:.1f}"
        lines.append([row["part"], *BUDGET.get(row["part"], ("–", "–")), now])
    title = (
        f'Where a step of {rows[0]["model"]} goes, {rows[0]["tokens"]} tokens, LoRA R = 16 on q, k, v, o. "Before" is '
        'of ce8b51a, and "planned" was written before the kernels were changed. "Now" is the kernels of one eager '
        "layer, as often as a step has it, and the head by itself, forward and backward. One layer's kernels run at a "
        "higher clock than a whole step, which is at the power limit "
        "(`python benchmarks/layers/bench_step_parts.py --output DIR`; "
        f"{run_of(rows)}):"
    )
    return f"{title}\n\n{markdown(lines)}"


def depths_table(results: dict[str, list[Row]]) -> str:
    """A product's loop and its epilogue."""
    rows = results.get("gemm_depths", [])
    if not rows:
        return ""
    columns = ["loop, cycles for 128", "of peak", "epilogue, cycles", "off"]
    lines = [["product", *columns], ["---"] * 5]
    lines += [[row["product"], *(row[column] for column in columns)] for row in rows]
    by = "Nsight Compute's active cycles" if rows[0]["by"] == "ncu" else "times by CUDA events"
    title = (
        f"What a product of 8448 × 8192 outputs takes for a tile of 128 × 256, over depths of {rows[0]['depths']}: the "
        f'slope and the rest of a line through {by}. "Off" is the point that is farthest from its line '
        f"(`python benchmarks/ops/gemm_depths.py --output DIR`; {run_of(rows)}):"
    )
    return f"{title}\n\n{markdown(lines)}"


def beside_table(results: dict[str, list[Row]]) -> str:
    """The ops that an H100 has measured as well, each beside its own floor or cuBLASLt's product there."""
    lines, runs = [["op, problem", "H200, µs", "÷", "H100, µs", "÷"], ["---"] * 5], list[Row]()
    for op in OPS:
        here, there = (_by_problem(op, results.get(f"{on}{op.csv}", [])) for on in ("", BESIDE))
        for problem, (cells, row) in here.items():
            if problem in there:
                other, its = there[problem]
                lines.append([problem, *_short(cells), *_short(other)])
                runs += [row, its]
    if not runs:
        return ""
    title = (
        "The same ops on an H100. ÷ is by a copy of the bytes, or by cuBLASLt's product, on the GPU of the number "
        f"before it (`make bench BENCH=OP`; {run_of(runs)}):"
    )
    return f"{title}\n\n{markdown(lines)}"


def _by_problem(op: Op, rows: list[Row]) -> dict[str, tuple[list[str], Row]]:
    return {cells[0]: (cells, row) for cells, row in lines_of(op, rows)}


def _short(cells: list[str]) -> list[str]:
    """µs, and the ratio that the op has."""
    _, us, floor, cublaslt, _ = cells
    return [us, floor or cublaslt]
