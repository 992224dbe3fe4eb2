# SPDX-License-Identifier: Apache-2.0
"""`--logger`: what each package gets, on the first rank alone, in one run over resumes, and when a package fails."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorakernels.train.run.loggers import Loggers, Run, TensorBoard
from tests.train.conftest import Cli
from tests.train.test_ranks import on_ranks
from tests.train.test_resume import stop_after
from tests.train.test_stopping import Says, lines


class Fake:
    """wandb's or trackio's module: what it was told."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended = 0
        self.broken: str | None = None

    def init(self, **values: Any) -> Fake:
        self.inits.append(values)
        if self.broken == "init":
            raise RuntimeError("no key is configured")
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "train/global_step")

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        if self.broken == "log":
            raise OSError("the network is gone")
        values = dict(values)
        self.logged.append((int(values.pop("train/global_step", step or 0)), values))

    def finish(self) -> None:
        self.ended += 1


@pytest.fixture(params=["wandb", "trackio"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Fake]:
    made = Fake()
    monkeypatch.setitem(sys.modules, request.param, made)
    return request.param, made


def test_a_resumed_run_goes_on_in_the_same_run(
    cli: Cli, base_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    fake: tuple[str, Fake],
) -> None:  # fmt: skip
    name, service = fake
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    run = [*base_args, "--output", tmp_path / "my-run", "--steps", 4, "--logger", name]
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert cli(*run) == 130
    assert service.ended == 1
    assert cli(*run, "--resume") == 0
    first, second = service.inits
    assert first["name"] == second["name"] and first["resume"] == second["resume"] == "allow"
    assert first.get("id") == second.get("id") and service.ended == 2
    assert first["project"] == ("theirs" if name == "wandb" else "lorakernels")
    assert first["name"].startswith("my-run") and first["config"]["r"] == 4
    steps = [step for step, values in service.logged if "train/loss" in values]
    assert steps == [1, 2, 3, 4]
    written = {n["step"]: n for n in lines(tmp_path / "my-run") if "lr" in n}
    for step, values in service.logged:
        if "train/loss" in values:
            expected = {f"train/{k}": v for k, v in written[step].items() if k != "step"}
            assert values == {k: float(v) for k, v in expected.items()}
    assert [step for step, values in service.logged if "eval/loss" in values] == [0, 4]


def test_a_new_run_in_the_same_folder_is_another_run(
    cli: Cli, base_args: list[str], tmp_path: Path, fake: tuple[str, Fake]
) -> None:
    """The first one ended before its first checkpoint."""
    name, service = fake
    run = [*base_args, "--output", tmp_path, "--steps", 2, "--logger", name]
    assert cli(*run) == 0
    shutil.rmtree(tmp_path / "checkpoints")
    assert cli(*run) == 0
    first, second = ((found["name"], found.get("id")) for found in service.inits)
    assert first != second


def test_only_every_log_every_step_is_sent_and_numbers_alone(
    cli: Cli, base_args: list[str], tmp_path: Path, fake: tuple[str, Fake]
) -> None:
    name, service = fake
    run = [*base_args, "--output", tmp_path, "--steps", 5, "--log-every", 2]
    assert cli(*run, "--logger", name, "--run-name", "mine") == 0
    assert [step for step, values in service.logged if "train/loss" in values] == [2, 4, 5]
    assert service.inits[0]["name"].startswith("mine")


def test_one_that_cannot_be_opened_stops_the_run_before_its_first_step(
    cli: Cli, base_args: list[str], tmp_path: Path, fake: tuple[str, Fake], capsys: Says
) -> None:
    name, service = fake
    service.broken = "init"
    assert cli(*base_args, "--output", tmp_path, "--steps", 2, "--logger", name) == 1
    said = capsys.readouterr().err
    assert f"logger {name} cannot be opened: no key is configured" in said
    assert not (tmp_path / "metrics.jsonl").exists()


def test_one_that_fails_later_is_said_and_training_goes_on(
    cli: Cli, base_args: list[str], tmp_path: Path, fake: tuple[str, Fake], capsys: Says
) -> None:
    name, service = fake
    service.broken = "log"
    assert cli(*base_args, "--output", tmp_path, "--steps", 2, "--logger", name) == 0
    said = capsys.readouterr().out
    failed = f"logger {name} failed and gets nothing from now on: the network is gone"
    assert said.count(failed) == 1 and len([n for n in lines(tmp_path) if "lr" in n]) == 2


def test_values_that_are_not_finite_are_left_out() -> None:
    seen: list[Any] = []
    logger = SimpleNamespace(write=lambda step, values: seen.append((step, values)), close=int)
    loggers = Loggers({"a": logger})
    loggers.write(3, {"loss": float("nan"), "lr": 0.5, "skipped": True})
    assert seen == [(3, {"lr": 0.5, "skipped": 1.0})]
    loggers.close()
    assert loggers.made == {}


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_named_before_anything_is_loaded(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: Says,
    monkeypatch: pytest.MonkeyPatch, name: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, name, None)
    assert cli(*base_args, "--output", tmp_path / "out", "--logger", name) == 1
    said = capsys.readouterr().err
    assert f"needs {name}, which cannot be imported" in said and f"pip install {name}" in said
    assert not (tmp_path / "out" / "tokens").exists()


@pytest.mark.slow
def test_the_first_rank_alone_reports(base_args: list[str], tmp_path: Path) -> None:
    """TensorBoard's files say it: one run wrote them."""
    pytest.importorskip("tensorboard", reason="writes event files")
    output = tmp_path / "out"
    on_ranks([[*base_args, "--output", output, "--steps", 2, "--logger", "tensorboard"]], tmp_path)
    assert len(list((output / "tensorboard").iterdir())) == 1


def test_tensorboard_has_each_step_once_after_a_resume(
    cli: Cli, base_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after step 5, gone on with from step 4: the events of step 5 are those of the second process."""
    pytest.importorskip("tensorboard", reason="writes event files")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = [*base_args, "--output", tmp_path, "--steps", 6, "--save-every", 2]
    run += ["--logger", "tensorboard"]
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        assert cli(*run) == 130
    newest = tmp_path / "checkpoints" / "step-00000005"
    newest.rename(tmp_path / "away")
    assert cli(*run, "--resume") == 0
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    expected = [(n["step"], n["loss"]) for n in lines(tmp_path) if "lr" in n]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in expected], rel=1e-6)
    assert json.loads(found.Tensors("options/text_summary")[0].tensor_proto.string_val[0])["r"] == 4


def test_tensorboard_has_each_step_once_after_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several times within a second, in which the files' names are equal but for what the logger adds."""
    pytest.importorskip("tensorboard", reason="writes event files")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("time.time", lambda: 1.7e9)
    board = TensorBoard(Run(tmp_path, "name", "id", 0, {}))
    loggers = Loggers({"tensorboard": board})
    for step in (1, 2, 3, 4):
        loggers.write(step, {"loss": float(step)})
    for back in (3, 2):
        loggers.go_back(back)
        for step in range(back + 1, 5):
            loggers.write(step, {"loss": 10.0 * back + step})
    loggers.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in found] == [(1, 1), (2, 2), (3, 23), (4, 24)]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_real_packages_write_what_they_write_without_a_network(
    cli: Cli, base_args: list[str], tmp_path: Path, offline: None, name: str, capsys: Says
) -> None:
    pytest.importorskip(name, reason="the service's own client")
    output = tmp_path / "out"
    assert cli(*base_args, "--output", output, "--steps", 2, "--logger", name) == 0
    assert "logger" not in capsys.readouterr().out
    where = output / "wandb" if name == "wandb" else tmp_path / "trackio"
    files = [Path(folder) / file for folder, _, names in os.walk(where) for file in names]
    assert any(file.suffix in (".wandb", ".db", ".parquet", ".sqlite") for file in files), files
