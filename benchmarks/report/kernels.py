# SPDX-License-Identifier: Apache-2.0
"""Tables of kernels: parts of a step beside their budget, products by depth, ops on an H100 beside those on an H200."""

from __future__ import annotations

from benchmarks.report.ops import OPS, Op, Row, lines_of, markdown, number, run_of

BESIDE = "h100/"  # begins the names of an H100's records, beside an H200's of the same ops
GEMMS = ("FP8 GEMMs, forward", "FP8 GEMMs, dgrad")
SWIGLU, NORMS = "SwiGLU and its gradient", "norms, RoPE and their gradients"
ADAPTERS, TURNED = "quantize_grad, LoRA-down, dA", "transpositions of W"
REST, BF16 = "scales, dropout's slots, sums", "head and loss, bf16"
# The kernel plan's steps of 2026-11-22, by model: what (the parts that it has), ms before, ms as planned
BUDGET: dict[str, tuple[tuple[str, tuple[str, ...], str, str], ...]] = {
    "Llama-3.1-8B": (
        ("FP8 GEMMs, forward", GEMMS[:1], "41", "38.7"),
        ("FP8 GEMMs, dgrad", GEMMS[1:], "45", "40.5"),
        (TURNED, (TURNED,), "3.7", "0"),
        ("attention, bf16", ("attention, bf16",), "39.1", "39.1"),
        (SWIGLU, (SWIGLU,), "6.6", "6.6"),
        (NORMS, (NORMS,), "5.9", "5.0"),
        (ADAPTERS, (ADAPTERS,), "5.5", "4.2"),
        (REST, (REST,), "–", "–"),
        (BF16, (BF16,), "13.0", "–"),
        ("head and loss, FP8", ("head and loss, FP8",), "–", "7.4"),
    ),
    "Llama-2-70B": (
        ("FP8 GEMMs", GEMMS, "1,690", "1,620"),
        (TURNED, (TURNED,), "40", "0"),
        ("attention, bf16", ("attention, bf16",), "600", "600"),
        (SWIGLU, (SWIGLU,), "85", "85"),
        ("norms, RoPE, the adapters' kernels", (NORMS, ADAPTERS), "125", "100"),
        ("head and loss, scales, slots, sums", (BF16, REST), "40", "35"),
    ),
    "Llama-3.2-1B": (
        ("FP8 GEMMs", GEMMS, "3.52", "–"),
        ("attention, bf16", ("attention, bf16",), "1.44", "–"),
        (SWIGLU, (SWIGLU,), "0.50", "–"),
        (NORMS, (NORMS,), "0.51", "–"),
        (ADAPTERS, (ADAPTERS,), "0.99", "–"),
        (REST, (REST,), "0.24", "–"),
        ("all of these", (*GEMMS, "attention, bf16", SWIGLU, NORMS, ADAPTERS, REST), "7.2", "6.4"),
        (BF16, (BF16,), "1.5", "–"),
        ("head and loss, FP8", ("head and loss, FP8",), "–", "0.85"),
    ),
}


def parts_table(results: dict[str, list[Row]]) -> str:
    """Where steps go, beside what was planned before the kernels were changed."""
    rows = results.get("step_parts", [])
    if not rows:
        return ""
    lines, of = [["step", "part", "before, ms", "planned, ms", "now, ms"], ["---"] * 5], ""
    for model, budget in BUDGET.items():
        mine = {row["part"]: row for row in rows if row["model"] == model}
        for what, parts, before, planned in budget if mine else ():
            now = [number(mine[part]["ms"]) for part in parts]
            told = "–" if None in now else _ms(sum(ms or 0.0 for ms in now))
            step = f"{model}, {int(mine[parts[0]]['tokens']):,} tokens"
            lines.append(["" if step == of else step, what, before, planned, told])
            of = step
    title = (
        'Where steps go, LoRA R = 16 on q, k, v, o. "Before" is of ce8b51a, and "planned" was written before the '
        'kernels were changed. "Now" is the kernels of one eager layer, as often as a step has it, and the head by '
        "itself, forward and backward. One layer's kernels run at a higher clock than a whole step, which is at the "
        "power limit "
        f"(`python benchmarks/layers/bench_step_parts.py --output DIR`; {run_of(rows)}):"
    )
    return f"{title}\n\n{markdown(lines)}"


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 5 else f"{value:,.{0 if value >= 1000 else 1}f}"


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
