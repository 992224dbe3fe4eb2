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
from collections.abc import Callable
from pathlib import Path

from targets import targets, times

ROOT = Path(__file__).resolve().parents[1]
RESULTS, README = ROOT / "benchmarks" / "results" / "h200", ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
REASON = 90  # characters of why there is no number
LAYER_RANK, LAYER_P = "16", "0.1"
# Dense, from the vendor's data sheet: FP8 and bf16 TFLOP/s
PEAKS = {"NVIDIA H200": (1979.0, 989.0)}
SHAPES = {
    "small": "hidden 2048, ffn 8192, 1024 tokens",
    "medium": "hidden 4096, ffn 14336, 2048 tokens",
    "large": "hidden 8192, ffn 28672, 8192 tokens",
}
Row = dict[str, str]


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
    layers = results.get("decoder_layer", [])
    parts = [
        _layer_table(results.get("lora_linear", [])),
        _decoder_layer_table(layers),
        _memory_table(layers),
        _end_to_end_table(results.get("end_to_end", [])),
        _target_table(results),
    ]
    return "\n\n".join(part for part in parts if part)


def _layer_table(rows: list[Row]) -> str:
    """Device ms of forward + backward: a line per provider, a column per shape."""
    chosen = [r for r in rows if (r["rank"], r["dropout"]) == (LAYER_RANK, LAYER_P)]
    shapes = list(dict.fromkeys(r["shape MxNxK"] for r in chosen))
    providers = list(dict.fromkeys(r["provider"] for r in chosen))
    if not shapes:
        return ""
    title = (
        f"One linear layer, forward + backward, R = {LAYER_RANK}, p = {LAYER_P}, ms of the device "
        f"(`make bench BENCH=lora_linear`; {_run(chosen[0])}):"
    )
    lines = [["", *map(times, shapes)], ["---"] * (len(shapes) + 1)]
    for provider in providers:
        cells = [provider]
        for shape in shapes:
            row = find(chosen, {"shape MxNxK": shape, "provider": provider})
            ms = number(row["ms"]) if row else None
            cells.append("–" if ms is None else f"{ms:.3f}")
        lines.append(cells)
    return title + "\n\n" + _markdown(lines)


def _by_size(rows: list[Row], cell: Callable[[Row], str]) -> list[list[str]]:
    """A line per provider that has one, a column per size."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    shapes = [SHAPES.get(size, size) for size in sizes]
    lines = [["", *shapes], ["---"] * (len(sizes) + 1)]
    for provider in dict.fromkeys(row["provider"] for row in rows):
        found = [find(rows, {"size": size, "provider": provider}) for size in sizes]
        cells = [cell(row) if row else "" for row in found]
        if any(cells):
            lines.append([provider, *(text or "–" for text in cells)])
    return lines


def _decoder_layer_table(rows: list[Row]) -> str:
    if not rows:
        return ""

    def cell(row: Row) -> str:
        forward, ms, wall = (number(row[key]) for key in ("fwd ms", "ms", "wall ms"))
        if ms is None or forward is None or wall is None:
            return ""
        return f"{forward:.2f} / {ms:.2f} ({wall:.2f})"

    title = (
        "One decoder layer, LoRA R = 16 on q, k, v, o, p = 0.1, ms of the device, forward / forward + backward, and "
        f"of a step that waits for the host in brackets (`make bench BENCH=decoder_layer`; {_run(rows[0])}):"
    )
    return title + "\n\n" + _markdown(_by_size(rows, cell))


def _memory_table(rows: list[Row]) -> str:
    """Eager rows: graphs own their memory."""

    def cell(row: Row) -> str:
        saved, predicted, peak = (
            number(row.get(key, "")) for key in ("saved MB", "predicted MB", "peak MB")
        )
        if saved is None or peak is None:
            return ""
        said = "" if predicted is None else f" ({predicted:.1f})"
        return f"{saved:.1f}{said} / {peak:.0f}"

    lines = _by_size(rows, cell)
    if len(lines) < 3:
        return ""
    title = "What a layer saves for backward (predicted by `fuse`) / its peak during a step, MB without parameters:"
    return title + "\n\n" + _markdown(lines)


def _end_to_end_table(rows: list[Row]) -> str:
    if not rows:
        return ""
    head = [
        "model, tokens, LoRA on",
        "",
        "tokens/s",
        "× HF + PEFT",
        "TFLOP/s",
        "MFU %",
        "peak GiB",
        "",
    ]
    lines = [head, ["---"] * len(head)]
    before = ""
    for row in rows:
        what = f"{row['model']}, {times(row['tokens']).replace(' ', '')}, {row['LoRA on']}"
        what += f" ({int(row['trained']) / 1e6:.1f} M)"
        rate, memory = number(row["tokens/s"]), number(row["reserved GiB"])
        cells = [
            "–" if rate is None else f"{rate:,.0f}",
            row["× hf + peft"] or "–",
            row["TFLOP/s"] or "–",
            row["MFU %"] or "–",
            "–" if memory is None else f"{memory:.1f}",
            "" if row["check"] == "ok" else row["check"][:REASON],
        ]
        lines.append(["" if what == before else what, row["provider"], *cells])
        before = what
    title = (
        "Training, everything in a step included, random weights; MFU is of the dense peak of the base's format, FP8 "
        f"or bf16, GiB what the allocator holds (`make bench BENCH=end_to_end`; {_run(rows[0])}):"
    )
    return title + "\n\n" + _markdown(lines)


def _target_table(results: dict[str, list[Row]]) -> str:
    lines = [["", "measured", "target", ""], ["---"] * 4]
    for target in targets():
        row = find(results.get(target.csv, []), target.where)
        lines.append(target.line(number(row.get(target.column, "")) if row else None))
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
