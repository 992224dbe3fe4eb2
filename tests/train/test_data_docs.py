# SPDX-License-Identifier: Apache-2.0
"""docs/data.md: its rows are read, and its command runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.train.chats import shown, tokenizer_with, tokens_of
from tests.train.conftest import Cli

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
ROWS = [
    line
    for block in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    for line in block.split("\n")
]
TEMPLATE = ROOT / "examples" / "chatml.jinja"
ANSWER = re.compile(r"(noon\.|clock)")


@pytest.mark.parametrize("number", range(sum(map(bool, ROWS))))
def test_a_row_of_the_docs_is_read(tmp_path: Path, number: int) -> None:
    row = [line for line in ROWS if line][number]
    path = tmp_path / "a.jsonl"
    path.write_text(row + "\n", encoding="utf-8")
    tokenizer = tokenizer_with(
        "{% if tools %}{{ tools }}\n{% endif %}"
        "{% for m in messages %}{{ m.role }} {{ m.content or m.tool_calls }}\n{% endfor %}"
    )
    text = shown(tokens_of(path, tokenizer), tokenizer)
    trained = re.findall("⟦(.*?)⟧", text, re.DOTALL)
    assert trained and all(ANSWER.search(part) for part in trained)
    assert ("user" in "".join(trained)) is False


def test_the_command_of_the_docs_runs(
    cli: Cli, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And goes on; the adapter's folder has the template."""
    command = next(
        line for line in TEXT.splitlines() if line.startswith("    lorakernels finetune")
    )
    words = command.split()[2:]
    values = dict(zip(words[::2], words[1::2], strict=True))
    assert list(values) == ["--model", "--data", "--chat-template", "--output"]
    output = tmp_path / "out"
    argv = [
        *("--model", model_dir, "--data", ROOT / values["--data"], "--output", output),
        *("--chat-template", ROOT / values["--chat-template"], "--device", "cpu", "--r", 4),
        *("--seq-len", 128, "--batch-size", 1, "--lr", "1e-2", "--log-every", 1, "--eval-every", 0),
    ]
    assert cli(*argv, "--epochs", 2) == 0
    said = capsys.readouterr().out
    assert "chat.jsonl: 4 rows of messages" in said and "1 of 4 documents held out" in said
    assert "documents are longer than seq_len 128 and were truncated" in said
    assert "<|im_start|>assistant\n⟦The old ferry" in said
    losses = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in losses if "loss" in row][-1] < 6
    adapter = AutoTokenizer.from_pretrained(output / "adapter")
    assert adapter.chat_template == TEMPLATE.read_text(encoding="utf-8")
    assert cli(*argv, "--epochs", 3, "--resume") == 0
    assert "going on from step" in capsys.readouterr().out
    assert cli(*argv, "--epochs", 4, "--resume", "--train-on-inputs") == 1
    assert "tokens was" in capsys.readouterr().err


def test_a_template_that_cannot_be_read(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert cli(*base_args, "--output", output, "--chat-template", tmp_path / "none") == 2
    assert "chat_template: the file" in capsys.readouterr().err
    assert cli(*base_args, "--output", output, "--data-weights", 1, 2) == 2
    assert "data_weights needs one weight for each entry of data: found 2 for 1" in capsys.readouterr().err  # fmt: skip
    assert cli(*base_args, "--output", output, "--data-weights", 0) == 2
    assert "data_weights must be positive and finite, got 0.0" in capsys.readouterr().err


@pytest.mark.gpu
def test_chats_replay_to_the_eager_bits_on_a_gpu(
    cli: Cli, gpu_run: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loss masks differ from step to step; a captured step serves them all."""
    at = gpu_run.index("--data") + 1
    run = [*gpu_run[:at], ROOT / "examples" / "chat.jsonl", *gpu_run[at + 1 :]]
    run += ["--chat-template", TEMPLATE, "--steps", 12, "--seq-len", 256, "--batch-size", 1]
    losses = []
    for name, more in (("graphs", []), ("eager", ["--eager"])):
        assert cli(*run, *more, "--output", tmp_path / name) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in lines])
    assert losses[0] == losses[1]
    assert "replayed as" in capsys.readouterr().out
