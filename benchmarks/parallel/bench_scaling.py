# SPDX-License-Identifier: Apache-2.0
"""One model over several GPUs in each way that the package knows, beside what each GPU does alone in the same run.

    torchrun --nproc-per-node 2 benchmarks/parallel/bench_scaling.py --output DIR [--model 1b 70b --layers 8] [--ways …]

peers/models.py makes the models: Llama-2-70B at 8192 tokens, Llama-3.1-8B at 4096, Llama-3.2-1B at 1024. R = 16 on
q, k, v, o. A step trains on one row. Ways:

    alone            each GPU has the whole model and a row of its own: layers replayed, what layers keep as it fits
    alone, eager     the same without graphs, which is what tp and cp can be compared with
    dp               alone, and the adapters' gradients averaged over all GPUs
    sharded          dp over one base, of which each GPU keeps a part
    tp               one row for all GPUs, which hold each layer together; rows split between layers, layers replayed
    tp, overlapped   the same with exchanges of rows beside products
    tp, eager        tp without graphs
    tp, not fused    the same over the layers of transformers, without graphs
    alone, frozen    alone without adapters, but for one projection of the first layer
    tp, frozen       tp without adapters, likewise
    DTensor + PEFT   the peer of tp: bf16 layers of transformers and PEFT, cut by torch's DTensor
    cp               one row for all GPUs, each with some of its tokens; layers replayed
    cp, eager        the same without graphs

Columns:

    graphs           "layer" if each layer is replayed
    tokens/s         of all GPUs together, by the slowest one
    ÷ alone          of n times what one GPU does alone, in its best form
    ÷ eager          of n times what one GPU does alone without graphs
    graphs on ÷ off  of what the same way does without graphs
    p99 ÷ p50        of a step on rank 0; below 100 steps the longest stands for p99
    peak GiB         of tensors, on rank 0
    check            "ok" if the first loss is within 2 % of the one alone; what cannot run says why
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.lib.energy import joules, shown
from benchmarks.lib.ranks import ROWS, average_gradients, largest, start_ranks, step_seconds
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio
from benchmarks.lib.timing import synchronize
from benchmarks.peers.models import SPECS, Spec, token_rows
from benchmarks.peers.tensor import DTensorPeft
from benchmarks.peers.training import Ours, Training
from lorakernels.parallel import context_parallel, parallelize

LOSS_TOLERANCE = (
    0.02  # tp and cp draw other masks for a row than one GPU does, and sum in another order
)
PEER = "DTensor + PEFT"
# for all GPUs together
ONE_ROW = (
    "tp",
    "tp, overlapped",
    "tp, eager",
    "tp, not fused",
    "tp, frozen",
    PEER,
    "cp",
    "cp, eager",
)
WAYS = ("alone, eager", "alone", "alone, frozen", "dp", "sharded", *ONE_ROW)


class Split(Ours):
    """The model over all ranks, which train on one row: by its layers ("tp") or by the row's tokens ("cp")."""

    def __init__(self, way: str, mesh: Any, spec: Spec, device: torch.device) -> None:
        self.way, self.mesh = way, mesh
        graphed = way in ("tp", "tp, overlapped", "tp, frozen", "cp") and device.type == "cuda"
        save = None if "not fused" in way else "full"
        super().__init__(spec, adapted_by(way), device, "layer" if graphed else None, save)

    def build(self) -> Any:
        model = super().build()
        torch.manual_seed(0)  # all ranks draw equal masks
        if self.way.startswith("cp"):
            self.split: Any = context_parallel(model, self.mesh)
        else:
            overlap = self.way == "tp, overlapped" and self.device.type == "cuda"
            self.split = parallelize(model, self.mesh, vocabulary=True, overlap=overlap)
        return model

    def loss(self, ids: Tensor) -> Tensor:
        found: Tensor = self.split.loss(ids, input_ids=ids)
        return found

    def step(self, ids: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(ids)
        loss.backward()
        if self.way.startswith("cp"):
            self.split.reduce_gradients()
        self.optimizer.step()
        self.state.reduce_and_update()
        if self.graphs is None:
            self.rng.advance()
        else:
            self.manager.end_iteration()
        return loss.detach()


def adapted_by(way: str) -> str:
    return "one" if "frozen" in way else "qkvo"


def training_of(way: str, mesh: Any, spec: Spec, device: torch.device) -> Training:
    if way == PEER:
        return DTensorPeft(spec, "qkvo", device, mesh)
    if way in ONE_ROW:
        return Split(way, mesh, spec, device)
    on_gpu = device.type == "cuda"
    form: dict[str, Any] = {"save": "full"}
    if on_gpu and way != "alone, eager":
        form = {"graphs": "layer", "save": "fit"}
    base = {"mesh": mesh} if way == "sharded" else None
    training = Ours(spec, adapted_by(way), device, base=base, **form)
    if not way.startswith("alone"):
        training.optimizer.register_step_pre_hook(lambda *_: average_gradients(training.trained))
    return training


def measure(way: str, mesh: Any, spec: Spec, args: argparse.Namespace, device: torch.device) -> Row:
    """One row. What a way refuses, or has no memory for, is said in "check"; all ranks must see it alike."""
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    row: Row = {"model": spec.name, "row": f"{spec.batch} x {spec.length}", "way": way}
    try:
        training = training_of(way, mesh, spec, device)
    except (ValueError, NotImplementedError) as error:
        return {**row, "check": f"not run: {error}"}
    text = token_rows(spec.length, ROWS * spec.batch).view(ROWS, spec.batch, spec.length)
    batches = (text if way in ONE_ROW else text.roll(-mesh.get_local_rank(), 0)).to(device)
    first = float(training.step(batches[0]))
    for number in range(training.warmup_steps):
        training.step(batches[1 + number])
    synchronize(device)
    energy = joules(device)
    often = args.repetitions
    samples = step_seconds(lambda i: training.step(batches[i % ROWS]), often, device)
    energy = (joules(device) - energy) / len(samples)
    total = largest(sum(samples), device)
    rows = spec.batch * (1 if way in ONE_ROW else mesh.size())
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    found: Row = {
        **row,
        "check": "",
        "graphs": getattr(training, "graphs", None) or "none",
        "ranks": mesh.size(),
        "tokens/s": round(rows * spec.length * len(samples) / total, 1),
        "p50 ms": round(statistics.median(samples) * 1e3, 2),
        "p99 ÷ p50": ratio(percentile(samples, 0.99), statistics.median(samples)),
        "J/step": shown(energy, 1),
        "peak GiB": round(peak, 2),
        "first loss": round(first, 4),
        "note": training.note,
    }
    synchronize(device)
    dist.barrier()
    if isinstance(training, Ours):
        training.renew_graphs()
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
    "check",
    "tokens/s",
    "÷ alone",
    "÷ eager",
    "graphs on ÷ off",
    "p50 ms",
    "p99 ÷ p50",
    "J/step",
    "peak GiB",
    "first loss",
    "note",
)


def compared(rows: list[Row]) -> list[Row]:
    """The rows with their ratios and checks, and a column for whatever a row lacks."""
    by_way = {(row.get("model"), row["way"]): row for row in rows}
    found = []
    for row in rows:
        model, way = row.get("model"), row["way"]
        alone, eager, off = (
            by_way.get((model, other), {}) for other in ("alone", "alone, eager", f"{way}, eager")
        )
        full = {**dict.fromkeys(COLUMNS, ""), **row}
        full["÷ alone"] = ratio(full["tokens/s"], alone.get("tokens/s"))
        full["÷ eager"] = ratio(full["tokens/s"], eager.get("tokens/s"))
        if row.get("graphs") == "layer":
            full["graphs on ÷ off"] = ratio(full["tokens/s"], off.get("tokens/s"))
        loss, reference = (
            row.get("first loss"),
            eager.get("first loss") or alone.get("first loss"),
        )
        if isinstance(loss, float) and isinstance(reference, float):
            near = abs(loss - reference) <= LOSS_TOLERANCE * abs(reference)
            full["check"] = "ok" if near else f"WRONG: loss {loss}, alone {reference}"
        found.append(full)
    return found


def spec_of(name: str, args: argparse.Namespace) -> Spec:
    spec = SPECS[name]
    spec = replace(spec, length=args.length or spec.length)
    return spec.cut(args.layers) if args.layers else spec


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument(
        "--model", nargs="+", choices=list(SPECS), help='default: "8b", on a CPU "tiny"'
    )
    options.add_argument("--layers", type=int, help="of each model; default: all")
    options.add_argument("--length", type=int, help="tokens of a row; default: the model's")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options.add_argument(
        "--budget-s", type=float, default=540.0, help="what would begin later is not run"
    )
    args, device = arguments(options, on_gpu=8)
    began = time.perf_counter()
    device = start_ranks(device)
    names = args.model or ["8b" if device.type == "cuda" else "tiny"]
    axes = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
    rows: list[Row] = []
    try:
        for spec, way in ((spec_of(name, args), way) for name in names for way in args.ways):
            if largest(time.perf_counter() - began, device) > args.budget_s:
                break
            rows.append(measure(way, axes, spec, args, device))
            if dist.get_rank() == 0:
                print(rows[-1], flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if dist.get_rank():
            return 0
        return finish("scaling", compared(rows), environment(device), args.output)
    finally:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
