# SPDX-License-Identifier: Apache-2.0
"""`lorakernels finetune --fp8-recipe block`: it trains, says what it holds, and resumes to the same bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., int]


def losses(output: Path) -> list[float]:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record.get("loss") is not None]


def test_it_trains_and_resumes_to_the_same_bits(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [*base_args, "--output", tmp_path, "--steps", 8, "--save-every", 4]
    assert cli(*run, "--fp8-recipe", "block") == 0
    said = "".join(capsys.readouterr())
    assert "frozen weights in FP8 blocks" in said
    whole = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    found = losses(tmp_path)
    assert len(found) >= 2 and found[-1] < found[0]
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")
    assert cli(*run, "--resume") == 1
    assert "fp8_recipe was 'block', now it is 'delayed'" in "".join(capsys.readouterr())
    assert cli(*run, "--resume", "--fp8-recipe", "block") == 0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == whole
