# SPDX-License-Identifier: Apache-2.0
"""The numbers in README.md, docs/performance.md and the recipes, and the pictures, from benchmarks/results/GPU/*.csv.

    python benchmarks/report/pages.py [--results benchmarks/results/h200]

rewrites what stands between these pages' markers and draws report/plots.py's pictures beside the CSVs. A test compares
the pages with the CSVs, so that they cannot drift. A CSV that is missing leaves its rows "not measured".
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.goals import NODE, targets, times
from benchmarks.report.bounds import bound_table, plan_table
from benchmarks.report.headlines import headlines
from benchmarks.report.kernels import BESIDE, beside_table, depths_table, parts_table
from benchmarks.report.ops import Row, find, markdown, number, op_table, run_of
from benchmarks.report.plots import BY_H100, draw_all
from benchmarks.report.recipes import recipes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
H100 = RESULTS.parent / "h100"
MADE_BY_H100 = ("generate", "quality_recipes")  # records that stand in no other folder
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
REASON = 90  # characters of why there is no number
LAYER_RANK, LAYER_P = "16", "0.1"
SHAPES = {
    "small": "hidden 2048, ffn 8192, 1024 tokens",
    "medium": "hidden 4096, ffn 14336, 2048 tokens",
    "large": "hidden 8192, ffn 28672, 8192 tokens",
}


def read(folder: Path) -> dict[str, list[Row]]:
    """Name → rows of every CSV in `folder`."""
    result = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            result[path.stem] = list(csv.DictReader(file))
    return result


def records(folder: Path) -> dict[str, list[Row]]:
    """`read(folder)`; with H200's, what an H100 has measured, BESIDE the same or alone, and a NODE."""
    results = read(folder)
    if folder == RESULTS:
        for name, rows in read(H100).items():
            results[name if name in MADE_BY_H100 else BESIDE + name] = rows
        results |= {NODE + name: rows for name, rows in read(RESULTS.parent / "h200x8").items()}
    return results


def tables(results: dict[str, list[Row]]) -> str:
    """What stands between the markers of docs/performance.md."""
    layers = results.get("decoder_layer", [])
    parts = [
        _finetune_table(results.get("finetune", [])),
        _users_table(results.get("check_gpu", [])),
        _generate_table(results.get("generate", [])),
        op_table(results),
        beside_table(results),
        depths_table(results),
        _layer_table(results.get("lora_linear", [])),
        _decoder_layer_table(layers),
        _image("milliseconds of a decoder layer", "decoder_layer") if layers else "",
        _memory_table(layers),
        _image("what a large layer keeps", "memory") if layers else "",
        _budget(results.get("decoder_layer_kernels", [])),
        _end_to_end_table(results.get("end_to_end", [])),
        _floor_table(results.get("floor", []), results.get("end_to_end", [])),
        _sharded_table(results.get("sharded_base", [])),
        _image("tokens per second by where the base lies", "sharded_base")
        if results.get("sharded_base")
        else "",
        _graphs_table(results.get("graphs", [])),
        _experts_table(results.get("experts", [])),
        _quality_table(results.get("quality", [])),
        _recipes_table(results.get("quality_recipes", [])),
        _target_table(results),
        bound_table(targets(), results),
        plan_table(results),
        parts_table(results),
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
        f"(`make bench BENCH=lora_linear`; {run_of(chosen)}):"
    )
    lines = [["", *map(times, shapes)], ["---"] * (len(shapes) + 1)]
    for provider in providers:
        cells = [provider]
        for shape in shapes:
            row = find(chosen, {"shape MxNxK": shape, "provider": provider})
            ms = number(row["ms"]) if row else None
            cells.append("–" if ms is None else f"{ms:.3f}")
        lines.append(cells)
    return title + "\n\n" + markdown(lines)


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
        f"of a step that waits for the host in brackets (`make bench BENCH=decoder_layer`; {run_of(rows)}):"
    )
    return title + "\n\n" + markdown(_by_size(rows, cell))


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
    return title + "\n\n" + markdown(lines)


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
    for row in sorted(rows, key=lambda r: number(r.get("base", "")) or 0.0):
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
        f"or bf16, GiB what the allocator holds. × divides inside a run, and a model's rows are of several: "
        f"[results](../benchmarks/results/README.md) (`make bench BENCH=end_to_end`; {run_of(rows)}):"
    )
    return f"{title}\n\n{markdown(lines)}\n\n{_image('tokens per second', 'end_to_end')}"


def _floor_table(rows: list[Row], trained: list[Row]) -> str:
    """The libraries' products and attention of a step alone, beside our fastest step that has them."""
    if not rows:
        return ""
    head = ["model, tokens", "", "ms", "J", "W", "tokens/s at most", "ours, tokens/s", "of it"]
    lines = [head, ["---"] * len(head)]
    before = ""
    for row in rows:
        what = f"{row['model']}, {times(row['tokens'])}"
        most, cells = number(row["tokens/s ≤"]), ["", "", ""]
        if most is not None:
            rates = [
                rate
                for r in trained
                if (r["model"], r["LoRA on"]) == (row["model"], "qkvo")
                and r["provider"].startswith("ours")
                and ("FP8 head" in r["provider"]) == row["part"].endswith("FP8")
                and (rate := number(r["tokens/s"])) is not None
            ]
            cells = [f"{most:,.0f}", "–", "–"]
            if rates:
                cells[1:] = [f"{max(rates):,.0f}", f"{max(rates) / most:.2f}"]
        said = [row[name] or "–" for name in ("ms", "J", "W")]
        lines.append(["" if what == before else what, row["part"], *said, *cells])
        before = what
    title = (
        "What no step over FP8 falls below on this GPU: cuBLASLt's FP8 products, cuDNN's attention and the head's "
        "products of a step, in one graph, at its power limit. Nothing else runs; ours is of the table above "
        f"(`make bench BENCH=floor`; {run_of(rows)}):"
    )
    return f"{title}\n\n{markdown(lines)}"


def _experts_table(rows: list[Row]) -> str:
    """A mixture's experts: a line for each provider of each shape."""
    if not rows:
        return ""
    head = [
        "experts, hidden, ffn, of a token",
        "",
        "device, ms",
        "host, ms",
        "TFLOP/s",
        "MiB of a call",
    ]
    lines, before = [head, ["---"] * len(head)], ""
    for row in rows:
        what = row["shape"].replace("x", ", ")
        host = number(row["CPU µs"])
        cells = [row["provider"], row["ms"], "–" if host is None else f"{host / 1e3:.1f}"]
        lines.append(
            ["" if what == before else what, *cells, row["TFLOP/s"] or "–", row["peak MiB"] or "–"]
        )
        before = what
    title = (
        f"Adapters of rank 16 on a mixture's experts, {times(rows[0]['tokens'])} tokens, forward and backward. A graph "
        "replays in the device's time; a layer that is launched kernel by kernel takes the longer one "
        "(`make bench BENCH=experts`; "
        f"{run_of(rows)}):"
    )
    return f"{title}\n\n{markdown(lines)}"


def _finetune_table(rows: list[Row]) -> str:
    if not rows:
        return ""
    head = ["model, tokens", "", "tokens/s", "× HF + PEFT", "attention", "peak GiB", ""]
    lines = [head, ["---"] * len(head)]
    before = ""
    for row in rows:
        what = f"{row['model']}, {times(row['rows']).replace(' ', '')}"
        rate, memory = number(row["tokens/s"]), number(row["peak GiB"])
        cells = [
            "–" if rate is None else f"{rate:,.0f}",
            row["× hf + peft"] or "–",
            row["attention"] or "–",
            "–" if memory is None else f"{memory:.1f}",
            "" if row["check"] == "ok" else row["check"][:REASON],
        ]
        lines.append(["" if what == before else what, row["provider"], *cells])
        before = what
    title = (
        "`lorakernels finetune` from its command line (cli), LoRA R = 16 on all linear layers, functions of this "
        "Python's sources packed into rows, random weights; beside it a loop of our own and HF + PEFT bf16 on the same "
        f"rows (`make bench BENCH=finetune`; {run_of(rows)}):"
    )
    return f"{title}\n\n{markdown(lines)}"


def _users_table(rows: list[Row]) -> str:
    """What check_gpu.py measured: loops as users write them."""
    timed = [row for row in rows if number(row["tokens/s"]) is not None]
    if not timed:
        return ""
    lines = [["layers, tokens", "", "tokens/s", "× PEFT, same run"], ["---"] * 4]
    before = ""
    for row in sorted(timed, key=lambda r: r["shape"]):
        what, rate = times(row["shape"]), number(row["tokens/s"])
        name = row["part"] if row["× PEFT"] else f"{row['part']} (the peer)"
        lines.append(["" if what == before else what, name, f"{rate:,.0f}", row["× PEFT"] or "1"])
        before = what
    title = (
        "The command line and loops as users write them, LoRA R = 16 on all linear layers, p = 0.1, no other options; "
        '"8b/8" is 8 layers of 8B widths, "1b" 16 of 1B\'s, vocabulary 32,000. '
        "Compiled layers, Trainer and SFTTrainer are divided by PEFT's in the same form "
        f"(`make check-gpu`; {run_of(rows)}):"
    )
    return f"{title}\n\n{markdown(lines)}"


def _generate_table(rows: list[Row]) -> str:
    """transformers' generate: a line for each provider and way of its forwards."""
    if not rows:
        return ""
    head = ["model, prompt, rows", "", "forwards", "a token, ms", "tokens/s", "÷ HF + PEFT", ""]
    lines, before = [head, ["---"] * len(head)], ""
    for row in rows:
        what = f"{row['model']}, {row['prompt']}, {row['batch']}"
        ms, rest = row["ms a token"], [row[name] or "–" for name in ("tokens/s", "÷ peft")]
        took = f"{ms} ({row['repeatable ms']})" if ms else "–"
        why = "" if row["check"] == "ok" else row["check"][:REASON]
        cells = [row["provider"], row["forwards"], took, *rest, why]
        lines.append(["" if what == before else what, *cells])
        before = what
    title = (
        "transformers' `generate`, adapters of R = 16 on all linear layers, switched on, random weights. "
        "÷ is by HF + PEFT's bf16 with the same forwards: eager ones, or one graph that is replayed for each token. In "
        "brackets is the one run without cuDNN's attention, in which all tokens are compared "
        f"(`make bench BENCH=generate`; {run_of(rows)}):"
    )
    return f"{title}\n\n{markdown(lines)}"


def _sharded_table(rows: list[Row]) -> str:
    """A base that several GPUs share, beside one that each has."""
    if not rows:
        return ""
    columns = [
        "model",
        "tokens",
        "base",
        "ranks",
        "tokens/s a GPU",
        "÷ whole",
        "peak GiB",
        "gather ms",
    ]
    adapters = "R = 16 on q, k, v, o"
    if any(row.get("LoRA") for row in rows):  # older rows have no such column
        columns[2:2] = ["LoRA", "optimizer"]
        adapters += " where no row says otherwise"
    lines = [columns, ["---"] * len(columns)]
    lines += [[times(row.get(name, "")) or "–" for name in columns] for row in rows]
    title = (
        f"A frozen FP8 base that is split over the GPUs, LoRA {adapters}, random weights "
        f"(`torchrun --nproc-per-node 2 benchmarks/parallel/bench_sharded_base.py`; {run_of(rows)}):"
    )
    return f"{title}\n\n{markdown(lines)}"


def _graphs_table(rows: list[Row]) -> str:
    """A line per provider, a column per stack of layers."""
    if not rows:
        return ""
    stacks = list(dict.fromkeys((row["size"], row["layers"]) for row in rows))
    head = ["", *(f"{layers} × {SHAPES.get(size, size)}" for size, layers in stacks)]
    lines = [head, ["---"] * len(head)]
    for provider in dict.fromkeys(row["provider"] for row in rows):
        cells = [provider]
        for size, layers in stacks:
            row = find(rows, {"size": size, "layers": layers, "provider": provider})
            ms = number(row["ms"]) if row else None
            if row is None or ms is None:
                cells.append("–")
            else:
                cells.append(f"{ms:.2f} ({row['÷ kernels']}, {row['CPU µs/layer']})")
        if set(cells[1:]) != {"–"}:
            lines.append(cells)
    title = (
        "Stacks of HF Llama layers with LoRA over FP8, forward + backward: ms, and in brackets ÷ the sum of the "
        f"kernels and the host's µs a layer (`make bench BENCH=graphs`; {run_of(rows)}):"
    )
    return title + "\n\n" + markdown(lines)


def _quality_table(rows: list[Row]) -> str:
    if not rows:
        return ""
    head = ["text", "", "steps", "seeds", "held-out loss", "its spread over seeds", "÷ bf16", ""]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        said = [row.get(name, "") or "–" for name in ("seeds", "held-out loss", "spread", "÷ bf16")]
        why = "" if row["check"] == "ok" else row["check"][:REASON]
        lines.append([row["model"], row["variant"], row["steps"], *said, why])
    title = (
        "Training on the same rows: held-out loss, nats per byte, at the end "
        f"(`python benchmarks/models/quality.py --output DIR`; {run_of(rows)}):"
    )
    return f"{title}\n\n{markdown(lines)}\n\n{_image('training losses', 'quality')}"


def _recipes_table(rows: list[Row]) -> str:
    """A trained model of 135M parameters under each recipe, before and after training."""
    if not rows:
        return ""
    head = ["", "seeds", "KL of the base", "÷ one scale", "loss of the base", "held-out loss"]
    head += ["its spread over seeds", "÷ bf16", ""]
    names = ("seeds", "KL", "KL ÷ one scale", "base loss", "held-out loss", "spread", "÷ bf16")
    lines = [head, ["---"] * len(head)]
    for row in rows:
        why = "" if row["check"] == "ok" else row["check"][:REASON]
        lines.append([row["variant"], *(row.get(name, "") or "–" for name in names), why])
    title = (
        f"SmolLM2-135M-Instruct, {rows[0]['steps']} steps on Python's sources: nats per token. KL is of the base "
        "alone, before training, from bf16's (`python benchmarks/models/quality_recipes.py FOLDER --output DIR "
        f"--steps {rows[0]['steps']}`; {run_of(rows)}):"
    )
    picture = _image("loss and divergence by recipe", "quality_recipes", "h100")
    return f"{title}\n\n{markdown(lines)}\n\n{picture}"


def _budget(rows: list[Row]) -> str:
    if not rows:
        return ""
    title = (
        "Where the time of a decoder layer goes, LoRA R = 16 on q, k, v, o, p = 0.1 "
        f"(`make bench BENCH=decoder_layer`; {run_of(rows)}):"
    )
    return f"{title}\n\n{_image('shares of a decoder layer', 'budget')}"


def _image(what: str, name: str, gpu: str = "h200") -> str:
    return f"![{what}](../benchmarks/results/{gpu}/{name}.png)"


def _target_table(results: dict[str, list[Row]]) -> str:
    lines = [["", "measured", "target", ""], ["---"] * 4]
    for target in targets():
        row = find(results.get(target.csv, []), target.where)
        lines.append(target.line(number(row.get(target.column, "")) if row else None))
    return markdown(lines)


def between_markers(text: str) -> str:
    """What stands between the markers of a page.

    Raises:
        ValueError: they are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the page must hold {BEGIN} and then {END}, once each")
    return text.partition(BEGIN)[2].partition(END)[0].strip("\n")


def rewritten(text: str, block: str) -> str:
    between_markers(text)
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{block}\n{END}{rest.partition(END)[2]}"


PAGES = {
    "README.md": headlines,
    "docs/performance.md": tables,
    "benchmarks/recipes/README.md": recipes,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="result tables and a roofline from result CSVs")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="has the pages")
    args = parser.parse_args(arguments)
    results = read(args.results)
    if not results:
        parser.error(f"--results must hold CSV files, found none in {args.results}")
    shown = records(args.results)
    texts = {args.root / name: make(shown) for name, make in PAGES.items()}
    texts = {
        page: rewritten(page.read_text(encoding="utf-8"), block) for page, block in texts.items()
    }
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page}")
    pictures = draw_all(args.results, results)
    if args.results == RESULTS:
        pictures += draw_all(H100, read(H100), BY_H100)
    for picture in pictures:
        print(f"wrote {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
