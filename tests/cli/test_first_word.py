# SPDX-License-Identifier: Apache-2.0
"""The first word of the command line comes before torch is imported, and the help of an hour fits a screen."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lorakernels.cli import export, plan
from lorakernels.cli.__main__ import main

LATE = ("torch", "transformers", "numpy")
PROBE = f"""
import json, sys
from lorakernels.cli.__main__ import main
for words in json.loads(sys.argv[1]):
    try:
        code = main(words.split())
    except SystemExit as stop:
        code = stop.code
    late = [name for name in {LATE!r} if name in sys.modules]
    print(json.dumps([words, code, late]), file=sys.stderr)
"""
WRONG = {  # {what is typed: the error}
    "fintune": "unknown command 'fintune'; did you mean finetune?",
    "finetune": "model, data and output are missing: give --model DIR --data FILE... --output DIR, or --demo",
    "finetune --modle x": "unknown option --modle; did you mean --model?",
    "finetune --r x": "argument --r: invalid int value: 'x'",
    "finetune --model base --data rows.txt --output out --r 0": "r must be at least 1, got 0",
    "finetune --model none --data rows.txt --output out": "model directory none does not exist or is not a directory",
    "finetune --model base --data none.txt --output out": "data file none.txt does not exist",
    "finetune --model base --data rows.txt --eval-data no.txt --output out": "data file no.txt does not exist",
    "finetune --config none.yaml": "cannot read the config file none.yaml: No such file or directory",
    "plan": "the following arguments are required: --model",
    "plan --model none": "model directory none does not exist or is not a directory",
    "plan --model base --gpus 4 --cp 3": "cp must divide the 4 gpus, found 3",
    "plan --model base --machine B200": "argument --machine: expected H200 or H100-80GB, found 'B200'",
    "export --model none --adapter a --output o": "model directory none does not exist or is not a directory",
    "doctor --jsno": "unknown option --jsno; did you mean --json?",
}  # fmt: skip
PAGES = ("", "--help", "--version", *(f"{c} --help" for c in ("finetune", "plan", "export", "doctor")),
         "finetune --help-all")  # fmt: skip


def test_pages_and_errors_do_not_wait_for_torch(tmp_path: Path) -> None:
    """All in one process, where the first import would stay seen."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "rows.txt").write_text("text")
    typed = json.dumps([*PAGES, *WRONG])
    command = [sys.executable, "-c", PROBE, typed]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    told = done.stderr.splitlines()
    ends = [json.loads(line) for line in told if line.startswith("[")]
    assert [words for words, _, late in ends if late] == []
    assert [words for words, code, _ in ends if not code] == list(PAGES)
    errors = [line for line in told if not line.startswith("[")]
    assert len(errors) == len(WRONG)
    for line, message in zip(errors, WRONG.values(), strict=True):
        assert f"error: {message}" in line
    assert not (tmp_path / "out").exists()


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["finetune", "plan", "export", "doctor"])
def test_help_fits_a_screen(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = page(capsys, command, "--help").splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80


def test_help_has_what_most_runs_set_and_help_all_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = (page(capsys, "finetune", words) for words in ("--help", "--help-all"))
    head = "lorakernels finetune --model smollm2 --data chat.jsonl --output out"
    assert all(
        shown.count(head) == 1 and shown.count("--help-all") == 1 for shown in (short, whole)
    )
    options = re.findall(r"^  (--[\w-]+)", short, re.MULTILINE)
    assert options[0] == "--help-all" and len(options) == 13
    for option in ("--model DIR", "--data FILE", "--config FILE", "--lr FLOAT", "--resume"):
        assert option in short and option in whole
    for option in ("--demo ", "--optim", "--no-fp8", "--seed", "--loss-chunk"):
        assert option not in short and option in whole
    assert "--no-demo" not in short + whole, "a switch that is off has no second name on a page"
    assert "eval_every; 0 counts steps (default: 0)" in " ".join(whole.split())


def test_a_switch_that_a_file_turns_on_is_turned_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("demo: true\nmodel: base\n")
    words = ["finetune", "--config", str(tmp_path / "run.yaml")]
    assert main(words) == 2 and "demo brings its own model" in capsys.readouterr().err
    assert main([*words, "--no-demo"]) == 2
    assert "data and output are missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "words", "collects"),
    [(plan, "plan --model m", False), (export, "export --model m --adapter a --output o", True)],
    ids=["plan", "export"],
)
def test_a_command_that_ends_soon_collects_no_garbage(
    module: ModuleType, words: str, collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(module, "run", lambda options: seen.append(gc.isenabled()) or 0)
    assert main(words.split()) == 0
    assert seen == [collects] and gc.isenabled()
