# SPDX-License-Identifier: Apache-2.0
"""Steps, evaluations, checkpoints and signals of a run, in order, from its start or from a checkpoint."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lorakernels.train.checkpoint import Checkpoint, Checkpoints
from lorakernels.train.errors import CheckpointError, Interrupted
from lorakernels.train.flops import Peak
from lorakernels.train.loop import StepResult, Trainer, evaluate
from lorakernels.train.metrics import MetricsLog
from lorakernels.train.options import FinetuneOptions
from lorakernels.train.packing import PackedRows
from lorakernels.train.reporter import Reporter

# These options may change when a run is resumed. Any other change would make it another run.
FREE_ON_RESUME = {
    "model", "data", "output", "resume", "demo", "steps", "epochs", "eval_every", "eval_rows", "save_every", "keep",
    "log_every", "device", "max_bad_steps", "loss_chunk", "gradient_checkpointing", "deterministic", "eager",
    "graphs", "shard_base", "layout", "merge",
    "eval_data", "chat_template", "train_on_inputs", "skip_bad_rows",  # the keys of the token files tell
    "batch_size", "grad_accum",  # batch_size · grad_accum · ranks is part of the identity
    "eval_every_sequences", "load_best_model_at_end", "early_stopping_patience", "early_stopping_threshold",
    "target_loss", "on_divergence", "logger", "run_name",
}  # fmt: skip


def check_same_options(checkpoints: Checkpoints, options: FinetuneOptions) -> None:
    """Raise CheckpointError if the newest checkpoint has other options. This needs no model."""
    if found := checkpoints.peek():
        _check_equal(found[0], _with_defaults(found[1]["options"]), _kept_options(options))


def _kept_options(options: FinetuneOptions) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in FREE_ON_RESUME}


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a checkpoint. An option that is newer than the checkpoint had its default."""
    return {**_kept_options(FinetuneOptions()), **options}


def _check_equal(step: int, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in sorted(set(before) | set(now)):
        if before.get(name) != now.get(name):
            hint = "restore it"
            if name == "rows_per_step":
                hint = "it is batch_size · grad_accum · ranks: restore it by one of them"
            raise CheckpointError(
                f"cannot resume step {step}: {name} was {before.get(name)!r}, now it is {now.get(name)!r}; {hint} or "
                "start in another output directory"
            )


class StopSignal:
    """Inside the context, the first SIGINT or SIGTERM is only noted. A second one acts as it did before."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def __exit__(self, *exc: object) -> None:
        self._restore()


@dataclass
class Session:
    """One run in one output directory.

    ``identity`` describes data and model; a checkpoint with another identity is refused. With ``checkpoints=None`` the
    run saves none.
    """

    trainer: Trainer
    held: PackedRows | None
    options: FinetuneOptions
    reporter: Reporter
    metrics: Path
    flops_per_token: float
    peak: Peak | str
    checkpoints: Checkpoints | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    first_eval: float | None = None
    last_eval: float | None = None
    saved_step: int | None = None

    def resume(self) -> None:
        """Resume from the newest good checkpoint, if there is one.

        Raises:
            CheckpointError: the checkpoint belongs to another run.
        """
        if self.checkpoints is None:
            return
        checkpoint = self._load_newest(self.checkpoints)
        if checkpoint is None:
            self.reporter.say(
                f"no usable checkpoint in {self.checkpoints.directory}: starting at step 0"
            )
            return
        self._check_same_run(checkpoint)
        self.trainer.restore(checkpoint)
        self.saved_step = checkpoint.step
        self.first_eval = checkpoint.trainer["first_eval"]
        self.last_eval = checkpoint.trainer["last_eval"]
        self.reporter.say(
            f"going on from step {checkpoint.step} ({self.checkpoints.path(checkpoint.step)})"
        )
        if checkpoint.trainer["steps"] != self.trainer.steps:
            self.reporter.say(
                f"the run now has {self.trainer.steps} steps instead of {checkpoint.trainer['steps']}: "
                "the learning rate follows the new length from here on"
            )

    def _load_newest(self, checkpoints: Checkpoints) -> Checkpoint | None:
        """Rank 0 finds the newest good checkpoint, and the others load the same one."""
        ranks, device = self.trainer.ranks, self.trainer.device
        found: list[Checkpoint | None] = [None]

        def look() -> None:
            found[0] = checkpoints.load_newest(self.reporter.say, device)

        ranks.on_first(look)
        step = ranks.from_first(-1 if found[0] is None else found[0].step)
        if step >= 0 and not ranks.first:
            found[0] = checkpoints.load(step, device)
        return found[0]

    def _check_same_run(self, checkpoint: Checkpoint) -> None:
        now = self._description()
        before = checkpoint.trainer
        _check_equal(checkpoint.step, before["identity"], now["identity"])
        _check_equal(checkpoint.step, _with_defaults(before["options"]), now["options"])

    def _description(self) -> dict[str, Any]:
        options = _kept_options(self.options)
        identity = {**self.identity, "rows_per_step": self.trainer.rows_per_step}
        return {"identity": identity, "options": options}

    def save(self) -> None:
        if self.checkpoints is None:
            return
        extra = {
            "steps": self.trainer.steps,
            "first_eval": self.first_eval,
            "last_eval": self.last_eval,
            **self._description(),
        }
        checkpoints, checkpoint = self.checkpoints, self.trainer.checkpoint(extra)

        def write() -> None:
            checkpoints.save(checkpoint)

        self.trainer.ranks.on_first(write)
        self.saved_step = self.trainer.counters.step

    def run(self) -> None:
        """Train to the last step.

        Raises:
            Interrupted: a signal arrived; the state is saved if the run keeps checkpoints.
        """
        trainer, total = self.trainer, self.trainer.steps
        log = MetricsLog(self.metrics if trainer.ranks.first else None, trainer.counters.step)
        alone = trainer.ranks.size == 1
        self.reporter.start(trainer.counters.step, total)
        try:
            with StopSignal() as stop:
                if self.first_eval is None:
                    self.first_eval = self._evaluate(log)
                asked = stop.signum is not None and alone
                while trainer.counters.step < total and not asked:
                    result = trainer.step(stop.signum is not None)
                    self._log(log, result)
                    self._every(log, total)
                    # Several ranks stop after the same step: the all-reduce of the loss tells each of them.
                    asked = stop.signum is not None if alone else result.stop
                if asked:
                    self._stop(stop.signum or signal.SIGTERM)
        finally:
            self.reporter.stop()
            log.close()
            trainer.close()

    def _every(self, log: MetricsLog, total: int) -> None:
        step, options = self.trainer.counters.step, self.options
        last = step == total
        if last or (options.eval_every and step % options.eval_every == 0):
            self.last_eval = self._evaluate(log)
        if last or (options.save_every and step % options.save_every == 0):
            self.save()

    def _stop(self, signum: int) -> None:
        step = self.trainer.counters.step
        if self.checkpoints is None:
            raise Interrupted(
                signum, f"stopped after step {step}; this part of the run keeps no checkpoints"
            )
        if self.saved_step != step:
            self.save()
        raise Interrupted(signum, f"saved {self.checkpoints.path(step)}; go on with --resume")

    def _evaluate(self, log: MetricsLog) -> float | None:
        if self.held is None or not len(self.held):
            return None
        loss = evaluate(self.trainer.model, self.held, self.options, self.trainer.ranks)
        log.write(step=self.trainer.counters.step, eval_loss=loss)
        self.reporter.say(
            f"{self.reporter.label} step {self.trainer.counters.step}  validation loss {loss:.4f}"
        )
        return loss

    def _log(self, log: MetricsLog, result: StepResult) -> None:
        counters = self.trainer.counters
        rate = result.tokens / result.seconds
        rates = {"tokens_per_s": rate, "tflops": rate * self.flops_per_token / 1e12}
        if isinstance(self.peak, Peak):
            rates["mfu"] = rates["tflops"] / (self.peak.tflops * self.trainer.ranks.size)
        if self.trainer.device.type == "cuda":
            rates["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.trainer.device) / 2**30
        log.write(
            step=counters.step,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            skipped_total=counters.skipped,
            tokens=counters.tokens,
            epoch=counters.rows / len(self.trainer.rows),
            step_s=result.seconds,
            replayed=result.replayed,
            **rates,
        )
        self.reporter.step(counters.step, self.trainer.steps, result, rates)
