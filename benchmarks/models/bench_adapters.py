# SPDX-License-Identifier: Apache-2.0
"""Several adapters trained over one base: in one batch, and one after the other.

    python benchmarks/models/bench_adapters.py --output DIR [--model 8b] [--adapters 8] [--tokens 512 128] [--eager]

A step trains every adapter on one sequence of `tokens`. Llama-3.1-8B's layers are fused, the whole step is one CUDA
graph, and LoRA of R = 16 is on all linear layers, without dropout. Columns:

    one after the other    a step of one adapter, J times
    at once                J sequences, one batch (AdapterBatch); one optimizer for all
    at once, rates apart   the same with a parameter group for each adapter
    one adapter for all rows   what the same rows take without segments: no way of training at once is faster
    eager                  without graphs

    tokens/s, ms           of all adapters' tokens, for a step of all of them
    × one after the other  tokens/s over those of that row of the same kind

The loss before the first step has to be that of the first way to 2 %: all adapters start as the base.
"""

from __future__ import annotations

import gc
import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

import lorakernels
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio
from benchmarks.lib.timing import synchronize
from benchmarks.peers.models import SPECS, Spec, token_rows
from benchmarks.peers.training import LR, Ours
from lorakernels import LoRALinear

REPEATED = 10


class Batched(Ours):
    """`adapters` in one batch; 0 for one adapter, as others train it."""

    def __init__(
        self, *given: Any, adapters: int = 0, rates_apart: bool = False, **options: Any
    ) -> None:
        self.adapters, self.rates_apart = adapters, rates_apart
        super().__init__(*given, **options)

    def _fuse(self, model: Any) -> None:
        for layer in model.modules():
            if isinstance(layer, LoRALinear):
                layer.lora_dropout = 0.0
        if self.adapters:
            names = [f"job {i}" for i in range(self.adapters)]
            self.batch = lorakernels.batch_adapters(model, names)
        super()._fuse(model)

    def make_optimizer(self) -> torch.optim.Optimizer:
        if not self.rates_apart:
            return super().make_optimizer()
        rates: dict[str, dict[str, Any]] = {
            name: {"lr": torch.tensor(LR * (i + 1) / self.adapters, device=self.device)}
            for i, name in enumerate(self.batch.names)
        }
        capturable = self.device.type == "cuda"
        found = torch.optim.AdamW(
            self.batch.param_groups(rates), weight_decay=0.0, fused=True, capturable=capturable
        )
        self.batch.follow(found)
        return found


def milliseconds(training: Batched, ids: Tensor) -> tuple[float, float]:
    """(of a step on the first of `ids` that fit the batch, the loss of all of them before it)."""
    size = training.spec.batch
    with torch.no_grad():
        first = statistics.mean(float(training.loss(rows)) for rows in ids.split(size))
    rows = ids[:size]
    for _ in range(training.warmup_steps + 2):
        training.step(rows)
    synchronize(training.device)
    if training.device.type != "cuda":
        return float("nan"), first
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPEATED):
        training.step(rows)
    end.record()
    synchronize(training.device)
    return begin.elapsed_time(end) / REPEATED, first


def case(
    spec: Spec, adapters: int, tokens: int, device: torch.device, eager: bool = False
) -> list[Row]:
    one = replace(spec, length=tokens, batch=1)
    several = replace(spec, length=tokens, batch=adapters)
    ids = token_rows(tokens, adapters).to(device)
    kinds = {"": "iteration"} if device.type == "cuda" and not eager else {}
    found: list[Row] = []
    for kind, graphs in {**kinds, ", eager": None}.items():
        build = partial(Batched, adapted="all", device=device, graphs=graphs)
        ways = {
            "one after the other": (partial(build, spec=one), adapters),
            "at once": (partial(build, spec=several, adapters=adapters), 1),
            "at once, rates apart": (
                partial(build, spec=several, adapters=adapters, rates_apart=True),
                1,
            ),
            "one adapter for all rows": (partial(build, spec=several), 1),
        }
        before, first_loss = 0.0, 0.0
        for way, (make, times) in ways.items():
            torch.manual_seed(0)
            training = make()
            ms, loss = milliseconds(training, ids)
            ms *= times
            rate = adapters * tokens / ms * 1e3
            before, first_loss = before or rate, first_loss or loss
            row: Row = {
                "adapters": adapters,
                "tokens each": tokens,
                "provider": way + kind,
                "check": "ok" if abs(loss / first_loss - 1) < 0.02 else f"WRONG: first loss {loss}",
                "ms": round(ms, 3),
                "tokens/s": round(rate, 1),
                "× one after the other": ratio(rate, before),
                "first loss": round(loss, 4),
            }
            print(row, flush=True)
            found.append(row)
            _close(training)
            del training, make
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return found


def _close(training: Batched) -> None:
    if training.graphs is not None:
        training.manager.reset()
    model: nn.Module = training.model
    model.zero_grad()


def main() -> int:
    options = parser("several adapters over one base, at once and one after the other")
    options.add_argument("--model", choices=list(SPECS))
    options.add_argument("--layers", type=int, help="of the model; all without")
    options.add_argument("--adapters", type=int)
    options.add_argument("--tokens", type=int, nargs="+", help="of each adapter")
    options.add_argument("--eager", action="store_true", help="no rows with graphs")
    args, device = arguments(options)
    on_gpu = device.type == "cuda"
    spec = SPECS[args.model or ("8b" if on_gpu else "tiny")]
    if args.layers:
        spec = spec.cut(args.layers)
    rows: list[Row] = []
    for tokens in args.tokens or ([512, 128] if on_gpu else [16]):
        rows += case(spec, args.adapters or (8 if on_gpu else 2), tokens, device, args.eager)
    return finish("adapters", rows, environment(device), args.output)


if __name__ == "__main__":
    sys.exit(main())
