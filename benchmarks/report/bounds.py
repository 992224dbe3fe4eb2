# SPDX-License-Identifier: Apache-2.0
"""What stands against each missed target: the best value that the records allow, and why ours is not there.

A bound is computed from benchmarks/results, so that no number stands twice. It is a copy of the same bytes, or the
libraries' own kernels in the same record. "–" is where the records give none: the words say what is left to try.
The power limit sets the clock of large products, so that they take their energy over 700 W (docs/facts.md, H1 and H2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from benchmarks.lib.goals import Target
from benchmarks.report.ops import Row, find, markdown, number

Results = dict[str, list[Row]]
Bound = tuple[float | str, str]  # the value, and why it cannot be better, or what is left to try
UNKNOWN = "–"
CAPPED = 0.6  # of a saved kernel's time is saved from a step at the power limit (docs/facts.md, H2)
NAN = float("nan")
SQUARE = 8192  # rows and columns of the ops' targets
STRIPS, SEGMENTS, SLICES = (
    16,
    147,
    4,
)  # QuantizeGradGrid's and LoraGradAGrid's of 8192², R = 16, 132 multiprocessors


def value(results: Results, csv: str, column: str, **where: object) -> float:
    """Of the record's first row with these values; nan where there is none."""
    row = find(results.get(csv, []), where)
    found = number(row.get(column, "")) if row else None
    return NAN if found is None else found


def _finetune(target: Target, results: Results) -> Bound:
    layers, rows = 8 / 32, 2
    ms = rows * (
        layers * (_floor(results, "FP8 GEMMs") + _floor(results, "attention"))
        + _floor(results, "head, bf16")
    )
    asked = value(results, "check_gpu", "tokens/s", shape="8b/8 2x4096", part="finetune")
    return rows * 4096e3 / ms, (
        "cuBLASLt's products, cuDNN's attention and the head of a vocabulary of 128,256, alone (the floor's table). "
        "98,000 was asked for with a vocabulary of 32,000, where this form had 94,678 (T35), and "
        f"`finetune` without options has {asked:,.0f}"
    )


def _floor(results: Results, part: str) -> float:
    return value(results, "floor", "ms", model="Llama-3.1-8B", part=part)


def _loop(target: Target, results: Results) -> Bound:
    if "compiled" in target.where["part"]:
        fused = value(
            results, "check_gpu", "tokens/s", **{**target.where, "part": "drop-in, fused, attached"}
        )
        ours = value(results, "check_gpu", "tokens/s", **target.where)
        return UNKNOWN, (
            f"not bounded: the host takes the time. The device's work takes {2048e3 / fused:.0f} ms at most of a step "
            f"of {2048e3 / ours:.0f} ms, by the fused and attached row. Runs had 0.45 to 1.84 (M3). Next: fewer "
            "tensors that ops take and give, of which Inductor's code asserts 181 a layer, PEFT's 90 (T36)"
        )
    layer = {"size": "medium"}
    between = value(results, "decoder_layer", "ms", provider="ours, not fused, graphed", **layer)
    between -= value(results, "decoder_layer", "ms", provider="ours, full, graphed", **layer)
    head = _floor(results, "head, bf16") * 2 * 32_000 / 128_256
    ms = 2 * 8 / 32 * (_floor(results, "FP8 GEMMs") + _floor(results, "attention"))
    ms += head + 8 * 8192 / 2048 * between
    peer = value(results, "check_gpu", "tokens/s", shape="8b/8 2x4096", part="PEFT bf16")
    return 8192e3 / ms / peer, (
        "the floor's products, attention and head, and what an unfused layer has between them beyond a fused one. "
        "Runs had 1.44 to 1.50 (M2), so that the target is within their spread. Fused layers have no such "
        "kernels"
    )


def _host(target: Target, results: Results) -> Bound:
    frozen = {**target.where, "provider": "ours, frozen, no lora"}
    return value(results, "host", "÷ peft", **frozen), (
        "a frozen layer of ours without an adapter, which has one product each way. The adapter adds two launches "
        "each way and the draw of a dropout slot, 5.5 µs (T20). The target is between; next: fewer launches, of "
        "which each takes 6 µs (T26)"
    )


def _product(target: Target, results: Results) -> Bound:
    rank, depth = target.where["rank"], int(str(target.where["M x N x K"]).split("x")[2])
    rows = results.get("fp8_linear_lora", [])
    own = [
        found
        for row in rows
        if row["provider"] == "cublaslt, base only"
        and (found := number(row["÷ cublaslt"])) is not None
    ]
    joules = [_joules(rows, row) for row in rows if row["provider"] == "ours"]
    known = [ratio for ratio in joules if ratio == ratio]
    energy = (
        f"Ours takes {median(known):.2f} of its joules, the median of {len(known)} rows from {min(known):.2f} to "
        f"{max(known):.2f}, as NVML's counter steps by up to a quarter of what one row counted. "
        if known
        else ""
    )
    [ours] = _counted(results, "fp8_gemm_kernel<0,", "tensor %")
    [theirs] = _counted(results, CUBLASLT, "tensor %")
    cycles = [
        value(results, "gemm_depths_points", "cycles a tile", product=product, depth=8192)
        for product in ("forward, R = 16", "cublaslt, forward")
    ]
    counted = "Of a tile 8,192 deep, ours counts {:,.0f} cycles with an adapter, cuBLASLt's {:,.0f} without. "
    energy += counted.format(*cycles) if min(cycles) == min(cycles) else ""
    rate = 1 + 2 * int(str(rank)) / depth
    return f"{rate:.2f} at cuBLASLt's rate", (
        f"cuBLASLt's rate, with the adapter's 2 R / K of tensor time beside its own. Tensor cores are busy {ours:.1f} "
        f"% of the time in ours and {theirs:.1f} % in cuBLASLt's kernel, at the clock that the power limit leaves. "
        f"cuBLASLt beside itself has {min(own, default=NAN):.2f} to {max(own, default=NAN):.2f} in this record, which "
        f"is how well one run can tell. {energy}Two ways were tried (D1, H3). Next: the last round's tiles split "
        "along the depth"
    )


CUBLASLT = "nvjet_sm90_qqtst_320x128_128x3_1x2_h_bz_coopB_TNT"


def _joules(rows: list[Row], ours: Row) -> float:
    """Of a row of ours over those of cuBLASLt's product without an adapter; nan where they were not counted."""
    same = {key: ours[key] for key in ("M x N x K", "rank")}
    peer = find(rows, {**same, "provider": "cublaslt, base only"}) or {}
    taken, beside = number(ours.get("mJ", "")), number(peer.get("mJ", ""))
    return NAN if taken is None or beside is None else taken / beside


def _bytes(target: Target, results: Results) -> Bound:
    op, where = target.csv, target.where
    floor, copy, empty = (
        value(results, op, column, **where)
        for column in ("floor ms", "copy GB/s", "empty sample µs")
    )
    moved, why = MOVED[op](results)
    least, most = (value(results, op, f"p{p} ms", **where) / floor for p in (20, 80))
    bound = (moved / copy * 1e-6 + empty * 1e-3) / floor
    return bound, (
        f"a copy of the {moved / 1e6:.0f} MB that it moves, and an empty launch. {why} Its samples have {least:.2f} "
        f"to {most:.2f} (p20, p80)"
    )


def _counted(results: Results, kernel: str, *columns: str) -> list[float]:
    rows = [r for r in results.get("counters", []) if r["kernel"].startswith(kernel)]
    return [(number(rows[0][c]) if rows else None) or NAN for c in columns]


def _down(results: Results) -> tuple[float, str]:
    [us] = _counted(results, "finish_kernel", "µs")
    why = f"The kernel that adds up its sums begins behind it: {us:.1f} µs alone."
    return 3 * SQUARE**2 + 2 * 8 * SQUARE * 16 * 4, why


def _grad(results: Results) -> tuple[float, str]:
    shares = STRIPS * SQUARE * 16 * 4 + SEGMENTS * 512 * 16 * 4
    where: dict[str, object] = {"shape": "8192x8192", "rank": 16, "mode": "delayed"}
    drawn, alone = (
        value(results, "quantize_grad", "ms", provider=provider, **where)
        for provider in ("ours, drawing a mask", "ours")
    )
    why = (
        "Warps of their own make dy8 (H26), and the sum waits once for its shares (H27). By torch's profiler the first "
        "kernel takes 60 µs, and the sum ends 4 µs behind it (b9ddd50). "
        f"The draw takes {(drawn - alone) * 1e3:.0f} µs more. 1.55 is what the kernel plan calls honest. "
        "Next: the draw beside the rest, and shares that are added up in a cluster. Two blocks a multiprocessor lost "
        "(D2)."
    )
    return 3 * SQUARE**2 + SQUARE**2 / 8 + 2 * shares, why


def _grad_a(results: Results) -> tuple[float, str]:
    [added] = _counted(results, "sum_row_slices_kernel", "µs")
    where: dict[str, object] = {"shape": "8192x8192", "rank": 16, "reads": "x8", "provider": "ours"}
    without = value(results, "lora_grad_a", "÷ floor", p=0.0, **where)
    why = (
        f"The mask's bits are not among the target's bytes; without dropout it has {without:.2f}. The sum of the "
        f"slices takes {added:.1f} µs alone. 1.65 is what the kernel plan calls honest. Clusters of four slices "
        "lost. Next: blocks of two slices in clusters of two."
    )
    return SQUARE**2 * 9 / 8 + 2 * SLICES * 16 * SQUARE * 4, why


MOVED = {"quantize_lora_down": _down, "quantize_grad": _grad, "lora_grad_a": _grad_a}


def _linear_layer(target: Target, results: Results) -> Bound:
    shape = str(target.where["shape MxNxK"])
    size = shape.split("x")[0]
    ops = {
        op: value(results, op, "floor ms", shape=f"{size}x{size}", rank=16, provider="ours")
        for op in MOVED
    }
    taken = [
        value(results, op, "ms", shape=f"{size}x{size}", rank=16, **how)
        for op, how in AS_IN_A_LAYER.items()
    ]
    same: dict[str, Any] = {"shape MxNxK": shape, "rank": 16, "dropout": 0.1}
    gemms = value(results, "lora_linear", "ms", provider="cublaslt fp8, gemms only", **same)
    peer = value(results, "lora_linear", "ms", provider=PEER_OF[target.column], **same)
    capped = size == "8192"
    ms = gemms + (CAPPED if capped else 1.0) * sum(ops.values())
    said = ", of which a step at the power limit feels six tenths" if capped else ""
    return ms / peer, (
        f"cuBLASLt's two products, {gemms:.3f} ms, and a copy of the bytes of the adapter's three ops, "
        f"{sum(ops.values()) * 1e3:.0f} µs{said}. Ours take {sum(taken) * 1e3:.0f} µs alone, by their own rows above"
    )


AS_IN_A_LAYER: dict[str, dict[str, object]] = {
    "quantize_lora_down": {"p": 0.1, "provider": "ours"},
    "quantize_grad": {"provider": "ours, drawing a mask"},
    "lora_grad_a": {"p": 0.1, "provider": "ours, mask given"},
}
PEER_OF = {
    "÷ te base": "te fp8, no lora",
    "÷ te + lora": "te fp8 + lora",
    "÷ te graphed": "te fp8 + lora, graphed",
    "÷ peft": "peft bf16",
}


def _decoder_layer(target: Target, results: Results) -> Bound:
    size = target.where["size"]
    rows = [r for r in results.get("decoder_layer_kernels", []) if r["size"] == size]
    us = sum(
        number(row["µs" if row["bound by"] == "operations" else "floor µs"]) or 0.0
        for row in rows
        if row["bound by"]
    )
    peer = min(
        value(results, "decoder_layer", "ms", size=size, provider=f"te layer fp8, no lora{form}")
        for form in ("", ", graphed")
    )
    return us / 1e3 / peer, (
        "our products and attention as they ran, eager and by torch's profiler, and all other kernels at a copy's "
        "rate. Next: SwiGLU in the products' epilogue, and norms with what they feed"
    )


def _end_to_end(target: Target, results: Results) -> Bound:
    model, fp8_head = target.where["model"], "FP8 head" in str(target.where["provider"])
    head = f"together, head in {'FP8' if fp8_head else 'bf16'}"
    most = value(results, "floor", "tokens/s ≤", model=model, part=head)
    if target.column != "tokens/s":
        most /= value(
            results,
            "end_to_end",
            "tokens/s",
            model=model,
            provider="hf + peft bf16",
            **{"LoRA on": "qkvo"},
        )
    joules = value(results, "floor", "J", model=model, part=head)
    taken = value(results, "end_to_end", "J/step", **target.where)
    energy = f". It takes {joules:.0f} J, and a step of ours {taken:.0f}" if taken == taken else ""
    return most, (
        f"the floor's products, attention and head, with nothing between them{energy}. Between them SwiGLU, norms, "
        "RoPE, the adapters' ops and the optimizer move bytes. Next: as for a decoder layer"
    )


def _sharded(target: Target, results: Results) -> Bound:
    where = target.where
    if target.column != "÷ whole":
        ms = value(results, "sharded_base", "no copies ms", **where)
        return 8192e3 / ms, "the same step without copies, in the same run"
    gather = value(results, "sharded_base", "gather ms", **where)
    two, four = (
        [
            value(results, "sharded_base", c, **{**where, "ranks": ranks, "check": "finite"})
            for c in ("no copies ms", "p50 ms")
        ]
        for ranks in (2, 4)
    )
    return UNKNOWN, (
        f"not bounded: each gather takes {gather:.2f} ms beside products, which lose time to it though nothing "
        f"waits (H20). A step without copies takes {two[0] / two[1]:.3f} of one with them over two GPUs, and "
        f"{four[0] / four[1]:.3f} over four. Next: more of the last layers' weights kept from forward to backward, "
        "where there is room"
    )


BOUNDS: dict[str, Callable[[Target, Results], Bound]] = {
    "finetune": _finetune,
    "check_gpu": _loop,
    "host": _host,
    "fp8_linear_lora": _product,
    "quantize_lora_down": _bytes,
    "quantize_grad": _bytes,
    "lora_grad_a": _bytes,
    "lora_linear": _linear_layer,
    "decoder_layer": _decoder_layer,
    "end_to_end": _end_to_end,
    "sharded_base": _sharded,
}


def bound_table(targets: Iterable[Target], results: Results) -> str:
    """Each missed target beside its bound. Reasons stand below, once each."""
    head = ["missed", "measured", "target", "bound", ""]
    lines, reasons = [head, ["---"] * len(head)], list[str]()
    for target in targets:
        row = find(results.get(target.csv, []), target.where)
        measured = number(row.get(target.column, "")) if row else None
        what, found, asked, verdict = target.line(measured)
        if not verdict.startswith("missed"):
            continue
        best, why = BOUNDS[target.csv](target, results)
        if why not in reasons:
            reasons.append(why)
        digits = 2 if target.bound < 100 else 0
        least = "≤" if target.at_least else "≥"
        told = best if isinstance(best, str) else f"{least} {best:.{digits}f}"
        lines.append([what, found, asked, told, f"({reasons.index(why) + 1})"])
    if len(lines) == 2:
        return ""
    title = "What the records say that each missed one cannot pass, and what is left to try:"
    listed = "\n".join(f"{i}. {why}." for i, why in enumerate(reasons, 1))
    return f"{title}\n\n{markdown(lines)}\n\n{listed}"


# The kernel plan's budget of 2026-11-22, ms: model, provider, a step before, as planned, the plan's floor, and the head
# of the floor that is measured
PLAN = (
    ("Llama-3.1-8B", "ours, fast, FP8 head, one graph", "162.5", "147 to 150", "119", "FP8"),
    ("Llama-2-70B", "ours, fit, offload, graphs by layer", "2,886", "2,510 to 2,650", "–", "bf16"),
    ("Llama-3.2-1B", "ours, one graph", "8.8", "7.9", "–", "bf16"),
)


def plan_table(results: Results) -> str:
    """Whole steps: planned before the kernels were changed, measured, and what the libraries' part of them takes."""
    head = ["step", "", "before, ms", "planned, ms", "planned floor, ms", "now, ms", "floor, ms"]
    lines = [head, ["---"] * len(head)]
    for model, provider, before, planned, least, end in PLAN:
        where: dict[str, object] = {"model": model, "LoRA on": "qkvo", "provider": provider}
        now = value(results, "end_to_end", "ms/step", **where)
        floor = value(results, "floor", "ms", model=model, part=f"together, head in {end}")
        if now == now and floor == floor:
            measured = [f"{ms:,.{0 if ms > 1000 else 1}f}" for ms in (now, floor)]
            lines.append([model, provider, before, planned, least, *measured])
    if len(lines) == 2:
        return ""
    title = (
        'A step by the kernel plan\'s budget, LoRA on q, k, v, o. "Before" and what was planned are of 2026-11-22; '
        '"now" and the floor are measured, of the tables above:'
    )
    return f"{title}\n\n{markdown(lines)}"
