# SPDX-License-Identifier: Apache-2.0
"""What check_gpu.py runs, each in a process of its own: `finetune`, and a training loop as users write it.

Every function takes a shape's name, the device and a scratch folder. It returns what JSON can hold, each where there
is one: "tokens_per_s", "first_loss", "host_share" (the host's time to enqueue a step over the step's) and a "note".
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lorakernels
from benchmarks.lib.finetune_files import write_checkpoint, write_texts
from benchmarks.lib.timing import synchronize
from benchmarks.peers.models import ALPHA, RANK, P, Spec, plain_model, token_rows
from benchmarks.peers.training import HfPeft, Training
from lorakernels import LoRAConfig, apply_lora, fuse
from lorakernels.train.run.metrics import read_metrics

Found = dict[str, Any]
WIDTHS_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
WIDTHS_8B = {**WIDTHS_1B, "hidden_size": 4096, "intermediate_size": 14336}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
SHAPES = {
    "1b 1x2048": Spec("16 layers of 1B", {**WIDTHS_1B, "num_hidden_layers": 16}, 2048),
    "8b/8 2x4096": Spec("8 layers of 8B", {**WIDTHS_8B, "num_hidden_layers": 8}, 4096, 2),
    "1b/4 4x1024": Spec("4 layers of 1B", {**WIDTHS_1B, "num_hidden_layers": 4}, 1024, 4),
    "tiny 2x32": Spec("2 layers", {**TINY, "num_hidden_layers": 2}, 32, 2),
}
STEPS, SETTLED = 20, 8  # finetune's steps, and those before its rate counts: warm-up and capture
WARM_UP, WINDOWS, SECONDS = 8, 3, 0.6  # the loop's steps before it is timed, and how it is


class DropIn(Training):
    """transformers' Llama after `apply_lora`, and what else a user may call on it; the loop is `Training`'s."""

    fp8 = True

    def __init__(
        self,
        spec: Spec,
        adapted: str,
        device: torch.device,
        fused: bool = False,
        attached: bool = False,
        compiled: bool = False,
    ) -> None:
        self.fused, self.compiled = fused, compiled
        super().__init__(spec, adapted, device)
        self.attached = lorakernels.attach(self.model, self.optimizer) if attached else None

    def build(self) -> Any:
        model = plain_model(self.spec.config(), self.device)
        config = LoRAConfig(
            r=RANK, lora_alpha=ALPHA, lora_dropout=P, target_modules=list(self.targets)
        )
        apply_lora(model, config)
        if self.fused:
            fuse(model)
        if self.compiled:
            for layer in model.model.layers:
                layer.compile()
        return model


LOOPS: dict[str, Callable[..., Training]] = {
    "PEFT bf16": HfPeft,
    "PEFT bf16, compiled by layer": partial(HfPeft, compiled=True),
    "drop-in, eager": DropIn,
    "drop-in, fused": partial(DropIn, fused=True),
    "drop-in, fused, attached": partial(DropIn, fused=True, attached=True),
    "drop-in, attached": partial(DropIn, attached=True),
    "drop-in, compiled by layer": partial(DropIn, compiled=True),
}


def loop(name: str, shape: str, device: str) -> Found:
    """Train with `LOOPS[name]` on all linear layers."""
    torch.manual_seed(0)
    spec, where = SHAPES[shape], torch.device(device)
    training = LOOPS[name](spec, "all", where)
    rows = token_rows(spec.length, 8 * spec.batch).to(where)
    batches = rows.view(-1, spec.batch, spec.length)
    found = timed(training, batches, where)
    if attached := getattr(training, "attached", None):
        if where.type == "cuda" and attached.why_not:
            raise RuntimeError(f"attach replays no layer: {attached.why_not}")
        found["note"] = f"{attached.replayed} of {attached.microbatches} microbatches replayed"
    return found


def timed(training: Training, batches: torch.Tensor, device: torch.device) -> Found:
    """Tokens per second: the median of a few windows after the warm-up."""
    done = 0

    def steps(count: int) -> torch.Tensor:
        nonlocal done
        for _ in range(count):
            loss = training.step(batches[done % len(batches)])
            done += 1
        return loss

    first = float(steps(1))
    steps(WARM_UP)
    synchronize(device)
    began = time.perf_counter()
    steps(1)
    host = time.perf_counter() - began
    synchronize(device)
    took = time.perf_counter() - began
    count = max(2, int(SECONDS / took))
    seconds = []
    for _ in range(WINDOWS):
        began = time.perf_counter()
        last = steps(count)
        synchronize(device)
        seconds.append((time.perf_counter() - began) / count)
    if not math.isfinite(float(last)):
        raise RuntimeError(f"the loss is {float(last)} after {done} steps")
    return {
        "tokens_per_s": batches[0].numel() / statistics.median(seconds),
        "host_share": min(1.0, host / took),
        "first_loss": first,
        "note": training.note,
    }


def finetune(shape: str, device: str, scratch: str, limit: float) -> Found:
    """`lorakernels finetune` on a checkpoint of that shape, with default options, in `limit` seconds."""
    folder, end = Path(scratch), time.monotonic() + limit
    options = prepared(shape, device, folder)
    run_cli(["finetune", *options, "--output", str(folder / "run")], folder / "log", end)
    records = steps_of(folder / "run")
    if len(records) != STEPS:
        raise RuntimeError(f"metrics.jsonl has {len(records)} steps, {STEPS} were asked for")
    if bad := [r["step"] for r in records if r["loss"] is None or r["skipped"]]:
        raise RuntimeError(f"no finite loss and gradient at the steps {bad}")
    replayed = sum(bool(record["replayed"]) for record in records)
    losses = f"loss {records[0]['loss']:.3f} → {records[-1]['loss']:.3f}"
    return {
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in records[SETTLED:]),
        "note": f"{replayed} of {STEPS} steps replayed, {losses}",
    }


def prepared(shape: str, device: str, folder: Path) -> list[str]:
    """A checkpoint and a text in `folder`, as options of `finetune`."""
    spec = SHAPES[shape]
    write_checkpoint(spec, torch.device(device), folder / "model")
    data = write_texts(folder, 2 * STEPS * spec.batch * spec.length, spec.length)["mixed"]
    sizes = ["--seq-len", spec.length, "--batch-size", spec.batch, "--steps", STEPS]
    options = ["--model", folder / "model", "--data", data, "--device", device, *sizes]
    return [str(word) for word in options]


def steps_of(output: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(output / "metrics.jsonl") if "tokens_per_s" in r]


def run_cli(arguments: list[str], log: Path, end: float) -> None:
    """`lorakernels …` in a process, killed at time.monotonic() == end; RuntimeError with its last line if it fails."""
    command = [sys.executable, "-m", "lorakernels.cli", *arguments]
    with log.open("a") as stream:
        left = end - time.monotonic()
        code = subprocess.run(command, stdout=stream, stderr=stream, timeout=left).returncode
    text = log.read_text(errors="replace")
    print(text)
    if code:
        said = [line for line in text.splitlines() if line.strip()]
        raise RuntimeError(f"exit code {code}: {said[-1] if said else 'it printed nothing'}")
