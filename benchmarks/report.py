# SPDX-License-Identifier: Apache-2.0
"""The README's result tables and a roofline plot, from the CSVs of benchmarks/results/GPU.

    python benchmarks/report.py [--results benchmarks/results/h200]

rewrites what stands between README.md's markers and writes roofline.png beside the CSVs. A test compares the README
with `tables`, so that it cannot drift from the CSVs. A CSV that is missing leaves its rows "not measured".
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, README = ROOT / "benchmarks" / "results" / "h200", ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
LAYER_RANK, LAYER_P = "16", "0.1"
# Dense, from the vendor's data sheet: FP8 and bf16 TFLOP/s
PEAKS = {"NVIDIA H200": (1979.0, 989.0)}
Row = dict[str, str]


@dataclass(frozen=True)
class Target:
    """One measured ratio and the bound it is held to: the CSV's first row that has the values of `where`."""

    what: str
    csv: str
    where: dict[str, object]
    column: str
    bound: float


def _gemm(op: str, what: str, shape: str, bound: float, **where: object) -> Target:
    return Target(what, op, {"M x N x K": shape, **where}, "÷ cublaslt", bound)


def _layer(what: str, shape: str, provider: str, column: str, bound: float) -> Target:
    where = {"shape MxNxK": shape, "rank": 16, "dropout": 0.1, "provider": provider}
    return Target(what, "lora_linear", where, column, bound)


def _times(shape: str) -> str:
    return shape.replace("x", "×")


def targets() -> Iterator[Target]:
    """The ratios that count, in the order of the README's table."""
    square, forward = "8192x8192x8192", "`fp8_linear_lora` with bias ÷ cuBLASLt's GEMM without LoRA"
    for rank in (16, 64):
        for shape, bound in (
            (square, 0.98),
            ("8192x10240x8192", 0.98),
            ("4096x4096x4096", 0.98),
            ("2048x8192x8192", 1.0),
            ("8192x8192x28672", 1.0),
        ):
            what = f"{forward}, {_times(shape)}, R = {rank}"
            yield _gemm("fp8_linear_lora", what, shape, bound, rank=rank, provider="ours")
    for layout, bound in (("both", 1.03), ("single", 1.06)):
        what = (
            f"`fp8_grad_input` with mask ÷ cuBLASLt's GEMM on a ready Wᵀ, {_times(square)}, "
            f"R = 16, {layout}"
        )
        provider = f"ours, {layout}"
        yield _gemm("fp8_grad_input", what, square, bound, rank=16, p=0.1, provider=provider)
    for op, bound, where in (
        ("quantize_lora_down", 1.3, {"p": 0.1, "mode": "delayed"}),
        ("quantize_grad", 1.4, {"mode": "delayed"}),
        ("lora_grad_a", 1.5, {"p": 0.1, "reads": "x8"}),
    ):
        where = {"shape": "8192x8192", "rank": 16, "provider": "ours", **where}
        yield Target(f"`{op}` ÷ its bytes, 8192×8192, R = 16", op, where, "÷ floor", bound)
    for direction in ("forward", "backward"):
        where = {"shape": "8192x8192", "p": 0.1, "bias": "yes", "direction": direction}
        what = f"`bias_dropout_add` {direction} ÷ its bytes, 8192×8192"
        op = "bias_dropout_add"
        yield Target(what, op, {**where, "provider": "ours"}, "÷ floor", 1.15)
    layer = f"`LoRALinear` forward + backward, {_times(square)}"
    yield _layer(
        f"{layer} ÷ TE FP8 without LoRA, both", square, "ours fp8, both", "÷ te base", 0.98
    )
    yield _layer(f"{layer} ÷ TE FP8 without LoRA, single", square, "ours fp8", "÷ te base", 1.02)
    yield _layer(f"{layer} ÷ TE FP8 + LoRA", square, "ours fp8", "÷ te + lora", 0.70)
    yield _layer(f"{layer} ÷ PEFT bf16", square, "ours fp8", "÷ peft", 0.46)
    small = "4096x4096x4096"
    what = f"the same, {_times(small)}, graphed ÷ TE FP8 + LoRA graphed by TE"
    yield _layer(what, small, "ours fp8, graphed", "÷ te graphed", 0.52)


def read(folder: Path) -> dict[str, list[Row]]:
    """Name → rows of every CSV in `folder`."""
    result = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            result[path.stem] = list(csv.DictReader(file))
    return result


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


def tables(results: dict[str, list[Row]]) -> str:
    """What stands between the markers."""
    parts = [_layer_table(results.get("lora_linear", [])), _target_table(results)]
    return "\n\n".join(part for part in parts if part)


def _layer_table(rows: list[Row]) -> str:
    """Device ms of forward + backward: a line per provider, a column per shape."""
    chosen = [r for r in rows if (r["rank"], r["dropout"]) == (LAYER_RANK, LAYER_P)]
    shapes = list(dict.fromkeys(r["shape MxNxK"] for r in chosen))
    providers = list(dict.fromkeys(r["provider"] for r in chosen))
    if not shapes:
        return ""
    title = (
        f"One layer, forward + backward, R = {LAYER_RANK}, p = {LAYER_P}, ms of the device "
        f"({_run(chosen[0])}):"
    )
    lines = [["", *map(_times, shapes)], ["---"] * (len(shapes) + 1)]
    for provider in providers:
        cells = [provider]
        for shape in shapes:
            row = find(chosen, {"shape MxNxK": shape, "provider": provider})
            ms = number(row["ms"]) if row else None
            cells.append("–" if ms is None else f"{ms:.3f}")
        lines.append(cells)
    return title + "\n\n" + _markdown(lines)


def _target_table(results: dict[str, list[Row]]) -> str:
    lines = [["ratio", "measured", "target", ""], ["---"] * 4]
    for target in targets():
        row = find(results.get(target.csv, []), target.where)
        value = number(row.get(target.column, "")) if row else None
        verdict = "not measured"
        if value is not None:
            over = value / target.bound - 1
            verdict = "met" if over <= 0 else f"missed by {over:.0%}"
        shown = "–" if value is None else f"{value:.2f}"
        lines.append([target.what, shown, f"≤ {target.bound:.2f}", verdict])
    return _markdown(lines)


def _run(row: Row) -> str:
    return f"{row['device'].partition(': ')[2]}, torch {row['torch']}, {row['commit']}"


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def between_markers(text: str) -> str:
    """What stands between the markers of a README.

    Raises:
        ValueError: they are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the README must hold {BEGIN} and then {END}, once each")
    return text.partition(BEGIN)[2].partition(END)[0].strip("\n")


def rewritten(text: str, block: str) -> str:
    between_markers(text)
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{block}\n{END}{rest.partition(END)[2]}"


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


def plot(path: Path, results: dict[str, list[Row]]) -> None:
    """TFLOP/s over operations per byte, under the measured copy bandwidth and the data sheet's peaks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for some in results.values() for row in some]
    copies = [number(row["copy GB/s"]) for row in rows if row.get("copy GB/s")]
    bandwidth = max((c for c in copies if c), default=0.0) / 1e3  # TB/s
    devices = {row["device"].partition(": ")[2] for row in rows if "device" in row}
    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for op, marks in points(results).items():
        axis.scatter(*zip(*marks, strict=True), s=18, label=op)
    span = [4.0, 2e4]
    for name in sorted(devices & set(PEAKS)):
        for peak, kind, style in zip(PEAKS[name], ("FP8", "bf16"), ("-", ":"), strict=True):
            roof = [min(peak, bandwidth * x) if bandwidth else peak for x in (*span, 1e3)]
            knee = peak / bandwidth if bandwidth else span[0]
            axis.plot([span[0], knee, span[1]], [roof[0], peak, peak], style, color="grey")
            axis.annotate(
                f"{name}, {kind}: {peak:.0f} TFLOP/s", (span[1], peak * 1.05), ha="right", size=7
            )
    if bandwidth:
        text = f"copy, measured: {bandwidth:.2f} TB/s"
        axis.annotate(text, (span[0] * 1.3, bandwidth * span[0] * 1.9), rotation=38, size=7)
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="README tables and a roofline from result CSVs")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--readme", type=Path, default=README, metavar="FILE")
    args = parser.parse_args(arguments)
    results = read(args.results)
    if not results:
        parser.error(f"--results must hold CSV files, found none in {args.results}")
    text = args.readme.read_text(encoding="utf-8")
    args.readme.write_text(rewritten(text, tables(results)), encoding="utf-8")
    plot(args.results / "roofline.png", results)
    print(f"wrote {args.readme} and {args.results / 'roofline.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
