# SPDX-License-Identifier: Apache-2.0
"""finetune --offload: the run of a resident base to the bit, resumed with or without it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_ranks import losses
from tests.train.test_resume import adapter
from tests.train.test_sharded_ranks import written

Cli = Callable[..., int]
pytestmark = pytest.mark.filterwarnings("ignore:no control group limits")


@pytest.mark.slow
@pytest.mark.parametrize("form", [["--no-fuse"], ["--fuse", "--save", "checkpoint"]], ids=" ".join)
def test_a_run_is_that_of_a_resident_base(
    form: list[str], cli: Cli, base_args: list[str], deep_model: Path, tmp_path: Path
) -> None:
    run: list[Any] = [*base_args, "--model", deep_model, *form, "--steps", 4, "--save-every", 2]
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


def test_too_little_memory_is_an_error(
    cli: Cli,
    base_args: list[str],
    deep_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("lorakernels.parallel.host_memory.host_memory_left", lambda root: 100)
    output = tmp_path / "out"
    assert cli(*base_args, "--model", deep_model, "--output", output, "--offload", 0.3) == 1
    said = capsys.readouterr().err
    assert "what is left of the control group's memory is 100" in said
