# SPDX-License-Identifier: Apache-2.0
"""Tables of kernels: parts of a step beside their budget, products by depth, ops on an H100 beside those on an H200."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.report.ops import OPS, Op, Row, find, lines_of, markdown, number, run_of

BESIDE = "h100/"  # begins the names of an H100's records, beside an H200's of the same ops
GEMMS = ("FP8 GEMMs, forward", "FP8 GEMMs, dgrad")
SWIGLU, NORMS = "SwiGLU and its gradient", "norms, RoPE and their gradients"
ADAPTERS, TURNED = "quantize_grad, LoRA-down, dA", "transpositions of W"
REST, ATTENTION = "scales, dropout's slots, sums", "attention, bf16"
BF16, FP8 = "head and loss, bf16", "head and loss, FP8"
PEAK = 1024  # cycles of the tensor cores for 128 of depth
DEPTH = 8192  # that is looked at alone
OTHER, TOGETHER = "gradients added, optimizer, gaps", "measured parts together"
SECOND = "second forwards of checkpointed layers"
OFFLOADED: dict[str, object] = {
    "model": "Llama-2-70B",
    "LoRA on": "qkvo",
    "provider": "ours, fit, offload, graphs by layer",
}


class Part(NamedTuple):
    """A line of the kernel plan's budget: the parts that are measured for it, and ms as the plan has them.

    `floor` is what the plan says that no kernels go below. `where` names the rows of end_to_end.csv whose forms of
    layers say that nothing was left to do for it.
    """

    what: str
    of: tuple[str, ...]
    before: str
    planned: str
    floor: str = "–"
    where: dict[str, object] | None = None


SUM = (*GEMMS, TURNED, ATTENTION, SWIGLU, NORMS, ADAPTERS, REST)
# The kernel plan's budgets of 2026-11-22, by model
BUDGET: dict[str, tuple[Part, ...]] = {
    "Llama-3.1-8B": (
        Part(GEMMS[0], GEMMS[:1], "41", "38.7", "38"),
        Part(GEMMS[1], GEMMS[1:], "45", "40.5", "39.5"),
        Part(TURNED, (TURNED,), "3.7", "0", "0"),
        Part(ATTENTION, (ATTENTION,), "39.1", "39.1", "29"),
        Part(BF16, (BF16,), "13.0", "–"),
        Part(FP8, (FP8,), "–", "7.4", "6.3"),
        Part(SWIGLU, (SWIGLU,), "6.6", "6.6", "0"),
        Part(NORMS, (NORMS,), "5.9", "5.0", "4.4"),
        Part(ADAPTERS, (ADAPTERS,), "5.5", "4.2", "2.9"),
        Part(REST, (REST,), "–", "–"),
        Part(OTHER, (), "2.6", "2.2", "1"),
        Part(TOGETHER, (*SUM, FP8), "–", "–"),
    ),
    "Llama-2-70B": (
        Part(SECOND, (), "195", "0 to 110", "–", OFFLOADED),
        Part("FP8 GEMMs", GEMMS, "1,690", "1,620"),
        Part(TURNED, (TURNED,), "40", "0"),
        Part(ATTENTION, (ATTENTION,), "600", "600"),
        Part(SWIGLU, (SWIGLU,), "85", "85"),
        Part("norms, RoPE, the adapters' kernels", (NORMS, ADAPTERS), "125", "100"),
        Part("head and loss, scales, slots, sums", (BF16, REST), "40", "35"),
        Part(TOGETHER, (*SUM, BF16), "–", "–"),
    ),
    "Llama-3.2-1B": (
        Part("FP8 GEMMs", GEMMS, "3.52", "–", "2.21"),
        Part(ATTENTION, (ATTENTION,), "1.44", "–"),
        Part(SWIGLU, (SWIGLU,), "0.50", "–"),
        Part(NORMS, (NORMS,), "0.51", "–"),
        Part(ADAPTERS, (ADAPTERS,), "0.99", "–"),
        Part(REST, (REST,), "0.24", "–"),
        Part("its 16 layers", SUM, "7.2", "6.4"),
        Part(BF16, (BF16,), "1.5", "–"),
        Part(FP8, (FP8,), "–", "0.85"),
        Part(TOGETHER, (*SUM, BF16), "–", "–"),
    ),
}


def parts_table(results: dict[str, list[Row]]) -> str:
    """Where steps go, beside what was planned before the kernels were changed."""
    rows = results.get("step_parts", [])
    if not rows:
        return ""
    head = ["step", "part", "before, ms", "planned, ms", "planned floor, ms", "now, ms"]
    lines, step = [head, ["---"] * len(head)], ""
    for model, budget in BUDGET.items():
        mine = {row["part"]: row for row in rows if row["model"] == model}
        for part in budget if mine else ():
            tokens = int(next(iter(mine.values()))["tokens"])
            of = f"{model}, {tokens:,} tokens"
            said = [part.what, part.before, part.planned, part.floor, _now(part, mine, results)]
            lines.append(["" if of == step else of, *said])
            step = of
    title = (
        'Where these steps go, by the same plan. "Now" is the kernels of one eager layer, as often as a step has it, '
        "and the head by itself, forward and backward. One layer's kernels run at a higher clock than a whole step, "
        "which is at the power limit, so that their sum is less than a step. The plan gave 70B and 1B no floors by "
        "parts, but 1B's GEMMs. Its floor of SwiGLU is that of kernels of its own, whose bytes are 2.4 ms of a step. "
        "Of what has no number now, nothing is timed alone "
        f"(`python benchmarks/layers/bench_step_parts.py --output DIR`; {run_of(rows)}):"
    )
    return f"{title}\n\n{markdown(lines)}"


def _now(part: Part, measured: dict[str, Row], results: dict[str, list[Row]]) -> str:
    if part.where is not None:
        row = find(results.get("end_to_end", []), part.where)
        return "0" if row and row["note"] and "checkpoint" not in row["note"] else "–"
    now = [number(measured[name]["ms"]) for name in part.of]
    return "–" if not now or None in now else _ms(sum(ms or 0.0 for ms in now))


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 5 else f"{value:,.{0 if value >= 1000 else 1}f}"


def depths_table(results: dict[str, list[Row]]) -> str:
    """A product's loop and its epilogue, and what of a tile is not multiplied at DEPTH."""
    rows, points = (results.get(name, []) for name in ("gemm_depths", "gemm_depths_points"))
    if not rows:
        return ""
    columns = ["depths", "loop, cycles for 128", "of peak", "epilogue, cycles", "off"]
    head = ["product", *columns, f"cycles without products, depth {DEPTH}"]
    lines, idle = [head, ["---"] * len(head)], dict[str, float]()
    for row in rows:
        point = find(points, {"product": row["product"], "depth": DEPTH})
        cycles = number(point["cycles a tile"]) if point else None
        if cycles is not None:
            idle[row["product"]] = cycles - PEAK * DEPTH / 128
        rest = idle.get(row["product"])
        said = [row[column] or "–" for column in columns]
        lines.append([row["product"], *said, "–" if rest is None else f"{rest:.0f}"])
    by = "Nsight Compute's active cycles" if rows[0]["by"] == "ncu" else "times by CUDA events"
    adds = [
        f"{idle[f'{way}, R = 16'] - idle[way]:.0f} {way}"
        for way in ("forward", "backward")
        if {way, f"{way}, R = 16"} <= idle.keys()
    ]
    title = (
        "What a product of 8448 × 8192 outputs takes for a tile of 128 × 256: the slope and the rest of a line "
        f'through {by} over depths, all of one kernel. "Off" is the point that is farthest from its line. The tensor '
        f"cores need {PEAK} cycles for 128 of depth; more than 1 of that peak is an error of the line. The last column "
        "has no line: it is what one depth takes beyond the tensor cores' cycles. "
        + (
            f"An adapter adds there: {', '.join(adds)}; its products are 256 of each. "
            if adds
            else ""
        )
        + "cuBLASLt's tiles of 320 × 128 do not divide the outputs, which adds 1.6 % at least to its forward's loop "
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
        "Single ops on an H100 beside an H200. ÷ is by a copy of the bytes, or by cuBLASLt's product, on the GPU of "
        f"the number before it (`make bench BENCH=OP`; {run_of(runs)}):"
    )
    return f"{title}\n\n{markdown(lines)}"


def _by_problem(op: Op, rows: list[Row]) -> dict[str, tuple[list[str], Row]]:
    return {cells[0]: (cells, row) for cells, row in lines_of(op, rows)}


def _short(cells: list[str]) -> list[str]:
    """µs, and the ratio that the op has."""
    _, us, floor, cublaslt, _ = cells
    return [us, floor or cublaslt]
