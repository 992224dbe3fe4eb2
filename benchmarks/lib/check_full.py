# SPDX-License-Identifier: Apache-2.0
"""The parts that check_gpu.py --full has besides: resume, export and reload, Trainer, TRL's SFTTrainer, the gpu tests.

`run` runs any part by its name, those of check_parts.py among them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.check_parts import (
    LOOPS,
    SHAPES,
    STEPS,
    Found,
    finetune,
    loop,
    prepared,
    run_cli,
    steps_of,
)
from benchmarks.lib.finetune_files import write_texts
from benchmarks.peers.base import Unavailable
from benchmarks.peers.models import dtype_of, plain_model, token_rows
from lorakernels import LoRAConfig, PhiloxState, apply_lora, fuse

ROOT = Path(__file__).resolve().parents[2]
TRAINER_STEPS = 16
TEST_PROCESSES = 12  # at most: each has a context on the GPU


def resume(shape: str, device: str, scratch: str, limit: float) -> Found:
    """A deterministic run that is told to stop in the middle and goes on has the losses of one that is not."""
    folder, end = Path(scratch), time.monotonic() + limit
    options = ["finetune", *prepared(shape, device, folder), "--deterministic"]
    whole, cut = folder / "whole", folder / "cut"
    run_cli([*options, "--output", str(whole)], folder / "log", end)
    command = [*options, "--output", str(cut)]
    stopped_at = _interrupted(command, cut, folder / "log", end)
    run_cli([*command, "--resume"], folder / "log", end)
    found = [{r["step"]: r["loss"] for r in steps_of(output)} for output in (whole, cut)]
    if found[0] != found[1] or len(found[0]) != STEPS:
        raise RuntimeError(
            f"stopped after step {stopped_at}; losses {found[0]}, resumed {found[1]}"
        )
    return {"note": f"stopped after step {stopped_at}; the same losses to the bit"}


def _interrupted(command: list[str], output: Path, log: Path, end: float) -> int:
    """Start `lorakernels …`, send SIGTERM in the middle; returns the last step it did."""
    with log.open("a") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "lorakernels.cli", *command], stdout=stream, stderr=stream
        )
        try:
            while not steps_of(output) and process.poll() is None:
                if time.monotonic() > end:
                    raise TimeoutError("the run to be interrupted did no step")
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            code = process.wait(max(1.0, end - time.monotonic()))
        finally:
            process.kill()
    expected = 128 + signal.SIGTERM
    done = steps_of(output)
    if code != expected or len(done) >= STEPS:
        raise RuntimeError(
            f"exit code {code} after {len(done)} steps, expected {expected} before {STEPS}"
        )
    return int(done[-1]["step"])


def export(shape: str, device: str, scratch: str, limit: float) -> Found:
    """What `finetune` trained, exported for a server, has the logits of the adapter in PEFT."""
    folder, end = Path(scratch), time.monotonic() + limit
    options = prepared(shape, device, folder)
    run_cli(["finetune", *options, "--output", str(folder / "run")], folder / "log", end)
    adapter, model = folder / "run" / "adapter", folder / "model"
    target = folder / "exported"
    where = ["--adapter", str(adapter), "--model", str(model), "--output", str(target)]
    run_cli(["export", *where, "--format", "bf16"], folder / "log", end)
    rows = token_rows(256, 2).to(device)
    merged, peft = _logits(target, None, rows), _logits(model, adapter, rows)
    worst = float((merged - peft).abs().max() / peft.abs().max())
    if not worst <= 0.05:  # bf16 weights: the merged ones round once more, 2^-9 a weight
        raise RuntimeError(f"logits of the export differ from PEFT's by {worst:.3f} of the largest")
    return {"note": f"logits within {worst:.1e} of PEFT's largest"}


def _logits(model: Path, adapter: Path | None, rows: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype_of(rows.device))
    if adapter is not None:
        import peft

        loaded = peft.PeftModel.from_pretrained(loaded, adapter)
    with torch.no_grad():
        logits: torch.Tensor = loaded.to(rows.device).eval()(input_ids=rows).logits
    return logits.float()


def trainer(shape: str, device: str, scratch: str, limit: float, ours: bool) -> Found:
    """transformers' Trainer over rows of one length: PEFT's model, or ours fused with LoRAKernelsCallback."""
    import transformers

    from benchmarks.lib.trainers import LORA, Clock, settled, trainer_arguments

    spec, where = SHAPES[shape], torch.device(device)
    torch.manual_seed(0)
    model = plain_model(spec.config(), where)
    clock = Clock(where)
    callbacks, kernels = [clock], None
    if ours:
        from lorakernels.integrations.transformers import LoRAKernelsCallback

        rng = PhiloxState(1, where)
        report = apply_lora(model, LoRAConfig(**LORA), rng_state=rng)
        fuse(model)
        kernels = LoRAKernelsCallback(model, report, rng_state=rng)
        callbacks.append(kernels)
    else:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    rows = [{"input_ids": r, "labels": r} for r in token_rows(spec.length, 8 * spec.batch)]
    arguments = transformers.TrainingArguments(
        bf16=where.type == "cuda",
        logging_strategy="no",
        **trainer_arguments(TRAINER_STEPS, spec.batch, where, Path(scratch)),
    )
    result = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=callbacks).train()
    if not math.isfinite(result.training_loss):
        raise RuntimeError(f"the mean loss of {TRAINER_STEPS} steps is {result.training_loss}")
    note = f", layers eager: {kernels.why_not}" if kernels and kernels.why_not else ""
    return {
        "tokens_per_s": spec.batch * spec.length / settled(clock.seconds),
        "note": f"mean loss {result.training_loss:.3f}{note}",
    }


def sft(shape: str, device: str, scratch: str, limit: float, ours: bool) -> Found:
    """TRL's SFTTrainer over packed text with PEFT's model, its layers ours, fused, with LoRAKernelsCallback, or its
    own."""
    from benchmarks.lib import trainers

    trainers.trl_or_unavailable()
    spec, where, folder = SHAPES[shape], torch.device(device), Path(scratch)
    torch.manual_seed(0)
    model = plain_model(spec.config(), where)
    characters = 2 * TRAINER_STEPS * spec.batch * spec.length
    texts = write_texts(folder, characters, spec.length)["mixed"]
    found = trainers.sft(spec, model, texts, TRAINER_STEPS, folder, ours)
    first, last = found["losses"]
    if not math.isfinite(first + last):
        raise RuntimeError(f"the loss went from {first} to {last}")
    eager = f", layers eager: {found['why_not']}" if found.get("why_not") else ""
    return {
        "tokens_per_s": found["tokens_per_s"],
        "first_loss": first,
        "note": f"loss {first:.3f} → {last:.3f}{eager}",
    }


class _Until:
    """A pytest plugin: counts outcomes, and stops before the next test once the time is up."""

    def __init__(self, end: float) -> None:
        self.end, self.session = end, None  # type: ignore[var-annotated]
        self.outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome].append(report.nodeid)
        if report.when == "teardown" and time.monotonic() > self.end:
            self.session.shouldstop = "the time is up"

    def summary(self) -> str:
        counts = ", ".join(f"{len(ids)} {name}" for name, ids in self.outcomes.items() if ids)
        stopped = self.session is not None and self.session.shouldstop
        return f"{counts}; stopped before the last" if stopped else counts


def processes_on(cores: int) -> int:
    """Two cores are left to the driver and to the process that collects the outcomes."""
    return max(1, min(TEST_PROCESSES, cores - 2))


def gpu_tests(shape: str, device: str, scratch: str, limit: float) -> Found:
    """`pytest -m gpu` until the time is up, in several processes where pytest-xdist is there; without a GPU, tests of
    the layering."""
    import pytest

    until = _Until(time.monotonic() + limit - 15)
    on_gpu = device.startswith("cuda")
    chosen = ["-m", "gpu"] if on_gpu else ["tests/test_layering.py"]
    if on_gpu and importlib.util.find_spec("xdist") is not None:
        chosen += ["-n", str(processes_on(os.cpu_count() or 1)), "--dist", "loadfile"]
    options = ["-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    with contextlib.chdir(ROOT) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        code = pytest.main([*chosen, *options], plugins=[until])
    summary = until.summary()
    if until.outcomes["failed"]:
        raise RuntimeError(f"{summary}: {json.dumps(until.outcomes['failed'][:3])}")
    if not until.outcomes["passed"]:
        raise RuntimeError(f"no test passed ({summary}), pytest's exit code is {int(code)}")
    return {"note": summary}


PARTS: dict[str, Callable[[str, str, str, float], Found]] = {
    "resume": resume,
    "export and reload": export,
    "Trainer, PEFT bf16": partial(trainer, ours=False),
    "Trainer, fused, callback": partial(trainer, ours=True),
    "SFTTrainer, PEFT bf16": partial(sft, ours=False),
    "SFTTrainer, fused, callback": partial(sft, ours=True),
    "gpu tests": gpu_tests,
}


def run(part: str, shape: str, device: str, scratch: str, limit: float) -> Found:
    """The part of that name; what is not installed comes as {"skipped": why}."""
    try:
        if part in LOOPS:
            return loop(part, shape, device)
        if part == "finetune":
            return finetune(shape, device, scratch, limit)
        return PARTS[part](shape, device, scratch, limit)
    except Unavailable as why:
        return {"skipped": str(why)}
