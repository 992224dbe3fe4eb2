# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of `lorakernels finetune`, started as users start it, and of loops and TRL on the same text.

    python benchmarks/models/bench_finetune.py --output DIR [--models 8b8 1b] [--steps 25] [--providers …]

lib/finetune_files.py writes a checkpoint and a text for each model. "8b8" has 8 layers of Llama-3.1-8B's widths and
trains on 2 rows of 4096 tokens a step. "1b" is Llama-3.2-1B with 4 rows of 2048. The text is this Python's sources,
byte by byte. Functions and methods are packed into rows; in "long documents", each document fills a row. LoRA has R =
16 and p = 0.1, on all linear layers. Each provider has a process of its own, one after the other:

    cli, …               `python -m lorakernels.cli finetune` with the model, the data, sizes and adapters as options.
                         What follows the comma is added to them.
    ours, one graph      the loop of bench_end_to_end.py, one causal sequence a row
    hf + peft bf16       transformers' model in a loop over the same rows
    trl sft, …           TRL's SFTTrainer on the same checkpoint and text, which it packs itself. "peft bf16" has PEFT's
                         layers, SDPA and bf16 adapters. "ours fused, graphs" is as in examples/trl_sft.py; it is WRONG
                         if a GPU does not replay it.

Columns:

    tokens/s             trained tokens without padding; the median of the last half of the steps
    positions/s          with padding; the ratios "× hf + peft" and "÷ ours, one graph" are of these
    rest s               what was not a step of the command's time: imports, weights, text, adapter files
    replayed             steps whose graphs were replayed, as the command or LoRAKernelsCallback counts them
    attention            what the command says it uses

On one H200 and a vocabulary of 32,000, "cli, default" is to reach 88,000 tokens/s, which check_gpu.py measures.
Without `isolate-documents` 98,000 are asked for, and 0.97 of "ours, one graph". 8b8's vocabulary of 128,256 costs 13
TFLOP a step more.

"check" is "ok", or says why there are no numbers. A command that fails is WRONG, and so is a first loss that differs
by more than 2 % from transformers'. TRL packs its own rows, so that ours is compared with PEFT's there. The exit code
is then 1.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.finetune_files import JOBS, write_checkpoint, write_texts
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio
from benchmarks.lib.timing import synchronize
from benchmarks.lib.workers import Local, Worker, WorkerError, WorkerTimeout, reason_of, serve
from benchmarks.peers.base import Unavailable
from benchmarks.peers.models import ALPHA, RANK, P, Spec, dtype_of
from benchmarks.peers.training import HfPeft, Ours, Training
from lorakernels.train.data.byte_tokenizer import byte_tokenizer
from lorakernels.train.data.packing import PackedRows, RowOrder
from lorakernels.train.data.tokens import tokenize_files
from lorakernels.train.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PEFT, LOOP = "hf + peft bf16", "ours, one graph"
# Whether the layers are ours
TRL_PEFT = "trl sft, peft bf16"
TRL = {TRL_PEFT: False, "trl sft, ours fused, graphs": True}
LOOPS: dict[str, Callable[..., Training]] = {
    PEFT: HfPeft,
    LOOP: partial(Ours, graphs="iteration"),
}
# Text and options of each; what matters most first, as a budget may end
COMMANDS: dict[str, tuple[str, list[str]]] = {
    "cli, default": ("mixed", []),
    "cli, --no-isolate-documents": ("mixed", ["--no-isolate-documents"]),
    "cli, long documents": ("long", []),
    "cli, --deterministic": ("mixed", ["--deterministic"]),
    "cli, --graphs layer": ("mixed", ["--graphs", "layer"]),
    "cli, --eager": ("mixed", ["--eager"]),
}
PROVIDERS = [*list(COMMANDS)[:1], LOOP, *list(COMMANDS)[1:2], PEFT, *TRL, *list(COMMANDS)[2:]]
TIMEOUT = 150.0  # of one provider, from the start of its process to its end
SPARE = 1.1  # text for more rows than a run takes
LOSS_TOLERANCE = 0.02
NO_NUMBERS: Row = dict.fromkeys(
    (
        "tokens/s",
        "positions/s",
        "ms/step",
        "rest s",
        "peak GiB",
        "replayed",
        "attention",
        "first loss",
        "last loss",
    ),
    "",
)


def command(spec: Spec, files: Path, provider: str, steps: int, device: str) -> list[str]:
    """What a user would type, and where it writes: <files>/<provider>."""
    text, options = COMMANDS[provider]
    given = {
        "model": files / "model",
        "data": files / f"{text}.jsonl",
        "output": files / provider,
        "seq-len": spec.length,
        "batch-size": spec.batch,
        "steps": steps,
        "r": RANK,
        "lora-alpha": ALPHA,
        "lora-dropout": P,
        "eval-fraction": 0,
        "save-every": 0,
        "device": device,
    }
    words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    return [sys.executable, "-m", "lorakernels.cli", "finetune", *words, *options]


def run_command(words: list[str], output: Path, log: Path, timeout: float) -> dict[str, Any]:
    """What the command left in metrics.jsonl and said; a "check" that is not "ok" comes alone."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with log.open("w") as file:
        try:
            code = subprocess.run(
                words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=timeout
            ).returncode
        except subprocess.TimeoutExpired:
            return {"check": f"not finished within {timeout:.0f} s"}
    took = time.perf_counter() - began
    said = log.read_text(errors="replace").splitlines()
    if code:
        last = next((line for line in reversed(said) if line.strip()), "it printed nothing")
        return {"check": f"WRONG: exit code {code}: {last.strip()[:200]}"}
    steps = [r for r in read_metrics(output / "metrics.jsonl") if "step_s" in r]
    attention = (
        line.removeprefix("attention: ") for line in said if line.startswith("attention: ")
    )
    return {**numbers_of(steps), "rest": took - sum(r["step_s"] for r in steps),
            "attention": next(attention, "")}  # fmt: skip


def numbers_of(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the last half of a run's lines in metrics.jsonl."""
    timed = steps[len(steps) // 2 :]
    found = {
        "check": "ok",
        "seconds": statistics.median(r["step_s"] for r in timed),
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in timed),
        "losses": [steps[0]["loss"], steps[-1]["loss"]],
        "replayed": sum(r["replayed"] for r in steps),
    }
    if "peak_memory_gib" in steps[-1]:
        found["peak"] = steps[-1]["peak_memory_gib"]
    return found


def measure(provider: str, job: str, device: str, files: str, steps: int) -> dict[str, Any]:
    """`steps` steps of a loop or of SFTTrainer on what is in `files`; a "check" that is not "ok" comes alone."""
    measured = _sft if provider in TRL else _loop
    try:
        torch.manual_seed(0)
        return measured(provider, JOBS[job], torch.device(device), Path(files), steps)
    except Unavailable as why:
        return {"check": str(why)}
    except Exception as problem:
        return {"check": f"{_blamed(provider)}: {reason_of(problem)}"}


def _blamed(provider: str) -> str:
    return "WRONG" if "ours" in provider else "raised"


def _loop(
    provider: str, spec: Spec, device: torch.device, files: Path, steps: int
) -> dict[str, Any]:
    began = time.perf_counter()
    given = torch.load(files / "rows.pt")
    training = LOOPS[provider](spec, "all", device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    rows = given["rows"].pin_memory() if device.type == "cuda" else given["rows"]
    losses: list[torch.Tensor] = []

    def run(first: int, last: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for number in range(first, last):
            batch = rows[number * spec.batch : (number + 1) * spec.batch]
            losses.append(training.step(batch.to(device, non_blocking=True)).clone())
        synchronize(device)
        return time.perf_counter() - start

    run(0, steps // 2)
    rest = time.perf_counter() - began
    seconds = run(steps // 2, steps) / (steps - steps // 2)
    found = {
        "check": "ok",
        "seconds": seconds,
        "tokens_per_s": given["fill"] * spec.batch * spec.length / seconds,
        "losses": [float(losses[0]), float(losses[-1])],
        "rest": rest,
    }
    if device.type == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found


def _sft(
    provider: str, spec: Spec, device: torch.device, files: Path, steps: int
) -> dict[str, Any]:
    """Loaded as TRL's users do; PEFT's row is not padded, so its "positions_per_s" are its own."""
    began = time.perf_counter()
    from transformers import AutoModelForCausalLM

    from benchmarks.lib import trainers

    trainers.trl_or_unavailable()
    model = AutoModelForCausalLM.from_pretrained(
        files / "model", dtype=dtype_of(device), attn_implementation="sdpa"
    ).to(device)
    found = trainers.sft(spec, model, files / "mixed.jsonl", steps, files / "sft", TRL[provider])
    rest = time.perf_counter() - began - found["training"]
    return {"check": "ok", **found, "rest": rest}


def write_rows(spec: Spec, text: Path, folder: Path, steps: int) -> None:
    """rows.pt: the rows that the command's steps take, in their order, int64 [steps · B, T], and how full they are."""
    tokens = tokenize_files([text], byte_tokenizer(), folder / "tokens")
    rows = PackedRows(tokens.tokens, tokens.spans, spec.length)
    count = steps * spec.batch
    batch = rows.batch(RowOrder(len(rows), 0).take(0, count)[0])
    fill = batch.targets / batch.input_ids.numel()
    torch.save({"rows": batch.input_ids, "fill": fill}, folder / "rows.pt")


def columns(spec: Spec, found: dict[str, Any]) -> Row:
    if found["check"] != "ok":
        return {"check": found["check"], **NO_NUMBERS}
    positions = found.get("positions_per_s", spec.batch * spec.length / found["seconds"])
    return {
        "check": "ok",
        "tokens/s": round(found["tokens_per_s"], 1),
        "positions/s": round(positions, 1),
        "ms/step": round(found["seconds"] * 1e3, 3),
        "rest s": round(found["rest"], 1),
        "peak GiB": round(found["peak"], 2) if "peak" in found else "",
        "replayed": found.get("replayed", ""),
        "attention": found.get("attention", ""),
        "first loss": round(found["losses"][0], 4),
        "last loss": round(found["losses"][1], 4),
    }


def compared(rows: list[Row]) -> list[Row]:
    """With ratios; a loss that is not finite, or a first one unlike the others', is WRONG.

    TRL packs rows of its own, so that its first losses are compared with each other.
    """
    by_name = {row["provider"]: row for row in rows}
    packed = (PEFT, [row for row in rows if row["provider"] not in TRL])
    packed_by_trl = (TRL_PEFT, [row for row in rows if row["provider"] in TRL])
    for peer, alike in (packed, packed_by_trl):
        _refuse_other_losses(alike, by_name.get(peer, NO_NUMBERS)["first loss"])
    for row in rows:
        for column, peer in (("× hf + peft", PEFT), ("÷ ours, one graph", LOOP)):
            of = by_name.get(peer, NO_NUMBERS)["positions/s"]
            row[column] = ratio(row["positions/s"], of)
    return rows


def _refuse_other_losses(rows: list[Row], expected: Any) -> None:
    """WRONG is a row whose first loss is not `expected`, or if that is "", not the first row's."""
    losses = [row["first loss"] for row in rows if row["first loss"] != ""]
    expected = expected or (losses[0] if losses else "")
    for row in rows:
        off = ratio(row["first loss"], expected)
        finite = all(math.isfinite(float(str(row[k] or 0))) for k in ("first loss", "last loss"))
        if isinstance(off, float) and not (finite and abs(off - 1) <= LOSS_TOLERANCE):
            check = f"WRONG: losses {row['first loss']}, {row['last loss']}, expected {expected}"
            row |= {**NO_NUMBERS, "check": check}


class Bench:
    """One job after the other, each provider in a process of its own, until the budget is spent."""

    def __init__(self, args: argparse.Namespace, device: torch.device, folder: Path) -> None:
        self.args, self.device, self.folder = args, device, folder
        self.end = time.perf_counter() + args.budget_s
        self.logs = (args.output or folder) / "logs"

    def job(self, name: str, providers: list[str]) -> list[Row]:
        spec, files, steps = JOBS[name], self.folder / name, self.args.steps
        began = time.perf_counter()
        write_checkpoint(spec, self.device, files / "model")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        texts = write_texts(files, int(SPARE * steps * spec.batch * spec.length), spec.length)
        write_rows(spec, texts["mixed"], files, steps)
        took = time.perf_counter() - began
        print(f"{spec.name}: checkpoint and text written in {took:.1f} s", flush=True)
        rows: list[Row] = []
        for provider in providers:
            found = self.one(name, provider, files)
            case = {"model": spec.name, "rows": f"{spec.batch} x {spec.length}"}
            rows.append({**case, "provider": provider, **columns(spec, found)})
            said = rows[-1]["tokens/s"], rows[-1]["rest s"]
            print(f"{spec.name}, {provider}: {found['check']} {said}", flush=True)
        return compared(rows)

    def one(self, job: str, provider: str, files: Path) -> dict[str, Any]:
        left = self.end - time.perf_counter()
        if left <= 0:
            return {"check": f"not run: --budget-s {self.args.budget_s:g} was spent before"}
        timeout = min(self.args.timeout, left)
        log = self.logs / f"{job}_{provider.replace(' ', '_')}.log"
        steps, device = self.args.steps, self.args.device
        if provider in COMMANDS:
            words = command(JOBS[job], files, provider, steps, device)
            return run_command(words, files / provider, log, timeout)
        worker: Any = Local({"measure": measure})
        if self.device.type == "cuda":
            worker = Worker([sys.executable, __file__, "--worker", provider], log)
        given = {"provider": provider, "job": job, "device": device, "files": str(files)}
        try:
            found: dict[str, Any] = worker.ask("measure", timeout, **given, steps=steps)
        except WorkerError as why:
            found = {"check": f"{_blamed(provider)}: {why}"}
            if isinstance(why, WorkerTimeout) and left < self.args.timeout:
                found = {"check": f"not finished: --budget-s {self.args.budget_s:g} was spent"}
        worker.close()
        return found


def main() -> int:
    options = parser("lorakernels finetune from its command line, tokens per second")
    options.add_argument("--models", nargs="+", choices=list(JOBS))
    options.add_argument("--steps", type=int, default=25, help="of each run")
    options.add_argument("--providers", nargs="+", choices=PROVIDERS, default=PROVIDERS)
    options.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds per provider")
    options.add_argument(
        "--budget-s", type=float, default=480.0, help="for all; the rest is not run"
    )
    options.add_argument("--worker", choices=[*LOOPS, *TRL], help=argparse.SUPPRESS)
    args, device = arguments(options)
    if args.steps < 2:
        options.error(f"--steps must be at least 2, found {args.steps}")
    if args.worker:
        serve({"measure": measure})
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="finetune") as folder:
        bench = Bench(args, device, Path(folder))
        for name in args.models or (["8b8", "1b"] if device.type == "cuda" else ["tiny"]):
            rows += bench.job(name, args.providers)
    return finish("finetune", rows, environment(device), args.output)


if __name__ == "__main__":
    sys.exit(main())
