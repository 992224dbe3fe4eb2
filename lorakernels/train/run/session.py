# SPDX-License-Identifier: Apache-2.0
"""Steps, evaluations, checkpoints and signals of a run, in order, from its start or from a checkpoint."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lorakernels.train.data.packing import PackedRows
from lorakernels.train.errors import Diverged, FinetuneError, Interrupted
from lorakernels.train.files.checkpoint import Checkpoint, Checkpoints
from lorakernels.train.model.flops import Peak
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.progress import in_batches
from lorakernels.train.run.evaluations import Evaluations
from lorakernels.train.run.loggers import Loggers, open_loggers
from lorakernels.train.run.loop import StepResult, Trainer, evaluate
from lorakernels.train.run.metrics import MetricsLog
from lorakernels.train.run.reporter import Reporter
from lorakernels.train.run.same_run import check_equal, kept_options, with_defaults
from lorakernels.train.run.stop_signal import StopSignal

ROLLBACKS = 2


@dataclass
class Session:
    """One run in one output directory.

    ``identity`` describes data and model; a checkpoint with another identity is refused. ``seconds`` is the time of
    earlier processes up to the checkpoint that this one began with. ``adapter_step`` is the step whose weights
    `take_best` left in the model.
    """

    trainer: Trainer
    held: PackedRows | None
    options: FinetuneOptions
    reporter: Reporter
    metrics: Path
    flops_per_token: float
    peak: Peak | str
    checkpoints: Checkpoints
    identity: dict[str, Any] = field(default_factory=dict)
    evaluations: Evaluations = field(default_factory=Evaluations)
    loggers: Loggers = field(default_factory=Loggers)
    saved_step: int | None = None
    adapter_step: int = 0
    seconds: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    def resume(self) -> None:
        """Resume from the newest good checkpoint, if there is one.

        Raises:
            CheckpointError: the checkpoint belongs to another run.
        """
        checkpoint = self._load_newest()
        if checkpoint is None:
            self.reporter.say(
                f"no usable checkpoint in {self.checkpoints.directory}: starting at step 0"
            )
            return
        self._check_same_run(checkpoint)
        self.trainer.restore(checkpoint)
        self._restore(checkpoint)
        self.seconds = checkpoint.trainer.get("seconds", 0.0)
        self.reporter.say(
            f"going on from step {checkpoint.step} ({self.checkpoints.path(checkpoint.step)})"
        )
        if checkpoint.trainer["steps"] != self.trainer.steps:
            self.reporter.say(
                f"the run now has {self.trainer.steps} steps instead of {checkpoint.trainer['steps']}: "
                "the learning rate follows the new length from here on"
            )

    def _restore(self, checkpoint: Checkpoint) -> None:
        """The session's own part of `checkpoint`, which the trainer has restored."""
        self.saved_step = checkpoint.step
        evaluations = self.evaluations = Evaluations.of(checkpoint.trainer)
        if evaluations.best_step not in self.checkpoints.steps():  # a later best one replaced it
            evaluations.best_step = evaluations.best_eval = None
        self.checkpoints.best = evaluations.best_step

    def _load_newest(self, until: int | None = None) -> Checkpoint | None:
        """Collective: rank 0 finds the newest good checkpoint, and the others load the same one."""
        ranks, device, checkpoints = self.trainer.ranks, self.trainer.device, self.checkpoints
        newest: list[Checkpoint | None] = [None]

        def look() -> None:
            newest[0] = checkpoints.load_newest(self.reporter.say, device, until)

        ranks.on_first(look)
        step = ranks.from_first(-1 if newest[0] is None else newest[0].step)
        if step < 0:
            return None
        return ranks.together(lambda: newest[0] or checkpoints.load(step, device))

    def _check_same_run(self, checkpoint: Checkpoint) -> None:
        now, before = self._description(), checkpoint.trainer
        check_equal(checkpoint.step, before["identity"], now["identity"])
        check_equal(checkpoint.step, with_defaults(before["options"]), now["options"])

    def _description(self) -> dict[str, Any]:
        options = kept_options(self.options)
        identity = {**self.identity, "rows_per_step": self.trainer.rows_per_step}
        return {"identity": identity, "options": options}

    def save(self) -> None:
        extra = {
            "steps": self.trainer.steps,
            "seconds": self.elapsed(),
            **asdict(self.evaluations),
            **self._description(),
        }
        checkpoints, checkpoint = self.checkpoints, self.trainer.checkpoint(extra)
        checkpoints.best = self.evaluations.best_step
        checkpoints.way_back = self._way_back(checkpoints)
        self.trainer.ranks.on_first(lambda: checkpoints.save(checkpoint))
        self.saved_step = self.trainer.counters.step

    def _way_back(self, checkpoints: Checkpoints) -> int | None:
        """The step of the checkpoint to which the run goes back if more steps are not finite; None if all were."""
        counters = self.trainer.counters
        if not counters.bad_in_a_row or self.options.on_divergence != "rollback":
            return None
        until = counters.step - counters.bad_in_a_row
        return max((step for step in checkpoints.steps() if step <= until), default=None)

    def elapsed(self) -> float:
        """Seconds since the run began, of all processes that led to this state, with evaluations and checkpoints."""
        return self.seconds + time.perf_counter() - self.began

    def open_loggers(self, step: int) -> None:
        """Open what the option `logger` names, for a run that begins or goes on at `step`. For the first rank alone."""
        self.loggers = open_loggers(self.options, step, self.reporter.say)

    def run(self) -> None:
        """Train to the last step, or until the held-out loss ends the run.

        Raises:
            Interrupted: a signal arrived; the state is saved.
            Diverged: too many steps in a row were not finite, and the run does not go back.
        """
        trainer = self.trainer
        self.began = time.perf_counter()
        log = MetricsLog(self.metrics if trainer.ranks.first else None)
        try:
            log.begin(trainer.counters.step, self.saved_step is not None)
            with StopSignal() as stop:
                if self.evaluations.first_eval is None:
                    self.evaluations.first_eval = self._evaluate(log)
                self.reporter.start(trainer.counters.step, trainer.steps)
                self._train(log, stop)
        finally:
            self.reporter.stop()
            log.close()
            self.loggers.close()
            trainer.close()

    def _train(self, log: MetricsLog, stop: StopSignal) -> None:
        trainer, alone = self.trainer, self.trainer.ranks.size == 1
        stopping = stop.signum is not None and alone
        while trainer.counters.step < trainer.steps and not stopping and not self._is_over():
            try:
                result = trainer.step(stop.signum is not None)
            except Diverged as error:
                self._roll_back(log, error)
                continue
            self._log(log, result)
            self._every(log)
            # Several ranks stop after the same step: the all-reduce of the loss tells each of them.
            stopping = stop.signum is not None if alone else result.stop
        if stopping:
            self._stop(stop.signum or signal.SIGTERM)
        if why := self.evaluations.why_over(self.options):
            self.reporter.say(f"stopped after step {trainer.counters.step}: {why}")

    def _is_over(self) -> bool:
        return self.evaluations.why_over(self.options) is not None

    def _every(self, log: MetricsLog) -> None:
        """Evaluate and save if that is due after the step that was done last."""
        step, options = self.trainer.counters.step, self.options
        last, best = step == self.trainer.steps, False
        if last or self._evaluation_is_due():
            reached = self.evaluations.reached_target(options)
            best = self.evaluations.note(self._evaluate(log), step, options)
            if self.evaluations.reached_target(options) and not reached:
                self._log_target(log)
        if last or best or self._checkpoint_is_due() or self._is_over():
            self.save()

    def _checkpoint_is_due(self) -> bool:
        options, counters = self.options, self.trainer.counters
        if counters.bad_in_a_row and options.on_divergence == "rollback":
            return (
                False  # it would push out those from before, to which the run may have to go back
            )
        return bool(options.save_every) and counters.step % options.save_every == 0

    def _evaluation_is_due(self) -> bool:
        step, rows = self.trainer.counters.step, self.trainer.rows_per_step
        if every := self.options.eval_every_sequences:
            return step * rows // every > (step - 1) * rows // every
        return bool(self.options.eval_every) and step % self.options.eval_every == 0

    def _log_target(self, log: MetricsLog) -> None:
        """Record what it took to reach the target: time, packed sequences and tokens, as MLPerf counts."""
        counters, target = self.trainer.counters, self.options.target_loss
        sequences, seconds = counters.step * self.trainer.rows_per_step, self.elapsed()
        took = {"seconds": seconds, "sequences": sequences, "tokens": counters.tokens}
        log.write(step=counters.step, target_loss=target, **took)
        self.reporter.say(
            f"target_loss {target:g} reached after {seconds:.1f} s, {sequences:,} sequences, {counters.tokens:,} tokens"
        )

    def _roll_back(self, log: MetricsLog, error: Diverged) -> None:
        """Go back to the newest good checkpoint from before the steps that were not finite, and leave out their rows.

        Raises:
            Diverged: the options or the state of the run do not allow it.
        """
        trainer, checkpoints = self.trainer, self.checkpoints
        if self.options.on_divergence != "rollback":
            raise error
        step, counters = trainer.counters.step, trainer.counters
        if counters.rollbacks == ROLLBACKS:
            raise Diverged(f"{error}. The run has gone back {ROLLBACKS} times already") from error
        left_out = sorted({*counters.left_out, *counters.bad_rows})
        if len(left_out) == len(trainer.rows):
            raise Diverged(f"{error}. Without these rows none is left to go on with") from error
        checkpoint = self._load_newest(until=step - counters.bad_in_a_row)
        if checkpoint is None:
            raise Diverged(
                f"{error}. There is no good checkpoint from before to go back to"
            ) from error
        trainer.go_back(checkpoint, left_out, counters.rollbacks + 1)
        self._restore(checkpoint)
        trainer.ranks.on_first(lambda: checkpoints.remove_after(checkpoint.step))
        self.save()  # what is left out must outlive this process
        log.go_back(checkpoint.step)
        self.loggers.go_back(checkpoint.step)
        log.write(step=checkpoint.step, diverged_at=step, left_out=len(left_out))
        self.reporter.say(
            f"loss or gradient was not finite up to step {step}: back to step {checkpoint.step} "
            f"({checkpoints.path(checkpoint.step)}), {len(left_out)} rows are left out from now on; rollback "
            f"{trainer.counters.rollbacks} of {ROLLBACKS}"
        )

    def _stop(self, signum: int) -> None:
        step = self.trainer.counters.step
        if self.saved_step != step:
            self.save()
        raise Interrupted(signum, f"saved {self.checkpoints.path(step)}; go on with --resume")

    def described(self) -> str:
        """Steps and held-out losses of the weights that the model holds, for the model card."""
        evaluations, counters = self.evaluations, self.trainer.counters
        step = self.adapter_step or counters.step
        text = f"Trained for {step:,} of {self.trainer.steps:,} steps."
        if (
            evaluations.last_eval is None
            or evaluations.first_eval is None
            or not evaluations.last_eval_step
        ):
            return text
        return (
            f"{text} Held-out loss in nats per token: {evaluations.first_eval:.4f} before, {evaluations.last_eval:.4f} "
            f"after {evaluations.last_eval_step:,} steps."
        )

    def take_best(self) -> str:
        """Collective: with load_best_model_at_end, give the model the weights of the best checkpoint.

        Returns what the model now holds, as a sentence.
        """
        evaluations, step = self.evaluations, self.trainer.counters.step
        self.adapter_step = step
        if not self.options.load_best_model_at_end or evaluations.best_step is None:
            return f"the adapter has the weights after step {step}, the last one"
        if evaluations.best_step != step:
            checkpoints, best_step, trainer = self.checkpoints, evaluations.best_step, self.trainer
            try:
                best = trainer.ranks.together(lambda: checkpoints.load(best_step, trainer.device))
            except FinetuneError as error:  # on all ranks, whose parts must be of one step
                last = f"the adapter has the weights after step {step}, the last one"
                return f"{last}, because the best checkpoint is lost: {error}"
            trainer.take_weights(best)
            self.adapter_step = best.step
            evaluations.last_eval, evaluations.last_eval_step = evaluations.best_eval, best.step
        return (
            f"the adapter has the weights after step {evaluations.best_step}, whose validation loss "
            f"{evaluations.best_eval:.4f} is the lowest"
        )

    def _evaluate(self, log: MetricsLog) -> float | None:
        if self.held is None or not len(self.held):
            return None
        trainer = self.trainer
        with self.reporter.phase("evaluation", in_batches) as shown:
            loss = evaluate(trainer.model, self.held, self.options, trainer.ranks, shown)
        step = self.trainer.counters.step
        log.write(step=step, eval_loss=loss)
        self.loggers.write(step, {"eval/loss": loss})
        self.reporter.say(f"{self.reporter.label} step {step}  validation loss {loss:.4f}")
        return loss

    def _log(self, log: MetricsLog, result: StepResult) -> None:
        counters = self.trainer.counters
        rate = result.tokens / result.seconds
        rates = {"tokens_per_s": rate, "tflops": rate * self.flops_per_token / 1e12}
        if isinstance(self.peak, Peak):
            rates["mfu"] = rates["tflops"] / (self.peak.tflops * self.trainer.ranks.size)
        if self.trainer.device.type == "cuda":
            rates["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.trainer.device) / 2**30
        values = {
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "skipped": result.skipped,
            "skipped_total": counters.skipped,
            "tokens": counters.tokens,
            "epoch": counters.rows / len(self.trainer.rows),
            "step_s": result.seconds,
            "replayed": result.replayed,
            **rates,
        }
        log.write(step=counters.step, **values)
        if counters.step % self.options.log_every == 0 or counters.step == self.trainer.steps:
            self.loggers.write(counters.step, {f"train/{k}": v for k, v in values.items()})
        if self.trainer.device.type != "cuda":
            rates = {"tokens_per_s": rate}
        self.reporter.step(counters.step, self.trainer.steps, result, rates)
