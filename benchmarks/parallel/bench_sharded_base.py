# SPDX-License-Identifier: Apache-2.0
"""A sharded FP8 base beside the whole one on every GPU: tokens per second a GPU, memory, and what a gather takes.

    PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 torchrun --nproc-per-node 2 \\
        benchmarks/parallel/bench_sharded_base.py --output DIR [--models 70b 8b] [--transports peer nccl] [--budget-s S]
    python benchmarks/parallel/bench_sharded_base.py --output DIR --models 70b --offload 0.27 --memory-gb 80
    torchrun --nproc-per-node 2 benchmarks/parallel/bench_sharded_base.py --output DIR --models 405b --offload 0.54
    torchrun --nproc-per-node 8 benchmarks/parallel/bench_sharded_base.py --output DIR --preset s003

peers/models.py makes the models: Llama-2-70B at 8192 tokens, Llama-3.1-8B and 405B at 4096. R = 16 on q, k, v, o.
`--batch`, `--length`, `--rank` and `--lora` say otherwise. A preset of PRESETS stands for several options, and those
given beside it count. Each rank trains on rows of its own, and the adapters' gradients are averaged over the ranks in
every row. The whole base runs first, in its fastest form with one layout of the weights. Then the same model is sharded
and runs in that form.

    LoRA, optimizer      rank and modules; "sharded": AdamW's state is split over the ranks (`--shard-optimizer`)
    tokens/s a GPU       of the steps together, by the slowest rank
    ÷ whole              of the whole base's
    p50, p99 ms          of one step, on rank 0
    J/step               the energy of rank 0's GPU in these steps, by NVML's counter
    peak GiB             of tensors, the shards included
    no copies ms         of one step that brings no weights, so that layers multiply by what lies in the slots
    gather ms, GB/s      of one layer's block, received from the other ranks, with nothing beside it
    copy ms, GB/s        of one layer's part on the host: what the rank copies, and gathering it
    load s, warm-up s    of making the model, with its base where it stays, and of the steps before those that are timed
    predicted …          by `lorakernels plan` for what layers keep here, printed before the first step
    ÷ measured           the predicted tokens/s over those measured; "GiB ÷ measured" likewise
    check                "ok" if the loss without gradients is the whole base's, bit for bit; else WRONG

With `--embeddings` the sharded base splits embedding and head as well. Without torchrun there is one rank. With
`--offload F` there is one row a model: loaded straight with that part of the base in pinned memory of the host, or with
0 sharded alone. The whole base need not fit then, so "check" only says that the losses are finite. With
`--offload-activations` what layers keep may wait there, too, within what is free.
`--memory-gb G` leaves that much of the GPU to torch, as a smaller GPU would: graphs and CUDA itself come on top.
`--host-memory-gb G` may be pinned on the host, where its control groups set no limit and its memory grows with use.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.lib.energy import joules, shown
from benchmarks.lib.predictions import NONE, Prediction, machine_of, placement_of, prediction
from benchmarks.lib.ranks import ROWS, average_gradients, start_ranks, step_seconds, time_left
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio, write_csv
from benchmarks.lib.timing import synchronize
from benchmarks.peers.models import ADAPTED, SPECS, Spec, token_rows
from benchmarks.peers.training import SPARE, Ours, OursSharded
from lorakernels.parallel import Offload, ShardedBase, shard_base
from lorakernels.parallel.base.pinned import Progress
from lorakernels.parallel.base.stores import Store
from lorakernels.planner.machine import MACHINES

Options = dict[str, Any]
# The fastest forms with one layout of the weights, of bench_end_to_end.py
FORMS: dict[str, Options] = {
    "405b": {"graphs": "layer", "save": "fit"},
    "70b": {"graphs": "layer", "save": "fit"},
    "8b": {"graphs": "iteration", "save": "full"},
    "1b": {"graphs": "iteration", "save": "full"},
    "tiny": {},
}
# 405B's steps take seconds: their kernels hide the host's time without graphs, and few of them tell its rate
BIG: Options = {
    "models": ["405b"],
    "offload": 0.0,
    "graphs": "eager",
    "repetitions": 2,
    "warm_up": 1,
    "bare_steps": 0,
}
PRESETS: dict[str, Options] = {
    "405b": {**BIG, "length": 8192},
    # the form in which Snowflake's engineers trained it on eight H100, in 2024
    "s003": {**BIG, "batch": 4, "length": 1024, "rank": 64, "lora": "all", "shard_optimizer": True},
}  # fmt: skip
ENDS = ", embedding and head too"
NO_GATHER: Row = {"gather ms": "", "GB/s": "", "copy ms": "", "copy GB/s": "", "why": ""}


def spec_of(model: str, args: argparse.Namespace) -> Spec:
    """The model with the tokens, adapters and layers that were asked for."""
    asked = {"length": args.length, "batch": args.batch, "rank": args.rank}
    spec = replace(SPECS[model], **{name: value for name, value in asked.items() if value})
    return spec.cut(args.layers) if args.layers else spec


def form_of(model: str, args: argparse.Namespace) -> Options:
    """How the model runs on a GPU."""
    form = {**FORMS[model]}
    if args.graphs:
        form["graphs"] = None if args.graphs == "eager" else args.graphs
    if args.save:
        form["save"] = args.save
    elif args.offload_activations:
        form["save"] = "fit, offload"
    return {**form, "spare": args.spare} if form else form


class Bench:
    """One model, on this rank."""

    def __init__(
        self,
        model: str,
        device: torch.device,
        args: argparse.Namespace,
        base: Options | None = None,
    ) -> None:
        self.device, self.args, self.spec = device, args, spec_of(model, args)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        form = form_of(model, args) if device.type == "cuda" else {}
        self.form = form.get("graphs") or "eager"
        torch.manual_seed(0)
        kind = OursSharded if args.shard_optimizer else Ours
        began = time.perf_counter()
        self.training = kind(self.spec, args.lora, device, base=base, **form)
        synchronize(device)
        self.load_s = time.perf_counter() - began
        self.say(f"loaded and fused in {self.load_s:.1f} s")
        if not args.shard_optimizer:
            self.training.optimizer.register_step_pre_hook(self._average)
        text = token_rows(self.spec.length, ROWS * self.spec.batch)
        batches = text.view(ROWS, self.spec.batch, self.spec.length).roll(-self.rank, 0)
        self.batches = batches.pin_memory() if device.type == "cuda" else batches
        self.whole: Row = {}

    def _average(self, *_: Any) -> None:
        """The adapters' gradients, over all ranks."""
        average_gradients(self.training.trained)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"{self.spec.name}: {text}", flush=True)

    def step(self, number: int) -> Tensor:
        ids = self.batches[number % ROWS].to(self.device, non_blocking=True)
        self.loss_of_step = self.training.step(ids)
        return self.loss_of_step

    @torch.no_grad()
    def loss(self) -> float:
        """In eval mode, so that nothing changes."""
        self.training.model.eval()
        found = float(self.training.loss(self.batches[0].to(self.device)))
        self.training.model.train()
        return found

    def row(self, what: str, base: ShardedBase | None, check: str | None = None) -> Row:
        """Predict, warm up, capture and time. Without a `check`, whether the losses are finite."""
        predicted = self._predicted(base)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        began, often = time.perf_counter(), self.args.warm_up or self.training.warmup_steps + 1
        losses = [float(self.step(number)) for number in range(often)]
        warm_up = time.perf_counter() - began
        self.say(f"{often} steps before the timed ones in {warm_up:.1f} s, losses {losses}")
        energy = joules(self.device)
        samples = step_seconds(self.step, self.args.repetitions, self.device)
        synchronize(self.device)
        energy = (joules(self.device) - energy) / len(samples)
        if check is None:
            losses.append(float(self.loss_of_step))
            check = "finite" if all(map(math.isfinite, losses)) else f"WRONG: losses {losses}"
        total = torch.tensor(sum(samples), device=self.device)
        dist.all_reduce(total, dist.ReduceOp.MAX)
        tokens = self.spec.batch * self.spec.length * len(samples)
        rate = round(tokens / float(total), 1)
        p50, p99, peak = statistics.median(samples), max(samples), self._peak(base)
        found: Row = {
            "model": self.spec.name,
            "tokens": f"{self.spec.batch} x {self.spec.length}",
            "LoRA": f"{self.spec.rank}, {self.args.lora}",
            "base": what,
            "optimizer": "sharded" if self.args.shard_optimizer else "whole",
            "graphs": self.form,
            "ranks": self.ranks,
            "check": check,
            "tokens/s a GPU": rate,
            "÷ whole": ratio(rate, self.whole.get("tokens/s a GPU")),
            "steps": len(samples),
            "p50 ms": round(p50 * 1e3, 2),
            "p99 ms": round(p99 * 1e3, 2),
            "J/step": shown(energy, 1),
            "peak GiB": peak,
            **(NONE if predicted is None else predicted.columns(rate, peak)),
            "load s": round(self.load_s, 1),
            "warm-up s": round(warm_up, 1),
            "no copies ms": "" if base is None else self._without_copies(base),
            **(NO_GATHER if base is None else gather_columns(base, self.device)),
            "note": self.training.note,
        }
        self.say(f"{what}: {check}, {rate} tokens/s a GPU, {peak} GiB, {sum(samples):.1f} s")
        return found

    def _predicted(self, base: ShardedBase | None) -> Prediction | None:
        """Printed; None for a GPU of which the plan has no rates."""
        machine = machine_of(self.args.machine, self.device)
        if machine is None:
            return None
        placement = placement_of(base, self.ranks if self.args.shard_optimizer else 1)
        found = prediction(self.training, self.ranks, placement, machine)
        rate, together = found.rate, found.rate * self.ranks
        self.say(
            f"predicted {rate:.1f} tokens/s a GPU, {together:.0f} together, {found.gib:.1f} GiB"
        )
        return found

    def _without_copies(self, base: ShardedBase) -> object:
        if not self.args.bare_steps:
            return ""
        for store in base.stores:
            store.slots.ensure = _nothing  # type: ignore[method-assign]
        seconds = statistics.median(step_seconds(self.step, self.args.bare_steps, self.device))
        for store in base.stores:
            del store.slots.ensure
        return round(seconds * 1e3, 2)

    def _peak(self, base: ShardedBase | None) -> object:
        if self.device.type != "cuda":
            return ""
        found = torch.cuda.max_memory_allocated(self.device)
        if base is not None and base.transport == "peer":  # not of torch's allocator
            found += base.shards.memory.numel()
            if base.vocabulary is not None:
                found += base.vocabulary.shards.memory.numel()
        return round(found / 2**30, 2)


def _nothing(layer: int, ahead: int) -> None:
    """In place of `Slots.ensure`."""


def gather_columns(base: ShardedBase, device: torch.device) -> Row:
    """Of gathers one after the other, with nothing beside them; of the first store, and of the host's."""
    took, rate = gather_times(base.stores[0], device)
    found: Row = {**NO_GATHER, "gather ms": took, "GB/s": rate, "why": base.reason}
    if base.stores[-1].transport.name == "host":
        found["copy ms"], found["copy GB/s"] = gather_times(base.stores[-1], device)
    return found


def gather_times(store: Store, device: torch.device) -> tuple[float, float]:
    """(ms of a layer, GB/s): of what this rank receives, from the other ranks or by its own bus."""
    slots, blocks, n = store.slots, store.shards.blocks, store.shards.ranks
    layers = range(min(len(blocks), 16))
    slots.forget()
    slots.ensure(0, 0)
    synchronize(device)
    began, before = time.perf_counter(), slots.gathers
    for layer in layers[1:]:
        slots.ensure(layer, 0)
    synchronize(device)
    took = (time.perf_counter() - began) / max(1, slots.gathers - before)
    received = blocks[0].size * (1 / n if store.transport.name == "host" else (n - 1) / n)
    return round(took * 1e3, 3), round(received / took / 1e9, 1)


def bench_offload(
    model: str, device: torch.device, args: argparse.Namespace
) -> tuple[list[Row], Bench]:
    """A part of the base in the host's memory, from the loading on. Returns the row and what it is of."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp_shard",))
    given = args.host_memory_gb and int(args.host_memory_gb * 1e9)
    options: Options = {
        "offload": Offload(args.offload, given, pinning() if args.offload else None)
    }
    options["mesh"] = mesh["dp_shard"] if ranks > 1 else None
    options["embeddings"] = args.embeddings
    bench = Bench(model, device, args, options)
    base = bench.training.sharded
    what = f"offloaded, {args.offload}" if args.offload else f"sharded, {base.transport}"
    what += ENDS * args.embeddings
    row = bench.row(what + ", activations too" * args.offload_activations, base)
    if args.memory_gb:
        row["note"] = f"{row['note']}; {args.memory_gb:g} GB for torch"
    dist.barrier()
    bench.training.renew_graphs()
    return [row], bench


def pinning() -> Progress:
    """Prints on rank 0 how long pinning has taken, at each quarter."""
    began, shown = time.perf_counter(), 0

    def show(done: int, total: int) -> None:
        nonlocal shown
        if dist.get_rank() == 0 and 4 * done // total > shown:
            shown = 4 * done // total
            took = time.perf_counter() - began
            print(f"pinned {done / 1e9:.1f} of {total / 1e9:.1f} GB in {took:.1f} s", flush=True)

    return show


def bench_model(
    model: str, device: torch.device, args: argparse.Namespace, end: float
) -> Iterator[Row]:
    """The whole base, then the sharded one by each transport, until `end` of time.perf_counter."""
    transports: list[str] = args.transports
    more, ends = {"embeddings": args.embeddings}, ENDS * args.embeddings
    bench = Bench(model, device, args)
    mesh = init_device_mesh(device.type, (bench.ranks,), mesh_dim_names=("dp_shard",))
    bench.whole = whole = bench.row("whole", None, "ok")
    yield whole
    bench.training.renew_graphs()
    for transport in transports:
        if not time_left(end, device):
            break
        before = bench.loss()
        try:
            base = shard_base(bench.training.model, mesh["dp_shard"], transport=transport, **more)
        except (RuntimeError, ValueError) as error:  # on every rank, with the model as it was
            named = {"base": f"sharded, {transport}", "check": f"not run: {error}"}
            yield {**dict.fromkeys(whole, ""), "model": whole["model"], **named}
            continue
        if device.type == "cuda":
            torch.cuda.empty_cache()
        after = bench.loss()
        check = "ok" if after == before else f"WRONG: loss {after!r}, the whole base's {before!r}"
        yield bench.row(f"sharded, {base.transport}{ends}", base, check)
        synchronize(device)
        dist.barrier()
        bench.training.renew_graphs()  # their memory is needed, and they end before their communicators
        if transport != transports[-1]:
            base.unshard()
        del base


def asked() -> tuple[argparse.Namespace, torch.device]:
    """The command line's options, above those of its preset, and the device."""
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--models", nargs="+", choices=list(FORMS))
    options.add_argument("--transports", nargs="+", help='default: "auto"', default=["auto"])
    options.add_argument(
        "--budget-s", type=float, default=540.0, help="for all; what would begin later is not run"
    )
    options.add_argument("--layers", type=int, help="of each model; default: all")
    options.add_argument("--offload", type=float, help="fraction of the base; 0 shards alone")
    options.add_argument("--embeddings", action="store_true", help="split embedding and head, too")
    options.add_argument("--offload-activations", action="store_true", help="with --offload")
    options.add_argument("--spare", type=float, default=SPARE, help="of a GPU, to the allocator")
    options.add_argument("--memory-gb", type=float, help="of the GPU, that torch may take")
    options.add_argument("--host-memory-gb", type=float, help="of the host, that may be pinned")
    _add_forms(options)
    options.set_defaults(**PRESETS.get(options.parse_known_args()[0].preset, {}))
    args, device = arguments(options, on_gpu=8)
    if args.shard_optimizer and args.offload is None:
        options.error("--shard-optimizer needs --offload, which may be 0")
    return args, device


def main() -> int:
    args, device = asked()
    began = time.perf_counter()
    device = start_ranks(device)
    if args.memory_gb and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_gb * 1e9 / total), device)
    try:
        return run_models(args, device, began + args.budget_s)
    finally:
        dist.destroy_process_group()


def _add_forms(options: argparse.ArgumentParser) -> None:
    """What is trained, and in which form."""
    options.add_argument("--preset", choices=list(PRESETS), help="several of these options")
    options.add_argument("--batch", type=int, help="sequences a GPU; default: the model's")
    options.add_argument("--length", type=int, help="tokens of a sequence; default: the model's")
    options.add_argument("--rank", type=int, help="of the adapters; default: 16")
    options.add_argument("--lora", choices=list(ADAPTED), default="qkvo", help="on which modules")
    options.add_argument("--shard-optimizer", action="store_true", help="ShardedAdamW; --offload")
    options.add_argument("--graphs", choices=("layer", "iteration", "eager"))
    options.add_argument("--save", help="what layers keep: fuse's, or fit; default: the model's")
    options.add_argument("--warm-up", type=int, help="steps before the timed ones")
    options.add_argument("--bare-steps", type=int, default=2, help="without copies; 0 for none")
    options.add_argument("--machine", choices=list(MACHINES), help="of the predictions")


def run_models(args: argparse.Namespace, device: torch.device, end: float) -> int:
    """Collective: a row or more of each model, until `end` of time.perf_counter. Returns the exit code."""
    if args.shard_optimizer and dist.get_world_size() == 1:
        raise SystemExit("--shard-optimizer needs several ranks, found 1: start it by torchrun")
    models = args.models or (["70b", "8b"] if device.type == "cuda" else ["tiny"])
    rows: list[Row] = []
    for model in models:
        if not time_left(end, device):
            break
        if args.offload is not None:
            rows += bench_offload(model, device, args)[0]
        else:
            for row in bench_model(model, device, args, end):
                rows.append(row)
                if args.output and dist.get_rank() == 0:  # a later one may end the run
                    write_csv(args.output / "sharded_base.csv", rows, environment(device))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        dist.barrier()  # what a rank shared is free once no rank maps it
    if dist.get_rank():
        return 0
    return finish("sharded_base", rows, environment(device), args.output)


if __name__ == "__main__":
    sys.exit(main())
