# SPDX-License-Identifier: Apache-2.0
"""What held-out losses decide: the best checkpoint, early stopping, the target; and that a resumed run agrees."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakernels.train.options.running import RunningOptions
from lorakernels.train.run import session as sessions
from lorakernels.train.run.evaluations import Evaluations
from tests.train.conftest import Cli
from tests.train.replays import assert_same
from tests.train.test_ranks import on_ranks
from tests.train.test_resume import adapter, start, steps_logged, stop_after, wait_for_step

Says = pytest.CaptureFixture[str]


def folder_of(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"step-{step:08d}"


def kept(output: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (output / "checkpoints").glob("step-*"))


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """{step: held-out loss} that evaluations find; 5.0 at other steps."""
    found: dict[int, float] = {}
    real = sessions.Session._evaluate

    def fake(self: sessions.Session, log: Any) -> float | None:
        step = self.trainer.counters.step
        monkeypatch.setattr(sessions, "evaluate", lambda *_: found.get(step, 5.0))
        return real(self, log)

    monkeypatch.setattr(sessions.Session, "_evaluate", fake)
    return found


@pytest.mark.slow
def test_the_best_checkpoint_stays_and_is_the_adapter(
    cli: Cli, base_args: list[str], tmp_path: Path, losses: dict[int, float], capsys: Says
) -> None:
    """Neither `keep` nor its step being no multiple of save_every removes it. Without the option the last step wins."""
    losses.update({1: 4.0, 2: 3.0, 3: 2.0, 4: 2.5, 5: 2.0, 6: 3.5, 7: 3.6, 8: 3.7})
    run = [*base_args, "--steps", 8, "--eval-every", 1, "--save-every", 2, "--keep", 1]
    assert cli(*run, "--output", tmp_path / "last") == 0
    assert "the adapter has the weights after step 8, the last one\n" in capsys.readouterr().out
    assert kept(tmp_path / "last") == [8]
    best = tmp_path / "best"
    assert cli(*run, "--output", best, "--load-best-model-at-end") == 0
    said = capsys.readouterr().out
    assert (
        "the adapter has the weights after step 3, whose validation loss 2.0000 is the lowest"
        in said
    )
    assert said.splitlines()[-1].startswith("validation loss 5.0000 → 2.0000, ")
    assert kept(best) == [3, 8]
    assert adapter(best) == (folder_of(best, 3) / "adapter_model.safetensors").read_bytes()
    assert adapter(best) != adapter(tmp_path / "last")
    card = (best / "adapter" / "README.md").read_text()
    assert (
        "Trained for 3 of 8 steps. Held-out loss in nats per token: 5.0000 before, 2.0000" in card
    )
    shutil.rmtree(folder_of(best, 8))
    assert cli(*run, "--output", best, "--load-best-model-at-end", "--resume") == 0
    assert "after step 3, whose validation loss 2.0000" in capsys.readouterr().out


def test_a_best_checkpoint_that_is_lost_is_said(
    cli: Cli, base_args: list[str], tmp_path: Path, losses: dict[int, float],
    capsys: Says, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    losses.update({1: 1.0})
    run = [*base_args, "--steps", 4, "--eval-every", 1, "--load-best-model-at-end"]
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert cli(*run, "--output", tmp_path) == 130
    (folder_of(tmp_path, 1) / "state" / "rng.pt").unlink()
    assert cli(*run, "--output", tmp_path, "--resume") == 0
    said = capsys.readouterr().out
    assert "after step 4, the last one, because the best checkpoint is lost: checkpoint " in said
    newest = folder_of(tmp_path, 4) / "adapter_model.safetensors"
    assert adapter(tmp_path) == newest.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("cut", [3, 4, 5], ids=lambda step: f"stopped after {step}")
def test_early_stopping_counts_on_after_a_resume(
    cli: Cli, base_args: list[str], tmp_path: Path, losses: dict[int, float],
    capsys: Says, monkeypatch: pytest.MonkeyPatch, cut: int,
) -> None:  # fmt: skip
    """Losses fall by less than the threshold from step 2 on, so the third evaluation after it ends the run, at 5."""
    losses.update({1: 4.0, 2: 3.0, 3: 2.95, 4: 2.94, 5: 2.93, 6: 1.0})
    run = [*base_args, "--steps", 9, "--eval-every", 1, "--save-every", 0]
    run += ["--early-stopping-patience", 3, "--early-stopping-threshold", 0.1]
    ended = "stopped after step 5: held-out loss was not lower than the lowest by more than 0.1 in 3 evaluations"
    assert cli(*run, "--output", tmp_path / "whole") == 0
    assert ended in capsys.readouterr().out and kept(tmp_path / "whole") == [5]
    output = tmp_path / "cut"
    with monkeypatch.context() as patch:
        stop_after(patch, cut)
        # What ends at this step ends as the run does.
        assert cli(*run, "--output", output) == 130
    assert cli(*run, "--output", output, "--resume") == 0
    assert ended in capsys.readouterr().out
    assert steps_logged(output) == [1, 2, 3, 4, 5] and adapter(output) == adapter(
        tmp_path / "whole"
    )
    assert cli(*run, "--output", output, "--resume") == 0
    assert steps_logged(output) == [1, 2, 3, 4, 5], "a run that has ended does no step more"
    assert cli(*run[:-4], "--output", output, "--resume") == 0
    assert steps_logged(output) == list(range(1, 10)), "without the option it goes on"


def test_the_target_ends_the_run_and_is_recorded(
    cli: Cli, base_args: list[str], tmp_path: Path, losses: dict[int, float], capsys: Says
) -> None:
    """Four sequences a step: evaluations are due after the steps that pass a multiple of 6."""
    losses.update({0: 1.0, 2: 3.0, 3: 2.0, 5: 1.9})
    run = [*base_args, "--steps", 9, "--eval-every-sequences", 6, "--output", tmp_path]
    assert cli(*run, "--target-loss", 1.95) == 0
    said = capsys.readouterr().out
    assert "stopped after step 5: held-out loss 1.9000 is not above target_loss 1.95" in said
    found = lines(tmp_path)
    assert [line["step"] for line in found if "eval_loss" in line] == [0, 2, 3, 5]
    (reached,) = [line for line in found if "target_loss" in line]
    tokens = [line["tokens"] for line in found if "lr" in line][-1]
    seconds = sum(line["step_s"] for line in found if "lr" in line)
    assert reached["seconds"] > seconds
    del reached["seconds"]
    assert reached == {"step": 5, "target_loss": 1.95, "sequences": 20, "tokens": tokens}
    assert kept(tmp_path) == [5]
    before = json.loads((folder_of(tmp_path, 5) / "state" / "trainer.json").read_text())["seconds"]
    assert cli(*run, "--target-loss", 1.5, "--resume") == 0
    after = json.loads((folder_of(tmp_path, 9) / "state" / "trainer.json").read_text())["seconds"]
    assert before > seconds and after > before, "the time of both processes"


def test_ranks_agree_on_the_end_and_on_the_best(base_args: list[str], tmp_path: Path) -> None:
    """A learning rate of 1 makes the second step's loss the higher one, and no gain of less than 10 nats counts."""
    output = tmp_path / "out"
    run = [*base_args, "--lr", 1, "--warmup", 0, "--steps", 9, "--eval-every", 1, "--keep", 1]
    run += ["--early-stopping-patience", 1, "--early-stopping-threshold", 10]
    run += ["--load-best-model-at-end", "--output", output]
    on_ranks([run], tmp_path)
    held = {line["step"]: line["eval_loss"] for line in lines(output) if "eval_loss" in line}
    assert list(held) == [0, 1, 2] and held[1] < held[2] and kept(output) == [1, 2]
    assert adapter(output) == (folder_of(output, 1) / "adapter_model.safetensors").read_bytes()
    assert_same(*(torch.load(output / f"rank{rank}.pt") for rank in range(2)))


SLOWLY = [3.0, 2.94, 2.88, 2.89, 2.82, 2.83, 2.85, 2.84]
LEVEL = [3.0, 2.5, 2.5, 2.25, 2.25, 2.25, 2.25, 2.25]  # differences are exact


@pytest.mark.parametrize("losses", [SLOWLY, LEVEL], ids=["slowly", "level"])
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.1, 0.25])
def test_early_stopping_is_that_of_transformers(threshold: float, losses: list[float]) -> None:
    """With losses that fall slowly, each by less than the larger threshold, and with equal ones."""
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

    options = RunningOptions(early_stopping_patience=3, early_stopping_threshold=threshold)
    callback = EarlyStoppingCallback(3, threshold)
    args = TrainingArguments(metric_for_best_model="eval_loss", greater_is_better=False)
    state, control, found = TrainerState(), TrainerControl(), Evaluations()
    for step, loss in enumerate(losses, 1):
        callback.on_evaluate(args, state, control, {"eval_loss": loss})
        state.best_metric = min(loss, state.best_metric or loss)  # as Trainer does
        found.note(loss, step, options)
        assert (found.why_over(options) is not None) == control.should_training_stop, step
        if control.should_training_stop:
            break


def test_losses_that_are_not_finite_are_no_gain() -> None:
    options = RunningOptions(
        early_stopping_patience=2, load_best_model_at_end=True, target_loss=1.0
    )
    found = Evaluations()
    assert not found.note(float("nan"), 1, options) and found.why_over(options) is None
    assert not found.note(float("inf"), 2, options)
    assert found.why_over(options) == "held-out loss was not finite in 2 evaluations"
    assert found.note(3.0, 3, options) and found.best_step == 3 and found.why_over(options) is None
    assert not found.note(float("-inf"), 4, options) and found.best_step == 3
    assert Evaluations.of({**asdict(found), "steps": 9}) == found
    assert Evaluations.of({"first_eval": 1.0, "last_eval": None}) == Evaluations(first_eval=1.0)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--target-loss", 2], "target_loss reads a held-out loss: eval_fraction is 0"),
        (["--load-best-model-at-end"], "load_best_model_at_end reads a held-out loss"),
        (["--early-stopping-patience", 1], "early_stopping_patience reads a held-out loss"),
        (["--target-loss", "nan"], "target_loss must be positive and finite, got nan"),
        (["--early-stopping-threshold", "-1"], "early_stopping_threshold must be at least 0"),
        (
            ["--early-stopping-threshold", "1"],
            "threshold 1 needs early_stopping_patience, which is",
        ),
        (
            ["--eval-fraction", ".2", "--eval-every", 0, "--early-stopping-patience", 1],
            "early_stopping_patience needs evaluations during the run: eval_every is 0",
        ),
        (
            ["--on-divergence", "rollback", "--save-every", 0],
            "on_divergence rollback goes back to a checkpoint: save_every is 0",
        ),
        (["--graphs", "step", "--optim", "adafactor"], "found optim adafactor: take graphs layer"),
        (["--optim", "adamw"], "optim must be one of adamw_torch_fused, sgd, "),
        (["--logger", "wandb", "mlflow"], "logger must be one of tensorboard, wandb, trackio, got"),
        (["--logger", "wandb", "wandb"], "logger names one twice: wandb, wandb"),
        (["--loraplus-lr-ratio", "0"], "loraplus_lr_ratio must be positive and finite, got 0.0"),
        (["--lr-scheduler-type", "linear", "--lr-scheduler-kwargs", "{"], "is not JSON"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_named(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: Says, more: list[Any], said: str
) -> None:
    assert cli(*base_args, "--eval-fraction", 0, "--output", tmp_path / "out", *more) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_kill_9_then_resume_with_everything_on(
    cli: Cli, base_args: list[str], tmp_path: Path
) -> None:
    """Real held-out losses: the best checkpoint, the state of early stopping and the adapter are the whole run's."""
    run = [*base_args, "--steps", 24, "--save-every", 5, "--eval-every", 2, "--keep", 1]
    run += ["--load-best-model-at-end", "--early-stopping-patience", 20, "--lr", "3e-2"]
    run += [
        "--optim",
        "sgd",
        "--lr-scheduler-type",
        "constant_with_warmup",
        "--loraplus-lr-ratio",
        8,
    ]
    whole, output, said = tmp_path / "whole", tmp_path / "killed", tmp_path / "said"
    assert cli(*run, "--output", whole) == 0
    process = start([*run, "--output", output], said)
    wait_for_step(process, said, output, 13)
    process.kill()
    process.join()
    assert len(steps_logged(output)) < 24, "killed before it was done"
    assert cli(*run, "--output", output, "--resume") == 0
    assert steps_logged(output) == list(range(1, 25)) and kept(output) == kept(whole)
    assert adapter(output) == adapter(whole)
    states = [
        json.loads((folder_of(each, 24) / "state" / "trainer.json").read_text())
        for each in (whole, output)
    ]
    assert all(state.pop("seconds") > 0 for state in states) and states[0] == states[1]
