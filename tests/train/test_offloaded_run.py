# SPDX-License-Identifier: Apache-2.0
"""finetune --offload: the run of a resident base to the bit, resumed with or without it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_ranks import losses
from tests.train.test_resume import adapter, start, steps_logged, wait_for_step
from tests.train.test_sharded_ranks import written

Cli = Callable[..., int]
pytestmark = pytest.mark.filterwarnings("ignore:no control group limits")


@pytest.mark.slow
def test_a_run_is_that_of_a_resident_base(
    cli: Cli, base_args: list[str], deep_model: Path, tmp_path: Path
) -> None:
    """Not fused; a fused run is below."""
    run: list[Any] = [
        *base_args,
        "--model",
        deep_model,
        "--no-fuse",
        "--steps",
        4,
        "--save-every",
        2,
    ]
    whole, offloaded, parts = (tmp_path / name for name in ("whole", "offloaded", "parts"))
    assert cli(*run, "--keep", 9, "--output", whole) == 0
    assert cli(*run, "--keep", 9, "--output", offloaded, "--offload", 0.3) == 0
    found, expected = written(offloaded), written(whole)
    assert [name for name in expected if found.get(name) != expected[name]] == []
    assert found.keys() == expected.keys() and losses(offloaded) == losses(whole)
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-00000004")
    assert cli(*run, "--keep", 9, "--output", parts, "--offload", 0.3, "--resume") == 0
    assert losses(parts) == losses(whole) and adapter(parts) == adapter(whole)


OFFLOADED = ["--fuse", "--save", "checkpoint", "--offload", 0.3, "--offload-activations"]


def check_a_killed_run_goes_on(cli: Cli, run: list[Any], tmp_path: Path) -> None:
    """Killed between two steps or within one, with weights and activations on the host. A whole run keeps both."""
    run = [*run, "--steps", 9, "--save-every", 2, "--output"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert cli(*run, whole, "--fuse", "--save", "checkpoint") == 0
    process = start([*run, killed, *OFFLOADED], tmp_path / "said")
    wait_for_step(process, tmp_path / "said", killed, 3)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and len(steps_logged(killed)) < 9
    assert cli(*run, killed, *OFFLOADED, "--resume") == 0
    assert losses(killed) == losses(whole) and adapter(killed) == adapter(whole)


@pytest.mark.slow
def test_kill_9_then_resume(
    cli: Cli, base_args: list[str], deep_model: Path, tmp_path: Path
) -> None:
    check_a_killed_run_goes_on(cli, [*base_args, "--model", deep_model], tmp_path)


@pytest.mark.gpu
def test_kill_9_then_resume_with_pinned_memory(
    cli: Cli, gpu_run: list[Any], tmp_path: Path
) -> None:
    check_a_killed_run_goes_on(cli, gpu_run, tmp_path)


def test_too_little_memory_is_an_error(
    cli: Cli,
    base_args: list[str],
    deep_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("lorakernels.parallel.base.host_memory.host_memory_left", lambda root: 100)
    output = tmp_path / "out"
    assert cli(*base_args, "--model", deep_model, "--output", output, "--offload", 0.3) == 1
    said = capsys.readouterr().err
    assert "the memory left in the control group is 100" in said
