# SPDX-License-Identifier: Apache-2.0
"""Rows too long for one GPU, over the ranks that keep one FP8 base together, beside what each GPU does alone.

    PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 torchrun --nproc-per-node 4 \\
        benchmarks/parallel/bench_context.py --output DIR [--model 70b] [--layers L] [--length 131072] [--ways …]

One model for all rows: Llama-2-70B of peers/models.py, R = 16 on q, k, v, o, fused, save="checkpoint", eager. Its base
is sharded over all ranks. Ways:

    alone            each GPU trains on a row of its own of 8,192 tokens (`--alone`); gradients stay apart
    alone, as long   the same with rows of length ÷ ranks: as many tokens as a GPU has of the long row
    cp               one row of `--length` tokens for all GPUs, one document
    cp, documents N  the same row packed with documents of N tokens

A long step of 70B takes about a minute. So all warm up with the first two layers, and "alone" once with all.
Rank 0 says when all is loaded and warmed up, and each step as it ends where steps take more than a second. What it says
begins with the seconds since the start. context.csv gets each way's row as it ends.
Such steps end early when `--budget-s` is over, and the row says how many there were.

    tokens/s         of all GPUs together, by the slowest one
    TFLOP/s          of a GPU: 4 FLOPs a frozen weight and token, 6 a trained one, and 12 · heads · D for each layer and
                     each token that a token attends to in its document. Recomputation does not count.
    ÷ alone          of the TFLOP/s of "alone"
    ÷ by kind        of what a GPU alone would need: seconds a token and seconds a pair of tokens, solved from the two
                     rows alone, for as many of both. By the FLOP, pairs are slower: attention runs in 16 bits.
    p50, longest ms  of a step on rank 0
    J/step           the energy of rank 0's GPU
    peak GiB         of tensors and shards, on rank 0
    in use GiB       of the GPU after the steps, with what the allocator, NCCL and CUDA hold
    predicted        by `lorakernels plan`'s constants for this placement and form, and ÷ what was measured
    check            "ok" if all losses are finite, and the first within 2 % of the one alone
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.lib.energy import joules, shown
from benchmarks.lib.ranks import largest, start_ranks, step_seconds, time_left
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio, write_csv
from benchmarks.lib.timing import synchronize
from benchmarks.peers.models import ADAPTED, ALPHA, RANK, SPECS, Spec, sizes, token_rows
from benchmarks.peers.training import IGNORE, Ours, set_adapters
from lorakernels import LoRAConfig, linear_cross_entropy
from lorakernels.fusion.layer import parts_of
from lorakernels.parallel import context_parallel
from lorakernels.planner.machine import MACHINES
from lorakernels.planner.memory import Placement
from lorakernels.planner.plan import predict
from lorakernels.planner.size import ModelSize
from lorakernels.planner.time import BatchSize

SAVE = "checkpoint"
LONG = 1.0  # seconds of a step from which on each is said as it ends
LOSS_TOLERANCE = 0.02  # other tokens
ALONE, AS_LONG, CP = "alone", "alone, as long", "cp"
COLUMNS = (
    "model", "row", "way", "ranks", "check", "steps", "tokens/s", "TFLOP/s", "÷ alone", "÷ by kind", "p50 ms",
    "longest ms", "J/step", "peak GiB", "in use GiB", "machine", "predicted ms", "÷ ms", "predicted GiB", "÷ GiB",
    "first loss", "note",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """What trains: a row of `length` tokens, packed with documents of `document` tokens, over `ranks` GPUs together."""

    name: str
    length: int
    document: int
    ranks: int

    @property
    def tokens(self) -> int:
        """Of one GPU."""
        return self.length // self.ranks

    @property
    def pairs(self) -> float:
        """Tokens that a GPU's tokens attend to, all together; each attends to itself, too."""
        return self.tokens * (self.document + 1) / 2

    @property
    def batch(self) -> BatchSize:
        return BatchSize(self.length // self.document, self.document, self.ranks)


class Rows(Ours):
    """One model for rows of any length: of one GPU each, or over all ranks since `begin`."""

    def __init__(self, spec: Spec, device: torch.device, mesh: Any) -> None:
        self.mesh, self.context, self.document = mesh, None, 0
        super().__init__(spec, "qkvo", device, save=SAVE, base={"mesh": mesh})

    def begin(self, way: Way) -> None:
        """Collective: adapters, optimizer and attention as `way` begins."""
        if self.context is not None:
            self.context.close()
        set_adapters(self.model)
        self.optimizer = self.make_optimizer()
        torch.manual_seed(0)  # all ranks draw equal masks
        self.context = context_parallel(self.model, self.mesh) if way.ranks > 1 else None
        self.document = way.document
        if self.context is not None:
            self.context.checks_places = False
            self.optimizer.register_step_pre_hook(lambda *_: self.context.reduce_gradients())

    def loss(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        document = min(length, self.document)
        labels = ids.clone()
        labels[:, ::document] = IGNORE  # no document predicts the next one's first token
        if self.context is None:
            return self._alone(ids, labels)
        given: dict[str, Any] = {}
        if document < length:
            starts = torch.arange(0, length + 1, document, device=ids.device, dtype=torch.int32)
            positions = torch.arange(length, device=ids.device)[None] % document
            given = {"cu_seq_lens_q": starts, "max_length_q": document, "position_ids": positions}
        found: Tensor = self.context.loss(labels, input_ids=ids, **given)
        return found

    def _alone(self, ids: Tensor, labels: Tensor) -> Tensor:
        decoder, length = self.model.model, ids.shape[1]
        hidden = decoder.embed_tokens(ids)
        angles = tuple(t[:, :length] for t in self.embeddings)
        for layer in decoder.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=angles)
        shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:]
        return linear_cross_entropy(decoder.norm(hidden), labels=shifted, **self.head)

    @contextmanager
    def first_layers(self, count: int) -> Iterator[None]:
        """The model has only so many of its layers inside."""
        decoder = self.model.model
        layers, decoder.layers = decoder.layers, decoder.layers[:count]
        try:
            yield
        finally:
            decoder.layers = layers

    def update_scales(self) -> None:
        """Of all ranks, also where each has a row of its own, so that they go on with equal scales."""
        self.state.reduce_and_update(None if self.context is not None else dist.group.WORLD)

    @property
    def backends(self) -> str:
        """What attends, where rows are over ranks."""
        first = parts_of(self.model.model.layers[0])
        return "" if self.context is None else ", ".join({*first.context.chosen.values()})


class Bench:
    """All rows of one model, on this rank, until `args.budget_s` after `began` by time.perf_counter."""

    def __init__(
        self, spec: Spec, args: argparse.Namespace, device: torch.device, began: float
    ) -> None:
        self.device, self.args, self.world = device, args, dist.get_world_size()
        self.began, self.end = began, began + args.budget_s
        self.mesh = init_device_mesh(device.type, (self.world,), mesh_dim_names=("cp",))["cp"]
        longest = max(args.alone, args.length // self.world)
        self.spec = replace(spec, length=longest)
        width = spec.shape["hidden_size"]
        layers = spec.shape["num_hidden_layers"]
        self.each_pair = 12.0 * layers * width  # FLOPs, forward and backward
        self.each_token = sizes(self.spec, "qkvo")[2] - self.each_pair * longest
        lora = LoRAConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(ADAPTED["qkvo"]))
        self.size = ModelSize.of(self.spec.config(), lora)
        self.say(f"{self.world} ranks, sizes of {spec.name} known")
        torch.manual_seed(0)
        self.rows = Rows(self.spec, device, self.mesh)
        self.say("loaded and fused")
        self.text = token_rows(args.length, 1).to(device)

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"{time.perf_counter() - self.began:6.1f} s: {text}", flush=True)

    def ways(self) -> list[Way]:
        found = []
        for name in self.args.ways:
            if name == CP:
                found.append(Way(name, self.args.length, self.args.length, self.world))
            elif name in (ALONE, AS_LONG):
                length = self.args.alone if name == ALONE else self.args.length // self.world
                found.append(Way(name, length, length, 1))
            else:
                document = int(name.rpartition(" ")[2])
                found.append(Way(name, self.args.length, document, self.world))
        return found

    def ids(self, way: Way, number: int) -> Tensor:
        """A row, other text in each step; alone, each rank has text of its own."""
        shift = number * self.args.alone // 2
        if way.ranks == 1:
            shift += dist.get_rank() * way.length
        return self.text.roll(-shift, 1)[:, : way.length].contiguous()

    def flops(self, way: Way) -> float:
        """Of one GPU's step."""
        return self.each_token * way.tokens + self.each_pair * way.pairs

    def row(self, way: Way) -> Row:
        """Collective: one way's row, without what compares it with others."""
        gpu, often = self.device.type == "cuda", 1 if way.name == AS_LONG else self.args.repetitions
        plan = self._predicted(way)
        self.say(f"{way.name}: predicted {plan.step:.2f} s, {plan.bytes.peak / 2**30:.1f} GiB")
        self.rows.begin(way)
        self.warm_up(way)
        synchronize(self.device)
        self.say(f"{way.name}: warmed up")
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        energy = joules(self.device)
        samples, losses = self.timed(way, often)
        synchronize(self.device)
        energy = (joules(self.device) - energy) / len(samples)
        seconds = largest(sum(samples), self.device) / len(samples)
        found = [float(loss) for loss in losses]
        peak, used = self._memory()
        row: Row = {
            **dict.fromkeys(COLUMNS, ""),
            "model": self.spec.name,
            "row": f"1 x {way.length}",
            "way": way.name,
            "ranks": self.world,
            "check": "ok" if all(map(math.isfinite, found)) else f"WRONG: losses {found}",
            "steps": len(samples),
            "tokens/s": round(self.world * way.tokens / seconds, 1),
            "TFLOP/s": float(f"{self.flops(way) / seconds / 1e12:.4g}"),
            "p50 ms": round(statistics.median(samples) * 1e3, 1),
            "longest ms": round(max(samples) * 1e3, 1),
            "J/step": shown(energy, 1),
            "peak GiB": peak,
            "in use GiB": used,
            "machine": plan.machine.name,
            "predicted ms": round(plan.step * 1e3, 1),
            "÷ ms": ratio(plan.step, seconds),
            "predicted GiB": round(plan.bytes.peak / 2**30, 2),
            "÷ GiB": ratio(plan.bytes.peak / 2**30, peak),
            "first loss": round(found[0], 4),
            "note": f"{self.rows.note}; {self.rows.backends}".rstrip("; "),
        }
        self.say(str(row))
        return row

    def timed(self, way: Way, often: int) -> tuple[list[float], list[Tensor]]:
        """Collective: seconds and losses of `often` steps, or of fewer long ones if the time is over."""
        losses: list[Tensor] = []
        samples: list[float] = []

        def take(count: int) -> None:
            done = len(losses)
            samples.extend(
                step_seconds(
                    lambda i: losses.append(self.rows.step(self.ids(way, done + i))),
                    count,
                    self.device,
                )
            )

        take(1)
        if largest(samples[0], self.device) <= LONG:
            take(often - 1)
            return samples, losses
        self._say_step(way, samples)
        while len(samples) < often and time_left(self.end, self.device):
            take(1)
            self._say_step(way, samples)
        return samples, losses

    def _say_step(self, way: Way, samples: list[float]) -> None:
        self.say(f"{way.name}: step {len(samples)} took {samples[-1]:.2f} s")

    def warm_up(self, way: Way) -> None:
        """Kernels are compiled and chosen. Adapters are as before."""
        with self.rows.first_layers(2):
            self.rows.step(self.ids(way, 0))
        if way.name == ALONE:  # memory of all layers is there then; a long step would take too long
            self.rows.step(self.ids(way, 1))
        set_adapters(self.rows.model)

    def _predicted(self, way: Way) -> Any:
        small = self.device.type == "cuda" and _total(self.device) < 100e9
        machine = MACHINES["H100-80GB" if small else "H200"]
        placement, saves = Placement(self.world), [SAVE] * len(self.size.layers)
        return predict(self.size, way.batch, machine, self.world, placement, saves)

    def _memory(self) -> tuple[object, object]:
        """(GiB of tensors and shards at most, of the GPU now)."""
        if self.device.type != "cuda":
            return "", ""
        peak, base = torch.cuda.max_memory_allocated(self.device), self.rows.sharded
        if base.transport == "peer":  # not of torch's allocator
            peak += base.shards.memory.numel()
        free, total = torch.cuda.mem_get_info(self.device)
        return round(peak / 2**30, 2), round((total - free) / 2**30, 2)


def _total(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def compared(rows: list[Row], ways: list[Way]) -> list[Row]:
    """The rows with what compares them with one GPU's."""
    named = {way.name: way for way in ways}
    by_name = {str(row["way"]): row for row in rows}
    alone = by_name.get(ALONE, {})
    each = _by_kind(by_name, named)
    found = []
    for row in rows:
        way = named[str(row["way"])]
        new = {**row, "÷ alone": ratio(row["TFLOP/s"], alone.get("TFLOP/s"))}
        if each is not None and way.ranks > 1:
            needed = each[0] * way.tokens + each[1] * way.pairs
            new["÷ by kind"] = round(needed / _seconds(row, way), 3)
        loss, expected = row["first loss"], alone.get("first loss")
        known = isinstance(loss, float) and isinstance(expected, float)
        if new["check"] == "ok" and known and not _near(loss, expected):
            new["check"] = f"WRONG: loss {loss}, alone {expected}"
        found.append(new)
    return found


def _near(loss: Any, expected: Any) -> bool:
    return bool(abs(loss - expected) <= LOSS_TOLERANCE * abs(expected))


def _seconds(row: Row, way: Way) -> float:
    return way.tokens * float(str(row["ranks"])) / float(str(row["tokens/s"]))


def _by_kind(rows: dict[str, Row], ways: dict[str, Way]) -> tuple[float, float] | None:
    """(seconds a token, seconds a pair) of one GPU, of the two rows alone; None without both."""
    if ALONE not in rows or AS_LONG not in rows or ways[ALONE].length == ways[AS_LONG].length:
        return None
    (n1, p1, t1), (n2, p2, t2) = (
        (ways[name].tokens, ways[name].pairs, _seconds(rows[name], ways[name]))
        for name in (ALONE, AS_LONG)
    )
    pair = (t2 / n2 - t1 / n1) / (p2 / n2 - p1 / n1)
    return t1 / n1 - pair * p1 / n1, pair


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--model", choices=list(SPECS), help='default: "70b", on a CPU "tiny"')
    options.add_argument("--layers", type=int, help="of the model; default: all")
    options.add_argument(
        "--length", type=int, help="of the long row; default: 131072, on a CPU 128"
    )
    options.add_argument("--alone", type=int, help="of a row alone; default: 8192, on a CPU 16")
    options.add_argument(
        "--ways", nargs="+", help='default: all, "cp, documents N" with 32768 and 8192'
    )
    options.add_argument(
        "--budget-s", type=float, default=540.0, help="what would begin later is not run"
    )
    args, device = arguments(options, on_gpu=2)
    began, gpu = time.perf_counter(), device.type == "cuda"
    args.length, args.alone = (
        args.length or (131072 if gpu else 128),
        args.alone or (8192 if gpu else 16),
    )
    documents = [f"cp, documents {n}" for n in (args.length // 4, args.alone)]
    args.ways = args.ways or [ALONE, CP, AS_LONG, *documents]
    device = start_ranks(device)
    code = _run(args, device, began)  # a rank that raises must not wait for others
    dist.barrier()
    dist.destroy_process_group()
    return code


def _run(args: argparse.Namespace, device: torch.device, began: float) -> int:
    spec = SPECS[args.model or ("70b" if device.type == "cuda" else "tiny")]
    bench = Bench(spec.cut(args.layers) if args.layers else spec, args, device, began)
    rows: list[Row] = []
    ways, facts = bench.ways(), environment(device)
    for way in ways:
        if not time_left(bench.end, device):
            break
        rows.append(bench.row(way))
        if args.output and dist.get_rank() == 0:  # what is there if a later way is cut off
            write_csv(args.output / "context.csv", compared(rows, ways), facts)
    if dist.get_rank():
        return 0
    return finish("context", compared(rows, ways), facts, args.output)


if __name__ == "__main__":
    sys.exit(main())
