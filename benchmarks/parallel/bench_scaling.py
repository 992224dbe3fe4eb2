# SPDX-License-Identifier: Apache-2.0
"""One model over several GPUs in each way that the package knows, beside what each GPU does alone in the same run.

    torchrun --nproc-per-node 2 benchmarks/parallel/bench_scaling.py --output DIR [--model 1b 70b --layers 8] [--ways …]
    PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 torchrun --nproc-per-node 8 benchmarks/parallel/bench_scaling.py \\
        --output DIR --model 70b --rows 8 --ways dp sharded "tp 2" "tp 4 x cp 2" "cp 8"

The variable leaves large blocks of memory whole, for all of 70B's layers, which fill a GPU.

peers/models.py makes the models: Llama-2-70B at 8192 tokens, Llama-3.1-8B at 4096, Llama-3.2-1B at 1024. R = 16 on
q, k, v, o. Ways:

    alone            each GPU has the whole model and rows of its own
    dp               alone, and the adapters' gradients averaged over all GPUs
    sharded          dp over one base, of which each GPU keeps a part
    tp N             N GPUs hold each layer together, and split the rows between layers
    cp N             N GPUs share each row, with some of its tokens each
    tp N x cp M      both, for N · M GPUs; "sharded x cp M" shares rows over one base of all GPUs
    DTensor + PEFT   a peer of tp: bf16 layers of transformers and PEFT, cut by torch's DTensor
    Transformer Engine           a peer of tp: te.TransformerLayer in FP8, rows split between layers, LoRA in torch ops
    Transformer Engine, overlap  the same with TE's user buffers, which exchange rows beside products

Without a number, tp or cp takes all GPUs. The GPUs that a way leaves are replicas: they train on rows of their own, and
average gradients. What layers keep for backward is the fastest that fits. That fills the GPU, where large blocks of
memory must not be split: hence the variable. Layers are replayed as graphs, but on a CPU.
Variants follow a comma: "eager" replays nothing, "in turn" has no exchange of rows beside a product, "not fused" has
the layers of transformers, without graphs, and "frozen" has no adapters but for one projection of the first layer.

A step trains on `--rows` rows of all GPUs together, by default one of each replica. A replica takes its rows one after
the other and updates once. Warm-up steps have one row of each replica.

    graphs           "layer" if each layer is replayed
    rows             of a step
    tokens/s         of all GPUs together, by the slowest one; also of one GPU
    ÷ best           of the best way of this table for the model
    ÷ alone          of n times what one GPU does alone, in its best form
    ÷ eager          of n times what one GPU does alone without graphs
    graphs on ÷ off  of what the same way does without graphs
    predicted        tokens/s by `lorakernels plan`, and GiB; not of eager layers, nor of rows exchanged in turn
    p99 ÷ p50        of a step on rank 0; below 100 steps the longest stands for p99
    J/step           of rank 0's GPU; "all" is the sum over the GPUs that train, from which tokens/J is
    peak GiB         of tensors on rank 0 after loading, shards of the base included
    load s           until the model is ready; then the first step with the warm-up, and the timed steps
    check            "ok" if the loss of the first row is within 2 % of the one alone, or of dp's, and all ranks end
                     with the same adapters; what cannot run, or has no memory, says why
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from lorakernels.graphs import CaptureError
from torch import Tensor

from benchmarks.lib.energy import joules, shown
from benchmarks.lib.layouts import Layout, Way, mesh_of
from benchmarks.lib.ranks import ROWS, largest, start_ranks, step_seconds, sum_of
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio, write_csv
from benchmarks.lib.timing import synchronize
from benchmarks.peers.base import Unavailable
from benchmarks.peers.models import SPECS, Spec, token_rows
from benchmarks.peers.te import te_first_or_hidden
from benchmarks.peers.te_tensor import TeTensor
from benchmarks.peers.tensor import DTensorPeft
from benchmarks.peers.training import Training

LOSS_TOLERANCE = (
    0.02  # of the first step: cp's scales are a rank's own there, and sums have another order
)
TE = "Transformer Engine"
PEERS: dict[str, Callable[..., Training]] = {
    "DTensor + PEFT": DTensorPeft,
    TE: TeTensor,
    f"{TE}, overlap": partial(TeTensor, overlap=True),
}
WAYS = (
    "alone, eager",
    "alone",
    "alone, frozen",
    "dp",
    "sharded",
    "tp",
    "tp, in turn",
    "tp, eager",
    "tp, not fused",
    "tp, frozen",
    "DTensor + PEFT",
    TE,
    "cp",
    "cp, eager",
)
REFUSALS = (ValueError, NotImplementedError, Unavailable, CaptureError, torch.OutOfMemoryError)
ANSWER = timedelta(seconds=120)  # after which a rank whose others do not answer gives up
_T = TypeVar("_T")


class Refused(Exception):
    """A way cannot run on one of the ranks: all know, and the message says why."""


def on_all(work: Callable[[], _T], answers: Any) -> _T:
    """Collective over the group `answers`: what `work` returns, or Refused on all ranks if one cannot do it.

    All ranks have equal memory, and so run out of it alike. If others wait for this one inside `work`, it hears nothing
    of them. It then raises after the group's time, and the run ends with the rows that are written.
    """
    result, said = None, ""
    try:
        result = work()
    except REFUSALS as error:
        said = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
    found = [said] * dist.get_world_size()
    dist.all_gather_object(found, said, group=answers)
    for rank, text in enumerate(found):
        if text:
            raise Refused(text if all(found) else f"rank {rank}: {text}")
    return result  # type: ignore[return-value]


class Peer:
    """One of PEERS, with one replica, which takes one row."""

    def __init__(self, name: str, spec: Spec, device: torch.device) -> None:
        ranks = mesh_of(device.type, (dist.get_world_size(),), ("ranks",))
        self.name, self.spec = name, spec
        self.training = PEERS[name](spec, "qkvo", device, ranks)

    def step(self, ids: Tensor) -> Tensor:
        if len(ids) > 1:
            raise NotImplementedError(f"{self.name} takes one row a step, found {len(ids)}")
        return self.training.step(ids[0])

    def close(self) -> None:
        self.training.close()


class Bench:
    """What all rows are measured with.

    Attributes:
        setup: the most seconds that a way of this model took before it was timed.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, answers: Any) -> None:
        self.args, self.device, self._answers = args, device, answers
        self._end, self.setup = time.perf_counter() + args.budget_s, 0.0

    def left(self) -> float:
        """Collective: seconds of the budget, on the rank that has the least."""
        return -largest(time.perf_counter() - self._end, self.device)

    def measure(self, name: str, spec: Spec) -> Row:
        """Collective: one row. "check" says what a way refuses, or has no memory or time for."""
        row: Row = {"model": spec.name, "row": f"{spec.batch} x {spec.length}", "way": name}
        row["ranks"] = dist.get_world_size()
        if (left := self.left()) < self.setup:
            return {**row, "check": f"not run: {max(left, 0.0):.0f} s of the budget are left"}
        torch.manual_seed(0)
        training: Layout | Peer | None = None
        began = time.perf_counter()
        try:
            training = on_all(lambda: self._load(name, spec), self._answers)
            row["load s"] = round(time.perf_counter() - began, 1)
            row |= on_all(lambda: self._timed(name, training, began), self._answers)
        except Refused as refused:
            row["check"] = f"not run: {refused}"
        synchronize(self.device)
        dist.barrier()  # others may read this rank's shards until here
        if training is not None:
            training.close()
        return row

    def _load(self, name: str, spec: Spec) -> Layout | Peer:
        if name in PEERS:
            return Peer(name, spec, self.device)
        return Layout(Way.of(name, dist.get_world_size()), spec, self.device)

    def _timed(self, name: str, training: Any, began: float) -> Row:
        """Collective: warm up, capture and time. `began`: when loading did, by time.perf_counter."""
        device, spec = self.device, training.spec
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        replica, replicas = replica_of(name, training)
        each = (self.args.rows or replicas) // replicas
        text = token_rows(spec.length, ROWS * spec.batch).view(ROWS, spec.batch, spec.length)
        text, loaded = text.to(device), time.perf_counter()

        def step(number: int, rows: int) -> Tensor:
            start = (number * replicas + replica) * rows
            ids = torch.stack([text[i % ROWS] for i in range(start, start + rows)])
            found: Tensor = training.step(ids)
            return found

        first, one = float(step(0, 1)), 0.0
        for number in range(self.args.warm_up):
            synchronize(device)
            one = time.perf_counter()
            step(1 + number, 1)
            synchronize(device)
            one = time.perf_counter() - one
        ready = time.perf_counter()
        self.setup = max(self.setup, largest(ready - began, device))
        fit = int(self.left() / max(largest(one, device) * each, 1e-6))
        often = max(1, min(self.args.repetitions, fit))
        energy = joules(device)
        samples = step_seconds(lambda number: step(number, each), often, device)
        energy = (joules(device) - energy) / often
        tokens = each * replicas * spec.batch * spec.length
        rate = tokens * often / largest(sum(samples), device)
        of_all = sum_of(energy, device)
        found: Row = {
            "check": "",
            "graphs": getattr(training, "graphs", None) or "none",
            "rows": each * replicas,
            "tokens/s": round(rate, 1),
            "tokens/s a GPU": round(rate / dist.get_world_size(), 1),
            "p50 ms": round(statistics.median(samples) * 1e3, 2),
            "p99 ÷ p50": ratio(percentile(samples, 0.99), statistics.median(samples)),
            "J/step": shown(energy, 1),
            "J/step, all": shown(of_all, 1),
            "tokens/J": shown(tokens / of_all, 3),
            "first loss": round(first, 4),
            "warm-up s": round(ready - loaded, 1),
            "timed s": round(sum(samples), 1),
        }
        outside = training.outside() if isinstance(training, Layout) else 0
        peak = torch.cuda.max_memory_allocated(device) + outside if on_gpu else 0
        found["peak GiB"] = round(peak / 2**30, 2)
        if isinstance(training, Layout):
            found |= of_layout(training)
        return found


def replica_of(name: str, training: Any) -> tuple[int, int]:
    """(this rank's replica, how many there are)."""
    if name in PEERS:
        return 0, 1
    return training.mesh["dp"].get_local_rank(), training.way.replicas


def of_layout(layout: Layout) -> Row:
    """Collective: what layers keep, what the plan says of it, and whether ranks have drifted apart."""
    found: Row = {"note": layout.described}
    plan = layout.predicted()
    if plan is not None:
        found["predicted"] = round(plan.rate * dist.get_world_size() / plan.gpus, 1)
        found["predicted GiB"] = round(plan.bytes.peak / 2**30, 2)
    try:
        layout.check()
    except ValueError as error:
        found["check"] = f"WRONG: {error}"
    return found


def percentile(samples: list[float], share: float) -> float:
    """The smallest of `samples` that at least this `share` of them does not exceed."""
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


COLUMNS = (
    "model",
    "row",
    "way",
    "graphs",
    "ranks",
    "rows",
    "check",
    "tokens/s",
    "tokens/s a GPU",
    "÷ best",
    "÷ alone",
    "÷ eager",
    "graphs on ÷ off",
    "predicted",
    "p50 ms",
    "p99 ÷ p50",
    "J/step",
    "J/step, all",
    "tokens/J",
    "peak GiB",
    "predicted GiB",
    "load s",
    "warm-up s",
    "timed s",
    "first loss",
    "note",
)


def compared(rows: list[Row]) -> list[Row]:
    """The rows with their ratios and checks, and a column for whatever a row lacks."""
    by_way = {(row.get("model"), row["way"]): row for row in rows}
    best: dict[object, float] = {}
    for row in rows:
        if isinstance(rate := row.get("tokens/s"), float):
            best[row.get("model")] = max(rate, best.get(row.get("model"), 0.0))
    found = []
    for row in rows:
        model, way = row.get("model"), row["way"]
        alone, eager, off = (
            by_way.get((model, other), {}) for other in ("alone", "alone, eager", f"{way}, eager")
        )
        full = {**dict.fromkeys(COLUMNS, ""), **row}
        full["÷ best"] = ratio(full["tokens/s"], best.get(model))
        full["÷ alone"] = ratio(full["tokens/s"], alone.get("tokens/s"))
        full["÷ eager"] = ratio(full["tokens/s"], eager.get("tokens/s"))
        if row.get("graphs") == "layer":
            full["graphs on ÷ off"] = ratio(full["tokens/s"], off.get("tokens/s"))
        others = (by_way.get((model, way), {}) for way in ("alone, eager", "alone", "dp"))
        full["check"] = full["check"] or checked(row, [*others])
        found.append(full)
    return found


def checked(row: Row, others: list[Row]) -> str:
    """Whether a row's first loss is that of the first of `others` that has one; "" where none has."""
    loss = row.get("first loss")
    reference = next((found for other in others if (found := other.get("first loss"))), None)
    if not isinstance(loss, float):
        return ""
    if not isinstance(reference, float):
        return "" if math.isfinite(loss) else f"WRONG: loss {loss}"
    near = abs(loss - reference) <= LOSS_TOLERANCE * abs(reference)
    return "ok" if near else f"WRONG: loss {loss}, expected {reference}"


def specs_of(args: argparse.Namespace, device: torch.device) -> list[Spec]:
    """The models of `args`.

    Raises:
        ValueError: there are neither one number of layers nor one for each model.
    """
    names = args.model or ["8b" if device.type == "cuda" else "tiny"]
    layers = args.layers or [None]
    if len(layers) not in (1, len(names)):
        raise ValueError(
            f"--layers must be one number or one for each of {names}, found {args.layers}"
        )
    found = []
    for name, many in zip(names, layers * (len(names) // len(layers)), strict=True):
        spec = replace(SPECS[name], length=args.length or SPECS[name].length)
        found.append(spec.cut(many) if many else spec)
    return found


def check_ways(args: argparse.Namespace, ranks: int) -> None:
    """Raise ValueError if a way is none, or the ranks or the rows of a step do not divide."""
    for name in args.ways:
        replicas = 1 if name in PEERS else Way.of(name, ranks).replicas
        if args.rows and args.rows % replicas:
            raise ValueError(
                f"--rows must be a multiple of the {replicas} replicas of {name!r}, found {args.rows}"
            )


def parsed() -> tuple[argparse.Namespace, torch.device]:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument(
        "--model", nargs="+", choices=list(SPECS), help='default: "8b", on a CPU "tiny"'
    )
    options.add_argument(
        "--layers", type=int, nargs="+", help="of all models, or of each one; 0 and default: all"
    )
    options.add_argument("--length", type=int, help="tokens of a row; default: the model's")
    options.add_argument("--ways", nargs="+", metavar="WAY", default=list(WAYS))
    options.add_argument("--rows", type=int, help="of a step; default: one of each replica")
    options.add_argument("--warm-up", type=int, default=2, help="steps after the first; at least 1")
    options.add_argument(
        "--budget-s",
        type=float,
        default=540.0,
        help="a way that would not be ready in time is not run, and steps are as many as fit",
    )
    args, device = arguments(options, on_gpu=8)
    if args.warm_up < 1:
        options.error(f"--warm-up must be at least 1, found {args.warm_up}")
    try:
        check_ways(args, int(os.environ.get("WORLD_SIZE", "1")))
        args.specs = specs_of(args, device)
    except ValueError as error:
        options.error(str(error))
    return args, device


def main() -> int:
    args, device = parsed()
    with te_first_or_hidden(any(way.startswith(TE) for way in args.ways)):
        return bench_all(args, device)


def bench_all(args: argparse.Namespace, device: torch.device) -> int:
    """Every way of every model, and the exit code."""
    began = time.perf_counter()
    device = start_ranks(device)
    args.budget_s -= time.perf_counter() - began
    bench = Bench(args, device, dist.new_group(backend="gloo", timeout=ANSWER))
    first, facts = dist.get_rank() == 0, environment(device)
    rows: list[Row] = []
    try:
        for spec, way in product(args.specs, args.ways):
            if rows and rows[-1]["model"] != spec.name:
                bench.setup = 0.0
            rows.append(bench.measure(way, spec))
            if first:
                print(rows[-1], flush=True)
            if first and args.output:  # a later way may end the run
                write_csv(args.output / "scaling.csv", compared(rows), facts)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        dist.barrier()
        return finish("scaling", compared(rows), facts, args.output) if first else 0
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
