# SPDX-License-Identifier: Apache-2.0
"""docs/finetune.md: its command runs, and it names what there is."""

from __future__ import annotations

import re
from pathlib import Path

from lorakernels.train.options.running import LOGGERS, OPTIMS, SCHEDULES, RunningOptions
from lorakernels.train.options.sources import kinds
from tests.train.conftest import Cli
from tests.train.test_stopping import Says

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
COMMAND = next(line for line in TEXT.splitlines() if line.startswith("    lorakernels finetune"))


def test_the_command_of_the_docs_runs(
    cli: Cli, model_dir: Path, tmp_path: Path, capsys: Says
) -> None:
    """On a tiny model, and with no more than that added."""
    words = COMMAND.split()[2:]
    for flag, value in (("--model", model_dir), ("--output", tmp_path / "out")):
        words[words.index(flag) + 1] = str(value)
    for flag in ("--data", "--chat-template"):
        words[words.index(flag) + 1] = str(ROOT / words[words.index(flag) + 1])
    sizes = ["--device", "cpu", "--r", 4, "--seq-len", 128, "--batch-size", 1, "--steps", 4]
    assert cli(*words, *sizes) == 0
    said = capsys.readouterr().out
    assert re.search(r"the adapter has the weights after step \d, whose validation loss", said)
    assert "Trained for" in (tmp_path / "out" / "adapter" / "README.md").read_text()


def test_every_option_and_every_name_is_in_the_docs() -> None:
    text = re.sub(r"torchrun --nproc-per-node 2 --no-python", "", TEXT)
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z0-9-]+)", text)}
    assert set(vars(RunningOptions())) <= named
    assert {name.removeprefix("no_") for name in named} - {"help", "help_all"} <= set(kinds())
    for names in (OPTIMS, SCHEDULES, LOGGERS):
        assert all(re.search(rf"\b{name}\b", TEXT) for name in names)
