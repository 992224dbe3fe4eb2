# SPDX-License-Identifier: Apache-2.0
"""Whole models that train: tokens per second and memory of ours, of transformers with PEFT, and of it with TE.

    python benchmarks/models/bench_end_to_end.py --output DIR [--models 1b 8b 70b] [--adapted qkvo all] [--providers …]

peers/models.py makes the models: Llama-3.2-1B at 1024 tokens, Llama-3.1-8B at 4096, Llama-2-70B at 8192. A step trains
on one sequence. The weights are random and the same for all providers; the text is the demo's, byte by byte. LoRA has
R = 16, alpha = 32 and p = 0.1, on q, k, v, o or on all linear layers. AdamW updates the adapters alone. Each provider
has a process of its own, one after the other. Columns:

    tokens/s, ms/step    of steps in a row, with everything in them: data to the device, loss, optimizer
    J/step               the GPU's energy in the same steps, by NVML's counter
    CPU ms               the host's time to enqueue a step on an idle device
    peak GiB             of tensors; "reserved GiB" is the allocator's, graphs included. Both are the most of a run
    TFLOP/s, MFU %       by train/model/flops.py, without recomputation, attention as if not causal; "of" names the peak
    first, last loss     before the first step, and before the last
    start s              until the first measured step: weights, warm-up, compilation, capture
    × hf + peft, …       tokens/s over that peer's

"ours" saves what save="recompute" does, and "fast" what save="full" does.

"check" is "ok", or says why there are no numbers. A peer may run out of memory; that is its result. Whatever ours
raises is WRONG, and so is a first loss that differs by more than 2 % from bf16's. The exit code is then 1.
end_to_end.png shows the tokens per second.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.energy import shown
from benchmarks.lib.model_provider import PROVIDERS, import_for, kind_of, measure
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio
from benchmarks.lib.workers import Local, Worker, WorkerError, WorkerTimeout, serve
from benchmarks.peers.models import ADAPTED, SPECS, sizes, token_rows
from benchmarks.peers.te import te_first_or_hidden

PEFT = ("hf + peft bf16", "hf + peft bf16, liger")
# What is run without --providers, by model and by what is adapted; what matters most first, as a budget may end
DEFAULT: dict[tuple[str, str], tuple[str, ...]] = {
    ("1b", "qkvo"): (
        "hf + peft bf16",
        "ours, graphs by layer",
        "ours, one graph",
        "ours, eager",
        "hf + te fp8 + lora",
        "hf + peft bf16, liger",
        "hf + peft bf16, compiled",
        "ours, not fused, eager",
    ),
    ("1b", "all"): (),
    ("8b", "qkvo"): (
        "hf + peft bf16",
        "ours, fast, one graph",
        "ours, fast, FP8 head, one graph",
        "ours, graphs by layer",
        "hf + peft bf16, liger",
        "hf + te fp8 + lora",
        "hf + peft bf16, compiled",
        "ours, eager",
        "ours, one graph",
        "ours, blocks, one graph",
    ),
    ("8b", "all"): (
        "hf + peft bf16",
        "ours, fast, one graph",
        "ours, graphs by layer",
        "hf + peft bf16, liger",
    ),
    ("70b", "qkvo"): (
        "ours, fit, graphs by layer",
        "ours, fit, offload, graphs by layer",
        "ours, fit, eager",
        "ours, checkpoint, graphs by layer",
        "hf + peft bf16, liger, checkpointed",
        "hf + te fp8 + lora, checkpointed",
    ),
    ("70b", "all"): ("ours, fit, graphs by layer",),
    ("405b", "qkvo"): (),
    ("405b", "all"): (),
    ("tiny", "qkvo"): ("hf + peft bf16", "hf + te fp8 + lora", "ours, eager", "ours, one graph"),
    ("tiny", "all"): (),
}
RATIOS = {"× hf + peft": PEFT[0], "× liger": PEFT[1], "× hf + te": "hf + te fp8 + lora"}
# Where memory is short: FP8 weights must not lie in what is left of the blocks that they were quantized in
ALLOCATOR = {"70b": "max_split_size_mb:64"}
TIMEOUT = 150.0  # of one provider, from its first weight to its last step
LOSS_TOLERANCE = 0.02
NO_NUMBERS: Row = dict.fromkeys(
    (
        "tokens/s",
        "ms/step",
        "J/step",
        "CPU ms",
        "peak GiB",
        "reserved GiB",
        "TFLOP/s",
        "MFU %",
        "of",
        "first loss",
        "last loss",
        "start s",
        "note",
    ),
    "",
)


def numbers(found: dict[str, Any], tokens: int, flops: float) -> Row:
    """A row's columns from what `measure` returned; `tokens` per step, `flops` per token."""
    rate = tokens / found["seconds"]
    tflops, (of, peak) = rate * flops / 1e12, found["peak"]
    gib = {
        name: round(found[key] / 2**30, 2) if key in found else ""
        for name, key in (("peak GiB", "allocated"), ("reserved GiB", "reserved"))
    }
    return {
        **NO_NUMBERS,
        "tokens/s": round(rate, 1),
        "ms/step": round(found["seconds"] * 1e3, 3),
        "J/step": shown(found["joules"], 2),
        "CPU ms": round(found["host"] * 1e3, 3),
        **gib,
        "TFLOP/s": round(tflops, 2),
        "MFU %": round(100 * tflops / peak, 1) if peak else "",
        "of": of,
        "first loss": round(found["losses"][0], 4),
        "last loss": round(found["losses"][1], 4),
        "start s": round(found["start"], 1),
        "note": found["note"],
    }


def bench_model(
    model: str, adapted: str, providers: tuple[str, ...], ask: Callable[[str], dict[str, Any]]
) -> list[Row]:
    """`ask(provider)` is what `measure` returned."""
    spec, (base, trained, flops) = SPECS[model], sizes(SPECS[model], adapted)
    rows: list[Row] = []
    for provider in providers:
        found = ask(provider)
        columns, check = NO_NUMBERS, found["check"]
        if check == "ok":
            columns = numbers(found, spec.batch * spec.length, flops)
            if found["trained"] != trained:
                columns = NO_NUMBERS
                check = f"WRONG: trains {found['trained']} parameters, not {trained}"
        rows.append(
            {
                "model": spec.name,
                "tokens": f"{spec.batch} x {spec.length}",
                "LoRA on": adapted,
                "base": base,
                "trained": trained,
                "provider": provider,
                "check": check,
                **columns,
            }
        )
        print(f"{spec.name}, {adapted}, {provider}: {check} {columns['tokens/s']}", flush=True)
    return compared(rows)


def compared(rows: list[Row]) -> list[Row]:
    """The rows with how many times as fast as a peer each is; a first loss unlike bf16's is WRONG."""
    by_name = {row["provider"]: row for row in rows}
    bf16 = next((by_name[name]["first loss"] for name in PEFT if name in by_name), "")
    for row in rows:
        off = ratio(row["first loss"], bf16)
        if isinstance(off, float) and abs(off - 1) > LOSS_TOLERANCE:
            row |= {
                **NO_NUMBERS,
                "check": f"WRONG: first loss {row['first loss']}, bf16's is {bf16}",
            }
    for row in rows:
        for column, peer in RATIOS.items():
            of = by_name.get(peer, NO_NUMBERS)["tokens/s"]
            row[column] = ratio(row["tokens/s"], of)
    return rows


class Asker:
    """One process for each provider; the next one is started while one measures, so that it has imported by then."""

    def __init__(
        self, args: argparse.Namespace, device: torch.device, jobs: list[tuple[str, str]]
    ) -> None:
        self.args, self.device, self.jobs = args, device, jobs
        self.end = time.perf_counter() + args.budget_s
        self.logs = Path(tempfile.mkdtemp(prefix="end_to_end"))
        if args.output:
            self.logs = args.output / "logs"
        self.next = self._start()

    def _start(self) -> Any:
        if not self.jobs:
            return None
        model, name = self.jobs.pop(0)
        if self.device.type != "cuda":
            return Local({"measure": measure})
        command = [sys.executable, __file__, "--worker", name]
        log = f"{len(self.jobs):02d}_{name.replace(' ', '_')}.log"
        allocator = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR[model]} if model in ALLOCATOR else {}
        return Worker(command, self.logs / log, allocator)

    def ask(self, provider: str, **options: Any) -> dict[str, Any]:
        worker, self.next = self.next, None
        left = self.end - time.perf_counter()
        if left <= 0:
            worker.close()
            self.next = self._start()
            return {"check": f"not run: --budget-s {self.args.budget_s:g} was spent before"}
        worker.send("measure", provider=provider, **options)
        self.next = self._start()
        try:
            found: dict[str, Any] = worker.receive(min(self.args.timeout, left))
        except WorkerError as why:
            found = {"check": f"{kind_of(provider)}: {why}"}
            if isinstance(why, WorkerTimeout) and left < self.args.timeout:
                found = {"check": f"not finished: --budget-s {self.args.budget_s:g} was spent"}
        worker.close()
        return found


def main() -> int:
    options = parser("training of whole models, tokens per second and memory")
    options.add_argument("--models", nargs="+", choices=list(SPECS))
    options.add_argument("--adapted", nargs="+", choices=list(ADAPTED), default=list(ADAPTED))
    options.add_argument("--providers", nargs="+", choices=list(PROVIDERS), help="for every model")
    options.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds per provider")
    options.add_argument(
        "--budget-s", type=float, default=900.0, help="for all; the rest is not run"
    )
    options.add_argument("--worker", choices=list(PROVIDERS), help=argparse.SUPPRESS)
    args, device = arguments(options, on_gpu=30)
    if args.worker:
        with te_first_or_hidden(" te " in args.worker):
            import_for(args.worker)
            serve({"measure": measure})
        return 0
    models = args.models or (["1b", "8b", "70b"] if device.type == "cuda" else ["tiny"])
    chosen = {
        (model, adapted): tuple(args.providers or DEFAULT[model, adapted])
        for model in models
        for adapted in args.adapted
    }
    jobs = [(model, name) for (model, _), names in chosen.items() for name in names]
    asker = Asker(args, device, jobs)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for (model, adapted), names in chosen.items():
            spec = SPECS[model]
            text = Path(folder, f"{model}.pt")
            torch.save(token_rows(spec.length, 16 * spec.batch), text)
            fixed = {"model": model, "adapted": adapted, "device": args.device, "rows": str(text)}
            ask = partial(asker.ask, **fixed, at_most=args.repetitions)
            rows += bench_model(model, adapted, names, ask)
    code = finish("end_to_end", rows, environment(device), args.output)
    return code


if __name__ == "__main__":
    sys.exit(main())
