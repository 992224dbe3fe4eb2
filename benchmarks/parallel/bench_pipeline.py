# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules over several GPUs: how much of a step each waits, beside what the schedule predicts.

    torchrun --nproc-per-node 2 benchmarks/parallel/bench_pipeline.py --output DIR [--model 8b] [--budget-s S]

peers/models.py makes the model, 8 layers of Llama-2-70B by default, and the text. R = 16 on q, k, v, o. Layers are
fused, and run eagerly. With --graphs they are replayed, and have no dropout. A microbatch is one row. n GPUs run n, 2 n
and 4 n of them, with one stage each (1F1B) and two (interleaved). With several --transport, each way follows the other.

Columns:

    sends            how: "peer", "nccl" or "gloo", as `pipeline_parallel(transport=…)`
    alone ms         of each rank, what a microbatch takes in its stages by themselves, forward and backward
    ideal ms         microbatches · the largest of these
    pass ms          forward and backward of all microbatches through the pipeline, without the optimizer
    bubble           1 − ideal / pass
    predicted        (n − 1) / (chunks · microbatches + n − 1), the schedule's bubble where stages take equally long
    these stages     the same where each forward and backward of a stage takes as long as alone, in the schedule's order
    tokens/s         of these passes, all GPUs together
    J                of a pass, rank 0's GPU
    peak GiB         of tensors in passes, the largest of all ranks, without what stages receive by "peer"
    check            "ok" if the first loss is within 1 % of the whole model's; what cannot run says why
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, cycle, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from lorakernels.graphs import GraphManager, GraphOptions
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.lib.energy import joules, shown
from benchmarks.lib.ranks import ROWS, largest, start_ranks, step_seconds
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, write_csv
from benchmarks.lib.timing import synchronize
from benchmarks.peers.models import SPECS, P, Spec, token_rows
from benchmarks.peers.training import IGNORE, Ours
from lorakernels.parallel import Microbatch, pipeline_parallel
from lorakernels.train.model.model import no_mask

LOSS_TOLERANCE = 0.01  # B = 0 at first, so that masks do not matter; FP8 and the head's sums round
COLUMNS = (
    "model",
    "row",
    "schedule",
    "layers",
    "microbatches",
    "ranks",
    "sends",
    "check",
    "alone ms",
    "ideal ms",
    "pass ms",
    "bubble",
    "predicted",
    "these stages",
    "tokens/s",
    "J",
    "peak GiB",
    "first loss",
)


Times = dict[int, tuple[float, float]]  # of each stage: seconds of a forward, and of a backward


class Run(NamedTuple):
    """A microbatch's forward or backward through a stage."""

    forward: bool
    stage: int
    microbatch: int


class Staged(Ours):
    """The model, cut into `chunks` stages for each rank. A step trains on `microbatches` rows.

    `expected` is the mean loss of `ids` [microbatches, length], computed by the whole model before it is cut.
    """

    def __init__(
        self, mesh: Any, spec: Spec, ids: Tensor, way: tuple[int, int, str], graphs: Any
    ) -> None:
        microbatches, chunks, transport = way
        self.dropout = P if graphs is None else 0.0
        super().__init__(spec, "qkvo", ids.device, save="full")
        with torch.no_grad():
            self.expected = statistics.mean(float(self.loss(row)) for row in ids.split(1))
        self.head.clear()  # the last stage has it
        shape = (1, spec.length, spec.shape["hidden_size"])
        # what could come from the stage before
        self.hidden = torch.randn(shape, device=ids.device, dtype=self.plain_dtype)
        self.pipeline = pipeline_parallel(
            self.model, mesh, microbatches=microbatches, chunks=chunks, transport=transport
        )
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self.make_optimizer()
        self.layers: GraphManager | None = None
        if graphs is not None:
            options = {"fp8_state": self.state, "options": graphs}
            self.layers = GraphManager(
                self.pipeline.layers, self.warmup_steps, microbatches, **options
            )

    def forward_backward(self, ids: Tensor) -> Tensor:
        with no_mask(self.model.model):
            loss = self.pipeline.forward_backward(ids, input_ids=ids)
        if self.layers is not None:
            self.layers.end_iteration()
        return loss

    def step(self, ids: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.forward_backward(ids)
        self.optimizer.step()
        self.state.reduce_and_update(self.pipeline.ranks.group)
        self.rng.advance()
        return loss

    def alone(self, ids: Tensor, mark: Callable[[], object]) -> None:
        """Forward and backward of all microbatches in this rank's stages, eagerly, which wait for no other rank.

        `mark` is called before and after each forward, and after each backward.
        """
        labels = nn.functional.pad(ids, (0, 1), value=IGNORE)[:, 1:]
        pairs = zip(ids.split(1), labels.split(1), strict=True)
        microbatches = [Microbatch(row, wanted, {}) for row, wanted in pairs]
        eager = nullcontext() if self.layers is None else self.layers.disabled()
        whole = no_mask(self.model.model)
        with eager, whole, self.pipeline.begun(microbatches, labels.numel()) as stages:
            for at, row in enumerate(ids.split(1)):
                for stage in stages:
                    x = row if stage.is_first else self.hidden.detach().requires_grad_()
                    mark()
                    y = stage(x, torch.tensor([at]))
                    mark()
                    y.backward(torch.ones_like(y) if stage.is_last else self.hidden)
                    mark()

    def seconds_alone(self, ids: Tensor, often: int) -> Times:
        """Collective: {stage: (seconds of a forward, of a backward)} of all ranks' stages, each a median."""
        own = range(self.pipeline.ranks.rank, len(self.pipeline.stages), self.pipeline.ranks.size)
        clock = Clock(ids.device)
        self.alone(ids, clock.mark)
        clock.seconds()
        for _ in range(often):
            self.alone(ids, clock.mark)
        parts = zip(*[iter([*clock.seconds(), 0.0])] * 3, strict=True)  # the third lies between
        by_stage: dict[int, list[tuple[float, ...]]] = {i: [] for i in own}
        for stage, part in zip(cycle(own), parts, strict=False):
            by_stage[stage].append(part)
        mine = {i: tuple(map(statistics.median, zip(*p, strict=True))) for i, p in by_stage.items()}
        found: list[Any] = [None] * self.pipeline.ranks.size
        dist.all_gather_object(found, mine)
        return {i: (f, b) for each in found for i, (f, b, _) in sorted(each.items())}


class Clock:
    """Seconds between calls of `mark`, of a GPU on its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._marks = device, list[Any]()

    def mark(self) -> None:
        """Here."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """From each mark to the next one; then there is none."""
        synchronize(self._device)
        marks, self._marks = self._marks, []
        if self._device.type != "cuda":
            return [b - a for a, b in pairwise(marks)]
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def rows_of(spec: Spec, count: int, device: torch.device) -> Tensor:
    """int64 [count, length] of the text, which begins anew where it ends."""
    text = token_rows(spec.length, min(count, ROWS))
    return text.repeat(-(-count // len(text)), 1)[:count].to(device)


def measure(mesh: Any, spec: Spec, args: argparse.Namespace, way: tuple[int, int, str]) -> Row:
    """One row, of (microbatches, chunks, transport). What is refused is said in "check"; all ranks see it alike."""
    microbatches, chunks, _ = way
    row: Row = {"model": spec.name, "row": f"1 x {spec.length}", "microbatches": microbatches}
    row["schedule"] = "1F1B" if chunks == 1 else f"interleaved, {chunks} chunks"
    row["layers"] = "eager" if args.graphs is None else "replayed"
    row["ranks"] = mesh.size()
    device: torch.device = args.on
    torch.manual_seed(0)
    ids = rows_of(spec, microbatches, device)
    try:
        training = Staged(mesh, spec, ids, way, args.graphs)
    except ValueError as error:
        return {**row, "check": f"not run: {error}"}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    first = float(training.step(ids))
    for _ in range(training.warmup_steps):
        training.step(ids)
    synchronize(device)
    energy = joules(device)
    passes = step_seconds(lambda _: training.forward_backward(ids), args.repetitions, device)
    energy = (joules(device) - energy) / len(passes)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    alone = training.seconds_alone(ids, args.repetitions)
    if args.trace is not None:
        trace(
            lambda: training.forward_backward(ids), args.trace, f"{microbatches}-{chunks}-{way[2]}"
        )
    through = largest(statistics.median(passes), device)
    near = abs(first - training.expected) <= LOSS_TOLERANCE * abs(training.expected)
    if training.layers is not None:
        training.layers.close()
    return {
        **row,
        "sends": training.pipeline.transport,
        "check": "ok" if near else f"WRONG: loss {first}, the whole model's {training.expected}",
        **bubbles(alone, through, microbatches, mesh.size()),
        "tokens/s": round(microbatches * spec.length / through, 1),
        "J": shown(energy, 1),
        "peak GiB": round(largest(peak, device), 2),
        "first loss": round(first, 4),
    }


def trace(step: Callable[[], object], folder: Path, name: str) -> None:
    """Write what rank and GPU do in one step, for the viewers of torch.profiler, to a file of `folder`."""
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as found:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(folder / f"{name}-rank{dist.get_rank()}.json.gz"))


def bubbles(alone: Times, through: float, microbatches: int, ranks: int) -> Row:
    """Columns of the bubble, from seconds: `alone` of each stage, and `through` the pipeline of all microbatches."""
    chunks = len(alone) // ranks
    each = [sum(sum(alone[i]) for i in range(rank, len(alone), ranks)) for rank in range(ranks)]
    ideal = microbatches * max(each)
    order = orders(ranks, chunks, microbatches)
    return {
        "alone ms": " / ".join(f"{seconds * 1e3:.2f}" for seconds in each),
        "ideal ms": round(ideal * 1e3, 2),
        "pass ms": round(through * 1e3, 2),
        "bubble": round(1 - ideal / through, 4),
        "predicted": round((ranks - 1) / (chunks * microbatches + ranks - 1), 4),
        "these stages": round(1 - ideal / seconds_of(order, alone), 4),
    }


def orders(ranks: int, chunks: int, microbatches: int) -> list[list[Run]]:
    """What each rank runs, in the order of torch's Schedule1F1B or ScheduleInterleaved1F1B.

    The latter has the first (chunks − 1) · k + 2 (ranks − 1 − rank) forwards, k microbatches at a time through all
    chunks. Then forwards and backwards alternate, the forward first, which is what 1F1B does as well.
    """
    at_once = microbatches // max(1, microbatches // ranks)
    found = []
    for rank in range(ranks):
        ahead = (chunks - 1) * at_once + 2 * (ranks - 1 - rank) if chunks > 1 else ranks - 1 - rank
        both = [list[Run](), list[Run]()]
        for number in range(chunks * microbatches):
            turn, place = divmod(number, chunks * at_once)
            chunk, microbatch = place // at_once, turn * at_once + place % at_once
            both[0].append(Run(True, chunk * ranks + rank, microbatch))
            both[1].append(Run(False, (chunks - 1 - chunk) * ranks + rank, microbatch))
        forwards, backwards = both
        ahead = min(ahead, len(forwards))
        pairs = zip(forwards[ahead:], backwards, strict=False)
        own = [*forwards[:ahead], *chain.from_iterable(pairs)]
        found.append(own + backwards[len(forwards) - ahead :])
    return found


def seconds_of(order: list[list[Run]], alone: Times) -> float:
    """Of a pass in which each rank runs its `order`, and waits for nothing but what it reads."""
    ended: dict[Run, float] = {}
    ranks = [(iter(own), [0.0]) for own in order]
    waiting = [(next(own), own, at) for own, at in ranks]
    while waiting:
        ready = [w for w in waiting if _read(w[0], len(alone)) in {None, *ended}]
        if not ready:
            raise ValueError(f"this order waits for itself: {[run for run, _, _ in waiting]}")
        for run, own, at in ready:
            reads = _read(run, len(alone))
            begins = max(at[0], ended[reads] if reads else 0.0)
            ended[run] = at[0] = begins + alone[run.stage][not run.forward]
            waiting.remove((run, own, at))
            following = next(own, None)
            if following is not None:
                waiting.append((following, own, at))
    return max(ended.values())


def _read(run: Run, stages: int) -> Run | None:
    """Whose result `run` takes from another stage, if it takes one."""
    stage = run.stage - 1 if run.forward else run.stage + 1
    return run._replace(stage=stage) if 0 <= stage < stages else None


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--model", choices=list(SPECS), help='default: "70b", on a CPU "tiny"')
    options.add_argument("--layers", type=int, default=8, help="of the model (default: 8)")
    options.add_argument("--length", type=int, help="tokens of a row; default: the model's")
    options.add_argument("--microbatches", type=int, nargs="+", help="default: n, 2 n and 4 n")
    options.add_argument("--chunks", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    options.add_argument("--transport", nargs="+", default=["auto"], help="default: auto")
    options.add_argument("--trace", type=Path, metavar="DIR", help="folder for a trace of each row")
    options.add_argument("--graphs", action="store_true", help="replay layers; without dropout")
    options.add_argument(
        "--budget-s",
        type=float,
        default=90.0,
        help="what would begin later is not run, but for the first",
    )
    args, device = arguments(options, on_gpu=4)
    began = time.perf_counter()
    args.on = device = start_ranks(device)
    args.graphs = GraphOptions() if args.graphs else None
    spec = SPECS[args.model or ("70b" if device.type == "cuda" else "tiny")]
    spec = Spec(spec.name, spec.shape, args.length or spec.length).cut(args.layers)
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("pp",))
    rows: list[Row] = []
    try:
        for way in ways_of(args, ranks):
            if rows and largest(time.perf_counter() - began, device) > args.budget_s:
                break
            found = measure(mesh, spec, args, way)
            rows.append({**dict.fromkeys(COLUMNS, ""), **found})
            if dist.get_rank() == 0:
                print(rows[-1], flush=True)
                if args.output:  # a call may be cut short
                    write_csv(args.output / "pipeline.csv", rows, environment(device))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if dist.get_rank():
            return 0
        return finish("pipeline", rows, environment(device), args.output)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def ways_of(args: argparse.Namespace, ranks: int) -> list[tuple[int, int, str]]:
    """(microbatches, chunks, transport) of each row."""
    numbers = args.microbatches or [ranks, 2 * ranks, 4 * ranks]
    return [*product(numbers, args.chunks, args.transport)]


if __name__ == "__main__":
    sys.exit(main())
