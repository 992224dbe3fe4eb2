# SPDX-License-Identifier: Apache-2.0
"""The table of single ops, and where those that multiply lie under the roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.lib.goals import times

Row = dict[str, str]
# Dense, from the vendor's data sheet: FP8 and bf16 TFLOP/s
PEAKS = {"NVIDIA H200": (1979.0, 989.0)}


@dataclass(frozen=True)
class Op:
    """Which rows of an op's CSV are lines: those of `ours` in which every column of `where` has one of its values.

    `by` names what stands beside the problem, `ratio` the column of what it is held against, `shapes` None: all.
    """

    csv: str
    shapes: tuple[str, ...] | None = None
    where: dict[str, tuple[str, ...]] = field(default_factory=dict)
    by: tuple[str, ...] = ()
    ratio: str = "÷ floor"
    ours: tuple[str, ...] = ("ours",)


SQUARE = ("8192x8192",)
OPS = (
    Op("fp8_linear_lora", None, {"rank": ("16", "64")}, ("rank",), "÷ cublaslt"),
    Op(
        "fp8_grad_input",
        None,
        {"rank": ("16",), "p": ("0.1",)},
        ("rank",),
        "÷ cublaslt",
        ("ours, single, mask given",),
    ),
    Op(
        "quantize_lora_down",
        SQUARE,
        {"rank": ("16", "64"), "mode": ("delayed",)},
        ("rank", "p"),
    ),
    Op(
        "quantize_grad",
        SQUARE,
        {"rank": ("16", "64"), "mode": ("delayed",)},
        ("rank",),
        ours=("ours", "ours, drawing a mask"),
    ),
    Op(
        "lora_grad_a",
        SQUARE,
        {"rank": ("16", "64"), "reads": ("x8",)},
        ("rank", "p"),
        ours=("ours", "ours, mask given"),
    ),
    Op("transpose_fp8", SQUARE),
    Op("bias_dropout_add", SQUARE, {"p": ("0.1",), "bias": ("yes",)}, ("p", "direction")),
    Op("rms_norm_quantize", SQUARE, {}, ("pass",)),
    Op("swiglu_quantize", ("8192x28672",), {}, ("pass",)),
    Op("rope_qkv", ("8192x64x8x128",), {}, ("pass",)),
)
PROBLEM = ("rank", "p", "pass", "direction", "mode", "bias", "dtype", "reads")
NAMES = {"rank": "R = ", "p": "p = ", "pass": "", "direction": ""}


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _equal(found: str, wanted: object) -> bool:
    return number(found) == wanted if isinstance(wanted, (int, float)) else found == wanted


def find(rows: list[Row], where: dict[str, object]) -> Row | None:
    matches = (r for r in rows if all(_equal(r.get(k, ""), v) for k, v in where.items()))
    return next(matches, None)


def run_of(rows: list[Row]) -> str:
    """GPU and torch of the runs that the rows are of, each with its commits."""
    commits: dict[str, list[str]] = {}
    for r in rows:
        commits.setdefault(f"{r['device'].partition(': ')[2]}, torch {r['torch']}", []).append(
            r["commit"]
        )
    return "; ".join(f"{run}, {', '.join(dict.fromkeys(of))}" for run, of in commits.items())


def markdown(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def op_table(results: dict[str, list[Row]]) -> str:
    """µs of the device per op and problem, beside its floor or cuBLASLt and the fastest other provider."""
    lines: list[list[str]] = []
    runs: list[Row] = []
    for op in OPS:
        found = list(lines_of(op, results.get(op.csv, [])))
        lines += [cells for cells, _ in found]
        runs += [row for _, row in found]
    if not lines:
        return ""
    head = ["op, problem", "µs", "÷ floor", "÷ cuBLASLt", "fastest other, µs"]
    title = (
        "Single ops, bf16, µs of the device. The floor is a copy of as many bytes in the same run; cuBLASLt multiplies "
        "the same matrices without LoRA, forward with fast accumulation, backward split, on a ready Wᵀ (`make bench "
        f"BENCH=OP`; {run_of(runs)}):"
    )
    return title + "\n\n" + markdown([head, ["---"] * len(head), *lines])


def lines_of(op: Op, rows: list[Row]) -> Iterator[tuple[list[str], Row]]:
    """The op's lines, each with its row: problem, µs, ÷ floor, ÷ cuBLASLt, the fastest other."""
    key = "M x N x K" if op.ratio == "÷ cublaslt" else "shape"
    for row in rows:
        chosen = all(row.get(name) in values for name, values in op.where.items())
        ms = number(row.get("ms", "")) if row["provider"] in op.ours and chosen else None
        if ms is None or (op.shapes is not None and row[key] not in op.shapes):
            continue
        same = [key, *(name for name in PROBLEM if name in row)]
        beside = [r for r in rows if all(r[name] == row[name] for name in same)]
        said = [times(row[key]), *(f"{NAMES[name]}{row[name]}" for name in op.by)]
        said += row["provider"].split(", ")[1:2]
        ratio = f"{float(row[op.ratio]):.2f}" if number(row[op.ratio]) is not None else "–"
        ratios = [ratio, ""] if op.ratio == "÷ floor" else ["", ratio]
        yield [f"`{op.csv}` {', '.join(said)}", f"{ms * 1e3:.1f}", *ratios, _other(beside)], row


def _other(rows: list[Row]) -> str:
    """The fastest provider that computes the same and is not ours."""
    timed = [
        (ms, row["provider"])
        for row in rows
        if (ms := number(row.get("ms", ""))) is not None
        and not row["provider"].startswith(("ours", "cublaslt", "copy"))
    ]
    if not timed:
        return "–"
    ms, name = min(timed)
    return f"{ms * 1e3:.1f} ({name})"


def _sizes(row: Row, column: str) -> list[int]:
    return [int(size) for size in row[column].split("x")]


def _fp8_linear_lora(row: Row) -> tuple[float, float]:
    (m, n, k), r = _sizes(row, "M x N x K"), int(row["rank"])
    return 2 * m * n * (k + r), m * k + n * k + 2 * m * n


def _fp8_grad_input(row: Row) -> tuple[float, float]:
    (m, n, k), r = _sizes(row, "M x N x K"), int(row["rank"])
    return 2 * m * k * (n + r), m * n + n * k + 2 * m * k


def _quantize_lora_down(row: Row) -> tuple[float, float]:
    (m, k), r = _sizes(row, "shape"), int(row["rank"])
    return 2 * m * k * r, 3 * m * k


def _quantize_grad(row: Row) -> tuple[float, float]:
    (m, n), r = _sizes(row, "shape"), int(row["rank"])
    return 4 * m * n * r, 3 * m * n


def _lora_grad_a(row: Row) -> tuple[float, float]:
    (m, k), r = _sizes(row, "shape"), int(row["rank"])
    return 2 * m * k * r, m * k * (1 if row["reads"] == "x8" else 2)


# Operations and bytes of a row, by the equations at the top of each benchmark
WORK: dict[str, Callable[[Row], tuple[float, float]]] = {
    "fp8_linear_lora": _fp8_linear_lora,
    "fp8_grad_input": _fp8_grad_input,
    "quantize_lora_down": _quantize_lora_down,
    "quantize_grad": _quantize_grad,
    "lora_grad_a": _lora_grad_a,
}


def points(results: dict[str, list[Row]]) -> dict[str, list[tuple[float, float]]]:
    """Op → (operations per byte, TFLOP/s) of each timed row of ours that has an adapter."""
    found: dict[str, list[tuple[float, float]]] = {}
    for op, work in WORK.items():
        for row in results.get(op, []):
            ms, ours = number(row["ms"]), row["provider"].startswith("ours")
            if ms and ours and "base only" not in row["provider"] and row["rank"] != "0":
                flops, size = work(row)
                found.setdefault(op, []).append((flops / size, flops / ms / 1e9))
    return found
