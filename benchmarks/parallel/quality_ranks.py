# SPDX-License-Identifier: Apache-2.0
"""Does a model train over several GPUs as on one? Loss curves of the same steps in each layout, beside each other.

    torchrun --nproc-per-node 8 benchmarks/parallel/quality_ranks.py --output DIR [--layers 8] [--steps 300] [--seed N]

A Llama of the widths of Llama-3.2-1B learns this Python's sources byte by byte. Rank 0 trains it whole, and the others
get its weights. Then each layout adapts it to pydoc's help texts: R = 16 on q, k, v, o, p = 0.1, over decoder layers
whose base is in FP8 throughout, two rows of 2048 tokens a step, fused layers that are replayed. A, the rows of each
step and the learning rates are equal. Every layout uses all ranks for one run. Ways:

    one GPU                 rank 0 alone, with whom the others are compared
    one GPU, other masks    rank 1 alone meanwhile, whose dropout draws from another seed: what masks alone change
    tp T                    T ranks have each layer, its rows and the vocabulary together; the masks of one GPU
    cp C                    C ranks share each row; the masks of one GPU
    dp 2                    two replicas have one row of each step, and average gradients and amaxes
    …, one base             all ranks keep one base together: those of a way without tp, with replicas

On 8 ranks the layouts are tp 8, tp 4 x cp 2, tp 2 x cp 4, cp 8, tp 4 x dp 2, tp 2 x cp 2 x dp 2 and
"cp 4 x dp 2, one base".

A curve is the running mean of 20 steps' losses. "largest difference" is that of two curves at any step, relative to one
GPU's, and 0.3 % are asked for. quality_ranks_curves.csv gets each step's loss while the ways run. "held-out loss" is
in nats per byte, after the last step. `--seed` draws other weights, rows and masks. benchmarks/report/quality_ranks.py
joins such runs: the mean of several tells a layout from dropout's masks, which alone make up to 0.3 % in one.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gc
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from lorakernels.graphs import GraphManager, GraphOptions
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.lib.curves import farthest
from benchmarks.lib.ranks import average_gradients, largest, start_ranks
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio, write_csv
from benchmarks.peers.models import ADAPTED, ALPHA, RANK, P
from benchmarks.peers.texts import demo_texts
from lorakernels import DelayedScaling, LoRAConfig, PhiloxState, apply_lora, fuse
from lorakernels.fusion.over_ranks import together_of
from lorakernels.parallel import context_parallel, parallelize, shard_base

ONE, OTHER = "one GPU", "one GPU, other masks"
TOLERANCE = 0.003  # of the smoothed curves, at any step
EVERY = 10  # steps whose losses are read and written together
VOCABULARY = 512  # 256 bytes, and a number that ranks divide
CLIP = 0.3  # of the gradients' norm, as the learning rate those of MLPerf's LoRA task


@dataclass(frozen=True)
class Plan:
    """A model, and how long it trains on its two texts."""

    shape: dict[str, int]
    length: int = 2048
    rows: int = 2  # of each step, which replicas share
    steps: int = 300
    base_steps: int = 150
    base_lr: float = 4e-4
    lr: float = 4e-4
    held: int = 8  # rows of the second text
    run: int = 0  # what is drawn differs by it: the base's weights, the order of rows, masks

    def seed(self, what: int) -> int:
        return 1000 * self.run + what


PLANS = {
    "1b": Plan(
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
    ),
    "tiny": Plan(
        {
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
        length=64,
        steps=30,
        base_steps=20,
        base_lr=4e-3,
        lr=4e-3,
    ),
}


class Way(NamedTuple):
    """How `tp` · `cp` · `dp` ranks train one model. `one_base`: they keep its frozen weights together."""

    name: str
    tp: int = 1
    cp: int = 1
    dp: int = 1
    one_base: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp

    def told(self, world: int) -> dict[str, int]:
        """{way: the rank whose losses are its} of what `world` ranks train at once."""
        return {ONE: 0, OTHER: 1} if self.name == ONE and world > 1 else {self.name: 0}


def ways_of(ranks: int, rows: int) -> list[Way]:
    """One GPU, and all layouts that use `ranks` for steps of `rows` rows, with powers of two for tp and dp.

    Each rank trains alone in the first one, with masks of its own.
    """
    found = [Way(ONE)]
    if ranks == 1:
        return found
    powers = [2**i for i in range(ranks.bit_length())]
    for dp in (n for n in powers if rows % n == 0):
        for tp in (n for n in reversed(powers) if ranks % (n * dp) == 0):
            cp, shards = ranks // (tp * dp), dp > 1 and tp == 1
            sizes = {"tp": tp, "cp": cp, "dp": dp}
            name = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
            found.append(Way(name + ", one base" * shards, tp, cp, dp, shards))
    return found


def make_base(plan: Plan, rows: Tensor, device: torch.device) -> Any:
    """Collective: a Llama that rank 0 trains whole on `rows`; frozen, in bf16 on a GPU and equal on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(plan.seed(0))
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=plan.length, use_cache=False, **plan.shape
    )
    model = LlamaForCausalLM(config).to(device)
    if dist.get_rank() == 0:
        optimizer = torch.optim.AdamW(model.parameters(), lr=plan.base_lr, weight_decay=0.0)
        generator = torch.Generator().manual_seed(plan.seed(1))
        for step in range(plan.base_steps):
            ids = rows[torch.randint(len(rows), (plan.rows,), generator=generator)].to(device)
            optimizer.param_groups[0]["lr"] = plan.base_lr * rate(step, plan.base_steps)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                model(input_ids=ids, labels=ids).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if device.type == "cuda":
        model = model.to(torch.bfloat16)
    for parameter in model.requires_grad_(False).parameters():
        dist.broadcast(parameter, 0)
    return model


def rate(step: int, steps: int) -> float:
    """5 % warm-up, then a cosine."""
    ramp = min(1.0, (step + 1) / max(1, 0.05 * steps))
    return ramp * 0.5 * (1 + math.cos(math.pi * step / steps))


class Layout:
    """Adapters over a copy of a base, trained by the ranks of `way` together."""

    def __init__(self, base: Any, way: Way, plan: Plan, alone: Any, graphs: Any) -> None:
        self.model, self.way, self.replicas = copy.deepcopy(base), way, alone
        self.replica = dist.get_rank() // (way.tp * way.cp) if way.dp > 1 else 0
        device = next(self.model.parameters()).device
        seed = dist.get_rank() if way.ranks == 1 else self.replica
        # one value on all ranks: equal adapters, and masks of one state
        torch.manual_seed(plan.seed(3))
        self.rng = PhiloxState(plan.seed(11) + seed, device)
        config = LoRAConfig(
            r=RANK,
            lora_alpha=ALPHA,
            lora_dropout=P,
            target_modules=list(ADAPTED["qkvo"]),
            fp8=DelayedScaling(),
        )
        report = apply_lora(self.model, config, rng_state=self.rng, frozen="fp8")
        self.state: Any = report.fp8_state
        fuse(self.model.train())
        self.split: Any = None
        self.context: Any = None
        if way.ranks > 1:
            self._spread(device)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, weight_decay=0.0)
        self.manager = None
        if graphs is not None:
            layers = [*self.model.model.layers]
            states: dict[str, Any] = {"fp8_state": self.state, "rng_states": [self.rng]}
            options = replace(graphs, together=together_of(layers))
            self.manager = GraphManager(layers, options=options, **states)

    def _spread(self, device: torch.device) -> None:
        way, axes = self.way, ("dp", "cp", "tp")
        mesh = init_device_mesh(device.type, (way.dp, way.cp, way.tp), mesh_dim_names=axes)
        if way.one_base:
            everyone = init_device_mesh(device.type, (way.ranks,), mesh_dim_names=("dp_shard",))
            self.base = shard_base(self.model, everyone)
        if way.tp > 1:
            self.split = parallelize(self.model, mesh["tp"], vocabulary=True)
        if way.cp > 1:
            self.context = context_parallel(self.model, mesh["cp"])
        if way.dp > 1:
            self.replicas = mesh["dp"].get_group()

    def own(self, rows: Tensor) -> Tensor:
        """Of a step's rows, those of this rank's replica."""
        return rows.chunk(self.way.dp)[self.replica]

    def loss(self, ids: Tensor) -> Tensor:
        over = self.context or self.split
        if over is not None:
            found: Tensor = over.loss(ids, input_ids=ids)
            return found
        alone: Tensor = self.model(input_ids=ids, labels=ids).loss
        return alone

    def step(self, ids: Tensor, lr: float) -> Tensor:
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.zero_grad()
        loss = self.loss(ids)
        loss.backward()
        if self.context is not None:
            self.context.reduce_gradients()
        average_gradients(self.trained, self.replicas)
        if self.split is not None:
            self.split.clip_grad_norm_(CLIP)
        else:
            nn.utils.clip_grad_norm_(self.trained, CLIP)
        self.optimizer.step()
        self.state.reduce_and_update(self.replicas)  # and over who has its layers or rows besides
        if self.manager is None or self.manager.phase != "replaying":
            self.rng.advance()
        if self.manager is not None:
            self.manager.end_iteration()
        return loss.detach()

    def mean(self, losses: Sequence[Tensor]) -> Tensor:
        """Collective: the losses of steps, over all replicas, fp32."""
        found = torch.stack([*losses]).float() / self.way.dp
        if self.way.dp > 1:
            dist.all_reduce(found, group=self.replicas)
        return found

    @torch.no_grad()
    def held_out(self, rows: Tensor) -> float:
        self.model.eval()
        losses = [self.loss(ids[None]) for ids in rows]
        self.model.train()
        return float(torch.stack(losses).mean())

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()


class Curves:
    """The losses of every way, and the file that gets them as they come, on rank 0."""

    def __init__(self, folder: Path | None) -> None:
        self.losses: dict[str, list[float]] = {}
        self._path = folder and folder / "quality_ranks_curves.csv"
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("way,step,loss\n")

    def add(self, way: str, losses: list[float]) -> None:
        known = self.losses.setdefault(way, [])
        if self._path is not None:
            with self._path.open("a", newline="") as file:
                rows = csv.writer(file)
                rows.writerows(
                    (way, len(known) + i, round(loss, 6)) for i, loss in enumerate(losses)
                )
        known += losses


def run(
    way: Way,
    base: Any,
    text: Tensor,
    plan: Plan,
    curves: Curves,
    alone: Any,
    graphs: GraphOptions | None,
) -> list[Row]:
    """Collective: one way's row, and of one GPU that with other masks.

    `alone`: the group of this rank. `graphs`: None for eager layers.
    """
    device, told = next(base.parameters()).device, way.told(dist.get_world_size())
    began = time.perf_counter()
    layout = Layout(base, way, plan, alone, graphs)
    held, data = text[: plan.held].to(device), text[plan.held :]
    before = layout.held_out(held)  # B = 0, so that all are the base's
    generator = torch.Generator().manual_seed(plan.seed(2))
    order = torch.randint(len(data), (plan.steps, plan.rows), generator=generator)
    waiting: list[Tensor] = []
    for step in range(plan.steps):
        rows = data[layout.own(order[step])].to(device)
        waiting.append(layout.step(rows, plan.lr * rate(step, plan.steps)))
        if len(waiting) == EVERY or step == plan.steps - 1:
            losses = layout.mean(waiting)
            for name, rank in told.items():
                curves.add(name, of_rank(rank, losses))
            waiting.clear()
    replayed = 0 if layout.manager is None else layout.manager.replayed
    layout.close()
    loss = torch.tensor([layout.held_out(held)], device=device)
    seconds = largest(time.perf_counter() - began, device)
    return [
        {
            "way": name,
            "ranks": way.ranks,
            "steps": plan.steps,
            "replayed": replayed,
            "loss before": round(before, 5),
            "held-out loss": round(of_rank(rank, loss)[0], 5),
            "seconds": round(seconds, 1),
        }
        for name, rank in told.items()
    ]


def of_rank(rank: int, values: Tensor) -> list[float]:
    """Collective: that rank's `values`, on all."""
    values = values.float().clone()
    dist.broadcast(values, rank)
    found: list[float] = values.tolist()
    return found


def compared(rows: list[Row], curves: dict[str, list[float]]) -> list[Row]:
    """With checks, and how far each curve is from one GPU's."""
    found, one, first = [], curves[ONE], rows[0]
    for row in rows:
        losses = curves[str(row["way"])]
        off, step = farthest(losses, one)
        check = "ok"
        if not all(map(math.isfinite, losses)):
            check = "WRONG: a loss is not finite"
        elif row["way"] not in (ONE, OTHER) and not off <= TOLERANCE:
            check = f"WRONG: more than {TOLERANCE:.1%} from one GPU"
        shown: Row = {"way": row["way"], "ranks": row["ranks"], "check": check}
        shown |= {"largest difference": f"{off:.3%}", "from step": step}
        shown |= {name: value for name, value in row.items() if name not in shown}
        shown["÷ one GPU"] = ratio(row["held-out loss"], first["held-out loss"], 5)
        found.append(shown)
    return found


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--model", choices=list(PLANS), help='default: "1b", on a CPU "tiny"')
    options.add_argument("--layers", type=int, help="of the model")
    options.add_argument("--steps", type=int, help="of each way")
    options.add_argument("--seed", type=int, default=0, metavar="N", help="which weights and masks")
    options.add_argument("--eager", action="store_true", help="replay no layers")
    options.add_argument("--ways", nargs="+", metavar="WAY", help="beside one GPU; default: all")
    args, device = arguments(options)
    device = start_ranks(device)
    try:
        plan = PLANS[args.model or ("1b" if device.type == "cuda" else "tiny")]
        if args.layers:
            plan = replace(plan, shape={**plan.shape, "num_hidden_layers": args.layers})
        plan = replace(plan, steps=args.steps or plan.steps, run=args.seed)
        ways = {way.name: way for way in ways_of(dist.get_world_size(), plan.rows)}
        if unknown := {*(args.ways or ways)} - {*ways}:
            options.error(
                f"--ways: must be of {[*ways]} on {dist.get_world_size()} ranks, found {sorted(unknown)}"
            )
        chosen = [way for name, way in ways.items() if name in (ONE, *(args.ways or ways))]
        code = _main(chosen, plan, args, device)
        dist.barrier()  # not by a rank that raises, which would wait for the others
        return code
    finally:
        dist.destroy_process_group()


def _main(ways: list[Way], plan: Plan, args: argparse.Namespace, device: torch.device) -> int:
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    groups = [dist.new_group([rank]) for rank in range(ranks)]
    began = time.perf_counter()
    sources, topics = demo_texts(plan.length)
    base = make_base(plan, sources, device)
    if first:
        print(f"{len(topics)} rows; the base in {time.perf_counter() - began:.1f} s", flush=True)
    curves = Curves(args.output if first else None)
    graphs = GraphOptions() if device.type == "cuda" and not args.eager else None
    rows: list[Row] = []
    for way in ways:
        new = run(way, base, topics, plan, curves, groups[dist.get_rank()], graphs)
        rows += new
        if first:
            for row in compared(rows, curves.losses)[-len(new) :]:
                print(f"{time.perf_counter() - began:6.1f} s: {row}", flush=True)
            if args.output:  # what is there if a later way is cut off
                found = compared(rows, curves.losses)
                write_csv(args.output / "quality_ranks.csv", found, environment(device))
        gc.collect()
    if not first:
        return 0
    return finish("quality_ranks", compared(rows, curves.losses), environment(device), args.output)


if __name__ == "__main__":
    sys.exit(main())
