# SPDX-License-Identifier: Apache-2.0
"""One decoder layer, forward and backward, against its peers: te.TransformerLayer, transformers with PEFT, and others.

    python benchmarks/layers/bench_decoder_layer.py --output DIR [--sizes small medium large] [--providers …]

peers/layers.py and peers/te_layers.py hold the layers. All are one Llama layer with the same weights. Where a row says
so, LoRA is on q, k, v and o, with R = 16, alpha = 32 and p = 0.1. Each is compared with transformers' layer in fp32
before it is timed, on the first 256 tokens and without dropout. y − x, dx − dy and the adapters' gradients are
compared; "error" is the largest of their relative errors in the Frobenius norm. A layer that is off is not timed. The
exit code is 1 if it is ours.

"graphed" rows replay a graph of forward and one of backward. Ours are made by `lorakernels.graphs`, as users of
GraphManager have them, and others' by torch.cuda.graph.

On a GPU each provider has a process of its own, and all are alive while a size is measured. They are asked in order
and then in reverse order: a steady drift of the GPU's clock then cancels in the ratios. A provider that breaks says
why in its row. Columns:

    fwd ms, bwd ms, ms   the device's time while nothing waits for the host: medians of samples that have both parts.
                         Before each sample, graphed or not, the GPU only writes memory for 10 ms. It draws less power
                         then, and its clock is higher afterwards.
    wall ms              a step's time when steps follow each other: the longer of device and host
    J                    the GPU's energy of a step when steps follow each other, by NVML's counter
    CPU µs               what the host needs to enqueue a step
    saved MB             what a forward leaves allocated besides y; a fresh x counts if it is kept
    predicted MB         what `fuse` says that "saved MB" would be
    peak MB              the most during forward and backward, with that x and the gradients
    ÷ te layer           ms over te.TransformerLayer's without LoRA, the better of eager and graphed
    wall ÷ te layer      the same of wall ms

The memory columns leave parameters out, and graphs, which own their memory, have none. Every step updates the FP8
scales once, as TE's does, and advances our dropout's Philox state. decoder_layer_kernels.csv has the kernels of
our layer's eager step, each beside its floor (lib/breakdown.py). decoder_layer.png shows the times.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.decoder_provider import GRAPHED, MAKE, NOT_GRAPHED, Provider, Samples, kind_of
from benchmarks.lib.energy import shown
from benchmarks.lib.rows import (
    Row,
    arguments,
    environment,
    finish,
    parser,
    ratio,
    write_csv,
)
from benchmarks.lib.timing import measured_floor
from benchmarks.lib.workers import Local, Worker, WorkerError, serve
from benchmarks.peers.layer_case import SIZES
from benchmarks.peers.te import te_first_or_hidden

PROVIDERS = [
    row for name in MAKE for row in ([name] if name in NOT_GRAPHED else [name, name + GRAPHED])
]
TE_LAYER = "te layer fp8, no lora"
KERNELS_OF = "ours, recompute"
RATIOS = {"÷ te + lora": "te layer fp8 + lora", "÷ hf + te": "hf + te fp8 + lora"}
RATIOS |= {"÷ hf + peft": "hf + peft bf16"}
BUILD_TIMEOUT, MEASURE_TIMEOUT = 150.0, 30.0
SECONDS = 0.12  # of samples of one row, in each of the two rounds
AT_ONCE = {
    "large": 4
}  # providers that build beside each other: each takes up to 15 GB for the moment


MEMORY = ("saved MB", "predicted MB", "peak MB")
NO_TIMES: Row = dict.fromkeys(
    ("fwd ms", "bwd ms", "ms", "p20 ms", "p80 ms", "wall ms", "J", "CPU µs", "TFLOP/s"), ""
)


def columns(rounds: list[Samples], flops: int) -> Row:
    """Of the samples of all rounds together."""
    of = {key: [s for part in rounds for s in part[key]] for key in rounds[0]}
    wall, host, energy = (statistics.median(of[key]) for key in ("wall", "host", "joules"))
    ends: Row = {
        "wall ms": round(wall * 1e3, 4),
        "J": shown(energy, 3),
        "CPU µs": round(host * 1e6, 1),
    }
    if not all(part["forward"] for part in rounds):
        return {**dict.fromkeys(NO_TIMES, "host-bound"), **ends, "TFLOP/s": ""}
    steps = sorted(a + b for a, b in zip(of["forward"], of["backward"], strict=True))
    last, ms = len(steps) - 1, statistics.median(steps) * 1e3
    return {
        "fwd ms": round(statistics.median(of["forward"]) * 1e3, 4),
        "bwd ms": round(statistics.median(of["backward"]) * 1e3, 4),
        "ms": round(ms, 4),
        "p20 ms": round(steps[round(0.2 * last)] * 1e3, 4),
        "p80 ms": round(steps[round(0.8 * last)] * 1e3, 4),
        **ends,
        "TFLOP/s": ratio(flops / 1e9, ms),
    }


@contextlib.contextmanager
def started(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """A worker for each provider; on a CPU all in this process."""
    if device.type != "cuda":
        yield {name: Local(Provider(name, device).handlers()) for name in args.providers}
        return
    logs = args.output / "logs" if args.output else Path(tempfile.mkdtemp(prefix="decoder_layer"))
    command = [sys.executable, __file__, "--device", args.device, "--worker"]
    workers = {
        name: Worker([*command, name], logs / f"{name.replace(' ', '_')}.log")
        for name in args.providers
    }
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def bench_size(
    size: str, workers: dict[str, Any], args: argparse.Namespace, bandwidth: float
) -> tuple[list[Row], list[Row]]:
    """(rows of the table, rows of the kernels)."""
    heads = build(size, workers)
    rounds: dict[str, list[Samples]] = {row: [] for row in heads}
    for name in [*workers, *reversed(workers)]:
        if any(heads[row]["check"] == "ok" for row in (name, name + GRAPHED) if row in heads):
            try:
                at_most = {"seconds": SECONDS, "at_most": args.repetitions}
                for row, found in workers[name].ask("measure", MEASURE_TIMEOUT, **at_most).items():
                    rounds[row].append(found)
            except WorkerError as why:
                for row in (name, name + GRAPHED):
                    if row in heads:
                        heads[row]["check"] = f"{kind_of(name)}: {why}"
    kernels: list[Row] = []
    if KERNELS_OF in workers and rounds[KERNELS_OF]:
        try:
            kernels = workers[KERNELS_OF].ask("kernels", MEASURE_TIMEOUT, bandwidth=bandwidth)
        except WorkerError as why:
            print(f"{size}: no kernels of {KERNELS_OF}: {why}")
    for worker in workers.values():
        with contextlib.suppress(WorkerError):
            worker.ask("free", MEASURE_TIMEOUT)
    return rows_of(size, heads, rounds), [{"size": size, **row} for row in kernels]


def build(size: str, workers: dict[str, Any]) -> dict[str, Row]:
    """What each worker's rows start with; they build beside each other."""
    heads: dict[str, Row] = {}
    names = list(workers)
    at_once = AT_ONCE.get(size, len(names))
    for first in range(0, len(names), max(at_once, 1)):
        wave = names[first : first + at_once]
        for name in wave:
            workers[name].send("build", size=size)
        end = time.perf_counter() + BUILD_TIMEOUT
        for name in wave:
            try:
                heads |= workers[name].receive(end - time.perf_counter())
            except WorkerError as why:
                heads[name] = {"check": f"{kind_of(name)}: {why}", "error": ""}
    return heads


def rows_of(size: str, heads: dict[str, Row], rounds: dict[str, list[Samples]]) -> list[Row]:
    times: dict[str, Row] = {}
    for row, head in heads.items():
        flops = SIZES[size].flops("no lora" not in row)
        ok = head["check"] == "ok" and rounds[row]
        times[row] = columns(rounds[row], flops) if ok else NO_TIMES
    te = [times.get(row, NO_TIMES) for row in (TE_LAYER, TE_LAYER + GRAPHED)]
    best, best_wall = (
        min((row[key] for row in te if isinstance(row[key], float)), default="")
        for key in ("ms", "wall ms")
    )
    return [
        {
            "size": size,
            "provider": row,
            **dict.fromkeys(MEMORY, ""),
            **head,
            **times[row],
            "÷ te layer": ratio(times[row]["ms"], best),
            "wall ÷ te layer": ratio(times[row]["wall ms"], best_wall),
            **{
                key: ratio(times[row]["ms"], times.get(of, NO_TIMES)["ms"])
                for key, of in RATIOS.items()
            },
        }
        for row, head in heads.items()
    ]


def main() -> int:
    options = parser("a decoder layer, forward and backward, against its peers")
    options.add_argument("--sizes", nargs="+", choices=list(SIZES))
    options.add_argument("--providers", nargs="+", choices=list(MAKE), default=list(MAKE))
    options.add_argument("--worker", choices=list(MAKE), help=argparse.SUPPRESS)
    args, device = arguments(options, on_gpu=15)
    if args.worker:
        with te_first_or_hidden("te" in args.worker.split()):
            serve(Provider(args.worker, device).handlers())
        return 0
    sizes = args.sizes or (["small", "medium", "large"] if device.type == "cuda" else ["tiny"])
    rows: list[Row] = []
    kernels: list[Row] = []
    with started(args, device) as workers:
        bandwidth, floor_facts = measured_floor(device, args.repetitions)
        for size in sizes:
            found, of_ours = bench_size(size, workers, args, bandwidth)
            rows += found
            kernels += of_ours
    facts = {**environment(device), **floor_facts}
    if args.output and kernels:
        write_csv(args.output / "decoder_layer_kernels.csv", kernels, facts)
    code = finish("decoder_layer", rows, facts, args.output)
    return code


if __name__ == "__main__":
    sys.exit(main())
