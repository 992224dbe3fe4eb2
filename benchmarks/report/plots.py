# SPDX-License-Identifier: Apache-2.0
"""Pictures of the results, from the same CSVs as the tables, readable on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import cycle, product
from pathlib import Path
from typing import Any

from benchmarks.lib.curves import smoothed
from benchmarks.lib.goals import times
from benchmarks.report.ops import PEAKS, Row, number, points

INK = "#808080"  # on white and on black alike
BARS = ("#4c8fd6", "#e08a3c", "#57a86b", "#b57bd0", "#c8a13a", "#8f8f8f")
KINDS = {
    "FP8 GEMM with LoRA": ("fp8_linear_lora", "fp8_grad_input", "transpose_fp8"),
    "attention": ("scaled_dot_product",),
    "quantization, LoRA": ("quantize_", "lora_grad", "block_diagonal", "amax_and_scale"),
    "norms, RoPE, SwiGLU": ("rms_norm", "rope_", "swiglu_"),
}
OURS = ("dp", "sharded", "tp", "cp")  # ways of bench_scaling.py
SCALED = (*OURS, "DTensor + PEFT")
ACROSS = 3  # panels beside each other
Panel = Any  # matplotlib's Axes
Results = dict[str, list[Row]]


def roofline(panels: list[Panel], results: Results) -> None:
    """TFLOP/s over operations per byte, under the measured copy bandwidth and the data sheet's peaks."""
    (axis,) = panels
    rows = [row for some in results.values() for row in some]
    copies = [number(row["copy GB/s"]) for row in rows if row.get("copy GB/s")]
    bandwidth = max((c for c in copies if c), default=0.0) / 1e3  # TB/s
    devices = {row["device"].partition(": ")[2] for row in rows if "device" in row}
    for op, marks in points(results).items():
        axis.scatter(*zip(*marks, strict=True), s=18, label=op)
    span = [4.0, 2e4]
    for name in sorted(devices & set(PEAKS)):
        for peak, kind, style in zip(PEAKS[name], ("FP8", "bf16"), ("-", ":"), strict=True):
            knee = peak / bandwidth if bandwidth else span[0]
            start = min(peak, bandwidth * span[0]) if bandwidth else peak
            axis.plot([span[0], knee, span[1]], [start, peak, peak], style, color=INK)
            words = f"{name}, {kind}: {peak:.0f} TFLOP/s"
            axis.annotate(words, (span[1], peak * 1.05), ha="right", size=7, color=INK)
    if bandwidth:
        text = f"copy, measured: {bandwidth:.2f} TB/s"
        place = (span[0] * 1.3, bandwidth * span[0] * 1.9)
        axis.annotate(text, place, rotation=38, size=7, color=INK)
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axis.legend(fontsize=8)


def kind_of(op: str) -> str:
    """Which part of a layer's time an op's row belongs to."""
    return next((k for k, words in KINDS.items() if any(w in op for w in words)), "the rest")


def budget(panels: list[Panel], results: Results) -> None:
    """Where the time of one decoder layer goes, forward and backward, by size."""
    (axis,) = panels
    rows = [r for r in results["decoder_layer_kernels"] if r["pass"] != "both"]
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    shares: dict[str, list[float]] = {kind: [0.0] * len(sizes) for kind in (*KINDS, "the rest")}
    for row in rows:
        shares[kind_of(row["op"])][sizes.index(row["size"])] += number(row["µs"]) or 0.0
    totals = [sum(column) for column in zip(*shares.values(), strict=True)]
    names = [f"{size}, {total / 1e3:.2f} ms" for size, total in zip(sizes, totals, strict=True)]
    left = [0.0] * len(sizes)
    for color, (kind, found) in zip(BARS, shares.items(), strict=False):
        part = [100 * us / total for us, total in zip(found, totals, strict=True)]
        axis.barh(names[::-1], part[::-1], left=left[::-1], color=color, label=kind)
        left = [a + b for a, b in zip(left, part, strict=True)]
    axis.set(xlabel="% of a decoder layer's kernels, forward + backward")
    axis.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.28))


def memory(panels: list[Panel], results: Results) -> None:
    """What a large layer keeps for backward, eager rows alone: graphs own their memory."""
    (axis,) = panels
    rows = [
        r
        for r in results["decoder_layer"]
        if r["size"] == "large" and number(r["saved MB"]) is not None
    ]
    bars(axis, [(r["provider"], number(r["saved MB"]) or 0.0) for r in rows], "{:,.0f}")
    axis.set(title="hidden 8192, ffn 28672, 8192 tokens", xlabel="MB a layer keeps for backward")


def decoder_layer(panels: list[Panel], results: Results) -> None:
    """A panel per size, a bar per provider, forward and backward stacked."""
    rows = results["decoder_layer"]
    for panel, size in zip(panels, sizes_of(results), strict=True):
        timed = [r for r in rows if r["size"] == size and number(r["ms"]) is not None][::-1]
        names = [row["provider"] for row in timed]
        forward, backward = (
            [number(row[key]) or 0.0 for row in timed] for key in ("fwd ms", "bwd ms")
        )
        panel.barh(names, forward, color=BARS[0], label="forward")
        panel.barh(names, backward, left=forward, color=BARS[1], label="backward")
        panel.set(title=size, xlabel="ms of the device")
    panels[0].legend(fontsize=8)


def sizes_of(results: Results) -> list[str]:
    return list(dict.fromkeys(row["size"] for row in results["decoder_layer"]))


def end_to_end(panels: list[Panel], results: Results) -> None:
    """A panel per model and what is adapted, a bar per provider that has a number."""
    for panel, (model, adapted, tokens) in zip(panels, models_of(results), strict=True):
        mine = [
            (r["provider"], number(r["tokens/s"]) or 0.0)
            for r in results["end_to_end"]
            if (r["model"], r["LoRA on"]) == (model, adapted) and r["tokens/s"]
        ]
        bars(panel, mine, "{:,.0f}")
        panel.set(title=f"{model}, {times(tokens)}, LoRA on {adapted}", xlabel="tokens/s")


def models_of(results: Results) -> list[tuple[str, str, str]]:
    timed = (r for r in results["end_to_end"] if r["tokens/s"])
    return list(dict.fromkeys((r["model"], r["LoRA on"], r["tokens"]) for r in timed))


def bars(panel: Panel, values: list[tuple[str, float]], form: str) -> None:
    """Horizontal bars, the first on top, ours in a color of their own."""
    names, lengths = zip(*values[::-1], strict=True)
    colors = [BARS[0] if name.startswith("ours") else BARS[5] for name in names]
    drawn = panel.barh(names, lengths, color=colors)
    panel.bar_label(drawn, [form.format(v) for v in lengths], fontsize=7, padding=2, color=INK)
    panel.margins(x=0.15)


def quality(panels: list[Panel], results: Results) -> None:
    """One panel per text, one line per variant: the mean of its seeds."""
    for panel, model in zip(panels, texts_of(results), strict=True):
        found: dict[str, dict[float, list[float]]] = {}
        for row in results["quality_curves"]:
            if row["model"] == model:
                steps = found.setdefault(row["variant"], {})
                steps.setdefault(float(row["step"]), []).append(float(row["loss"]))
        for variant, steps in found.items():
            means = [sum(losses) / len(losses) for losses in steps.values()]
            panel.plot(list(steps), means, label=variant, linewidth=1.2)
        panel.set(title=model, xlabel="step", ylabel="training loss, nats per byte")
        panel.legend(fontsize=8)


def texts_of(results: Results) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in results["quality_curves"]))


def sharded_base(panels: list[Panel], results: Results) -> None:
    """Tokens/s of a GPU by where the base lies."""
    (axis,) = panels
    rows = [r for r in results["sharded_base"] if number(r["tokens/s a GPU"]) is not None]
    named = [
        (
            f"{r['model']}, {times(r['tokens'])}, {r['base']}, {r['ranks']} GPU",
            number(r["tokens/s a GPU"]) or 0.0,
        )
        for r in rows
    ]
    bars(axis, named, "{:,.0f}")
    axis.set(xlabel="tokens/s a GPU")


def quality_ranks(panels: list[Panel], results: Results) -> None:
    """Smoothed losses of each layout, and how far they are from one GPU's."""
    losses: dict[str, list[float]] = {}
    for row in results["quality_ranks_curves"]:
        losses.setdefault(row["way"], []).append(float(row["loss"]))
    curves = {way: smoothed(found) for way, found in losses.items()}
    one = next(iter(curves.values()))
    styles = cycle(product(("-", "--"), BARS))  # eight ranks have more ways than there are colours
    for (line, color), (way, curve) in zip(styles, curves.items(), strict=False):
        style = {"linewidth": 1.2, "linestyle": line, "color": color}
        panels[0].plot(curve, label=way, **style)
        off = [100 * (a / b - 1) for a, b in zip(curve, one, strict=False)]
        panels[1].plot(off, **style)
    panels[0].set(xlabel="step", ylabel="training loss, nats per byte")
    panels[0].legend(fontsize=8)
    panels[1].set(xlabel="step", ylabel="% from one GPU")


def quality_recipes(panels: list[Panel], results: Results) -> None:
    """Each recipe's held-out loss over bf16's, in percent, and the KL divergence of its base."""
    rows = [row for row in results["quality_recipes"] if number(row["÷ bf16"]) is not None]
    losses = [(row["variant"], round(100 * float(row["÷ bf16"]) - 100, 2) + 0.0) for row in rows]
    bars(panels[0], losses, "{:.2f} %")
    panels[0].set(title="held-out loss above bf16's, after training")
    bars(panels[1], [(row["variant"], float(row["KL"])) for row in rows], "{:.4f}")
    panels[1].set(title="KL divergence of the base, nats per token")


def scaling(panels: list[Panel], results: Results) -> None:
    """Tokens/s of all GPUs by their number, each way beside n times one GPU's best form."""
    for panel, (model, row) in zip(panels, scaled_of(results), strict=True):
        mine = [r for r in results["scaling"] if (r["model"], r["row"]) == (model, row)]
        for color, way in zip(BARS, SCALED, strict=False):
            found = {1: 1.0} if way in OURS else {}  # a peer alone is not what ours alone is
            for r in mine:
                if r["way"] == way and (times_one := scaled(r)) is not None:
                    found[int(r["ranks"])] = times_one
            if len(found) > (way in OURS):
                panel.plot(*zip(*sorted(found.items()), strict=True), "o-", label=way, color=color)
        counts = {1, *(int(r["ranks"]) for r in mine)}
        ends = [1, max(counts)]
        panel.plot(ends, ends, ":", color=INK, label="n times one GPU")
        panel.set(title=f"{model}, {times(row)}", xlabel="GPUs", ylabel="× one GPU's best form")
        panel.set_xticks(sorted(counts))
        panel.legend(fontsize=8)


def scaled(row: Row) -> float | None:
    """How many times the tokens/s of one GPU: of a run on one, or by itself in the run of all; None if not measured."""
    of_one, of_all = number(row.get("÷ one GPU", "")), number(row["÷ alone"])
    if of_one is None and of_all is not None:
        return of_all * int(row["ranks"])
    return of_one


def scaled_of(results: Results) -> list[tuple[str, str]]:
    rows = results["scaling"]
    return list(dict.fromkeys((r["model"], r["row"]) for r in rows if scaled(r) is not None))


Draw = Callable[[list[Panel], Results], None]
# Name of the picture → what draws it, the CSV that it needs, how many panels, and a panel's size in inches
PLOTS: dict[str, tuple[Draw, str, Callable[[Results], int], tuple[float, float]]] = {
    "roofline": (roofline, "", lambda _: 1, (7.0, 4.5)),
    "budget": (budget, "decoder_layer_kernels", lambda _: 1, (7.0, 2.6)),
    "memory": (memory, "decoder_layer", lambda _: 1, (7.0, 4.0)),
    "decoder_layer": (decoder_layer, "decoder_layer", lambda r: len(sizes_of(r)), (5.2, 5.4)),
    "end_to_end": (end_to_end, "end_to_end", lambda r: len(models_of(r)), (5.0, 4.0)),
    "sharded_base": (sharded_base, "sharded_base", lambda _: 1, (7.0, 2.2)),
    "quality": (quality, "quality_curves", lambda r: len(texts_of(r)), (5.5, 4.0)),
    "quality_ranks": (quality_ranks, "quality_ranks_curves", lambda _: 2, (5.5, 4.0)),
    "quality_recipes": (quality_recipes, "quality_recipes", lambda _: 2, (5.0, 2.4)),
    "scaling": (scaling, "scaling", lambda r: len(scaled_of(r)), (5.5, 4.0)),
}


BY_H100 = ("quality_ranks", "quality_recipes", "scaling")


def draw_all(folder: Path, results: Results, names: Collection[str] = PLOTS) -> list[Path]:
    """Draw every picture of `names` whose CSV is there into `folder`, and return their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = {
        **dict.fromkeys(plain, INK),
        "axes.titlesize": 9,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
    }
    style |= {"legend.framealpha": 0.0, "axes.facecolor": "none", "svg.hashsalt": "lorakernels"}
    paths = []
    for name, (draw, csv, count, (width, height)) in PLOTS.items():
        if name not in names or (csv and not results.get(csv)):
            continue
        with pyplot.rc_context(style):
            many = count(results)
            columns, lines = min(many, ACROSS), -(-many // ACROSS)
            size = (width * columns, height * lines)
            figure, panels = pyplot.subplots(lines, columns, figsize=size, squeeze=False)
            for unused in panels.flat[many:]:
                unused.axis("off")
            draw(list(panels.flat[:many]), results)
            figure.tight_layout()
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=110, transparent=True)
            pyplot.close(figure)
    return paths
