# SPDX-License-Identifier: Apache-2.0
"""`lorakernels bench` runs the tests of an op before it is timed, and a red one stops it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakernels.cli import bench
from lorakernels.cli.__main__ import main

DEVICE = ["--device", "cpu"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[str]], dict[str, int]]:
    """(the commands that would run, their exit codes by a word in them)."""
    commands: list[list[str]] = []
    codes: dict[str, int] = {}

    def fake(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        text = " ".join(command)
        return subprocess.CompletedProcess(
            command, max(c for w, c in {"": 0, **codes}.items() if w in text)
        )

    monkeypatch.setattr(bench.subprocess, "run", fake)
    return commands, codes


def test_the_tests_run_first_and_on_the_device_that_is_timed(ran: Any) -> None:
    commands, _ = ran
    assert main(["bench", "quantize_grad", *DEVICE]) == 0
    tests, script = commands
    assert tests[:3] == [sys.executable, "-m", "pytest"]
    assert tests[tests.index("-m", 2) + 1] == "not gpu"
    files = [Path(p).name for p in tests if p.endswith(".py")]
    assert files == ["test_quantize_grad.py", "test_contract.py"]
    assert tests[-2:] == ["-k", "quantize_grad"]
    assert script[1:] == [str(bench.FOLDER / "ops" / "bench_quantize_grad.py"), *DEVICE]
    commands.clear()
    assert main(["bench", "quantize_grad", "--device", "cuda:1"]) == 0
    assert commands[0][commands[0].index("-m", 2) + 1] == "gpu"


@pytest.mark.parametrize(
    ("code", "result"), [(1, 1), (2, 1), (5, 2)], ids=["red", "broken", "none"]
)
def test_a_red_test_stops_the_benchmark(
    code: int, result: int, ran: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    commands, codes = ran
    codes["pytest"] = code
    assert main(["bench", "quantize_grad", *DEVICE]) == result
    assert len(commands) == 1 and "pytest" in commands[0]
    assert "quantize_grad" in capsys.readouterr().err


def test_no_test_times_at_once(ran: Any) -> None:
    commands, codes = ran
    codes["pytest"] = 1
    assert main(["bench", "quantize_grad", "--no-test", *DEVICE]) == 0
    assert [Path(command[1]).name for command in commands] == ["bench_quantize_grad.py"]


def test_of_all_only_the_red_one_is_left_out(ran: Any) -> None:
    commands, codes = ran
    codes["test_quantize_grad.py"] = 1
    assert main(["bench", *DEVICE]) >= 1
    timed = [Path(command[1]).stem for command in commands if "pytest" not in command]
    assert timed == [
        f"bench_{n}" for n in bench.scripts() if n != "quantize_grad" and bench.tests_of(n)
    ]


def test_a_benchmark_without_a_test_is_refused(
    ran: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "TESTS", tmp_path)
    assert main(["bench", "philox", *DEVICE]) == 2
    assert not ran[0] and "philox has no test (tests/**/test_philox.py)" in capsys.readouterr().err


@pytest.mark.parametrize("name", bench.scripts())
def test_every_benchmark_has_its_test(name: str) -> None:
    assert bench.tests_of(name)


def test_a_test_that_really_fails_is_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(bench, "TESTS", tmp_path / "tests")
    test = tmp_path / "tests" / "test_philox.py"
    test.write_text("def test_it():\n    assert False\n")
    assert bench._test("philox", DEVICE) == 1
    test.write_text("def test_it():\n    pass\n")
    assert bench._test("philox", DEVICE) == 0
    assert bench._test("philox", ["--device", "cuda"]) == 2, "no test of it is marked gpu"


def test_tune_is_asked_for_and_takes_no_name(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    commands, _ = ran
    assert main(["bench", "--tune", "--ranks", "64"]) == 0
    assert commands == [[sys.executable, str(bench.FOLDER / "ops" / "tune.py"), "--ranks", "64"]]
    assert main(["bench", "philox", "--tune"]) == 2
    assert "--tune takes no name, found 'philox'" in capsys.readouterr().err


def test_the_default_device_is_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        assert bench._on_gpu(["--shapes", "8x8"]) == found
