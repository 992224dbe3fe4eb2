# SPDX-License-Identifier: Apache-2.0
"""Replaying decoder layers: eager, GraphManager, torch.cuda.make_graphed_callables, TE's, and torch.compile.

    python benchmarks/graphs/bench_graphs.py --output DIR [--quick] [--sizes small …] [--layers 4 …] [--providers …]
    python benchmarks/graphs/bench_graphs.py --output DIR --merge DIR1 DIR2      the rows of earlier runs as one table

A step is the forward and the backward of a stack of transformers' Llama decoder layers. They have LoRA on q, k, v, o
over an FP8 base, and dropout 0.1. Gradients are None before a step. lib/graph_providers.py makes it deterministic, so
that an eager step repeats to the bit. Each provider has a process of its own: what breaks in one reaches no other's
rows. Columns:

    check          the first replayed step beside an eager one from the same random and FP8 states. "bit-equal", or the
                   largest norm of a difference over the tensor's norm. Ours must be as equal to eager as eager is to
                   itself; peers must be within lib/graph_measure.py's TOLERANCE. A row that is not is WRONG, untimed
    ms             wall time of a step: up to half a second of steps, with the device idle before and after
    ÷ kernels      ms over kernels ms; 1 is a device without a gap
    kernels ms     the sum of the kernels' and copies' durations in a step, by torch's profiler
    gaps ms        the time within that step in which none of them ran
    CPU µs/layer   the host's time for forward and backward of a layer, medians. The device is idle before every fourth
                   call, so that no launch waits for room in a queue. Compare with "a pair of Functions"
    capture s      warm-up and capture, compilation included
    MB, driver MB  what the allocator reserves at most above the weights, cuBLAS's workspaces included; and what the
                   driver took besides, where it says so

The exit code is 1 if a row is WRONG or one of GraphManager's raised. A peer that raises is a row. So is one for which
--budget-s left no time.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.graph_measure import COLUMNS, Measurer, function_pair_us
from benchmarks.lib.graph_providers import PROVIDERS, SIZES
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio
from benchmarks.lib.workers import Local, Worker, WorkerError, WorkerTimeout, reason_of, serve

NAME = "graphs"
OURS = ("GraphManager", "GraphManager, grads by autograd")
NO_TIME = "--budget-s was spent"
SAME = ("device", "torch", "cuda", "triton", "driver", "commit")  # of runs that may be merged
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # Hopper's default; torch asks for it to be said


def rows_of(
    size: str, name: str, worker: Worker | Local, args: argparse.Namespace, until: float
) -> Iterator[Row]:
    counts = args.layers or SIZES[size][-1]
    for count in counts:
        row: Row = {"size": size, "layers": count, "provider": name}
        left = until - time.monotonic()
        most = args.compile_s if compiles(name) else args.timeout_s
        try:
            if left < 1:
                raise WorkerError(f"not run: {NO_TIME}")
            options = {"count": count, "most": max(counts), "repetitions": args.repetitions}
            row |= worker.ask("measure", min(left, most), size=size, **options)
        except WorkerError as error:
            cut = isinstance(error, WorkerTimeout) and left < most
            reason = f"not finished: {NO_TIME}" if cut else str(error)
            row |= {"check": f"raised: {reason}", **{column: "" for column in COLUMNS}}
        yield row
    with contextlib.suppress(WorkerError):
        worker.ask("release", 60)


def compiles(name: str) -> bool:
    return "compile" in name


def start(name: str, args: argparse.Namespace, device: torch.device) -> Worker | Local:
    """A process that imports while others do; on a CPU, this one."""
    if device.type == "cpu":
        worker: Worker | Local = Local(handlers(name, device))
    else:
        command = [sys.executable, __file__, "--worker", name, "--device", args.device]
        folder = args.output or Path(tempfile.gettempdir(), "bench_graphs")
        worker = Worker(command, folder / "logs" / f"{name.replace(' ', '_')}.log", VARIABLES)
    worker.send("load")
    return worker


def bench(args: argparse.Namespace, device: torch.device) -> list[Row]:
    """One process after the other has the device; what compiles comes last."""
    until = time.monotonic() + args.budget_s
    workers = {name: start(name, args, device) for name in args.providers}
    for worker in workers.values():
        with contextlib.suppress(WorkerError):  # its rows will say so
            worker.receive(max(1.0, until - time.monotonic()))
    rows: list[Row] = []
    jobs = [(size, name) for size in args.sizes for name in workers]
    for size, name in sorted(jobs, key=lambda job: compiles(job[1])):
        began = time.monotonic()
        rows += rows_of(size, name, workers[name], args, until)
        print(f"{size}, {name}: {time.monotonic() - began:.1f} s", flush=True)
    for worker in workers.values():
        worker.close()
    return in_order(rows)


def in_order(rows: list[Row]) -> list[Row]:
    """By size, layers, provider; with the ratios to GraphManager."""
    by_ms = {(r["size"], r["layers"], r["provider"]): r["ms"] for r in rows}
    for row in rows:
        own = by_ms.get((row["size"], row["layers"], "GraphManager"), "")
        row["÷ GraphManager"] = ratio(row["ms"], own)
    size, place = [*SIZES].index, [*PROVIDERS].index
    return sorted(
        rows, key=lambda r: (size(str(r["size"])), int(str(r["layers"])), place(str(r["provider"])))
    )


def merged(folders: list[Path]) -> tuple[list[Row], dict[str, str]]:
    """The rows that earlier runs wrote to these folders, and what those ran on.

    Raises:
        ValueError: they did not run on the same, or have a row twice.
    """
    rows: list[Row] = []
    facts: dict[str, str] = {}
    for folder in folders:
        with (folder / f"{NAME}.csv").open(newline="") as file:
            for found in csv.DictReader(file):
                names = list(found)
                own = names[names.index("÷ GraphManager") + 1 :]
                here = {name: found.pop(name) for name in own}
                facts = facts or here
                for name in SAME:
                    if here[name] != facts[name]:
                        raise ValueError(
                            f"{folder}: {name} is {here[name]!r}, the others' {facts[name]!r}"
                        )
                rows.append({name: _number(value) for name, value in found.items()})
    keys = [(r["size"], r["layers"], r["provider"]) for r in rows]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{twice[0]} is in more than one of {[str(f) for f in folders]}")
    return in_order(rows), facts


def _number(text: str) -> object:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def conclude(rows: list[Row], facts: dict[str, str], output: Path | None) -> int:
    """`finish`; 1 also where ours raised, for another reason than want of time."""
    code = finish(NAME, rows, facts, output)
    for row in rows:
        check = str(row["check"])
        if row["provider"] in OURS and check.startswith("raised: ") and NO_TIME not in check:
            print(f"{row['size']}, {row['layers']} layers, {row['provider']} {check}")
            code = 1
    return code


def handlers(name: str, device: torch.device) -> dict[str, Callable[..., Any]]:
    measurer = Measurer(name, device)
    return {"load": measurer.load, "measure": measurer.measure, "release": measurer.release}


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "medium", "large"])
    options.add_argument("--layers", nargs="+", type=int, help="default: 4 16 32, large only 4")
    options.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    options.add_argument("--quick", action="store_true", help="3 repetitions, in --budget-s 230")
    options.add_argument("--budget-s", type=float, help="seconds; what is left then is not run")
    options.add_argument("--timeout-s", type=float, default=40.0, help="for one row")
    options.add_argument(
        "--compile-s", type=float, help="for a row of torch.compile's; default 60 or 240"
    )
    options.add_argument("--merge", nargs="+", type=Path, metavar="DIR", help="measure nothing")
    options.add_argument("--worker", choices=PROVIDERS, help=argparse.SUPPRESS)
    args, device = arguments(options, on_gpu=15)
    if args.worker:
        serve(handlers(args.worker, device))
        return 0
    if args.merge:
        return conclude(*merged(args.merge), args.output)
    if device.type != "cuda":
        options.error("CUDA graphs need a CUDA device")
    args.repetitions = 3 if args.quick else args.repetitions
    args.budget_s = args.budget_s or (230.0 if args.quick else 900.0)
    args.compile_s = args.compile_s or (60.0 if args.quick else 240.0)
    rows = bench(args, device)
    facts = environment(device)
    try:
        facts["a pair of Functions, CPU µs"] = f"{function_pair_us(device):.1f}"
    except Exception as error:
        facts["a pair of Functions, CPU µs"] = reason_of(error)
    return conclude(rows, facts, args.output)


if __name__ == "__main__":
    raise SystemExit(main())
