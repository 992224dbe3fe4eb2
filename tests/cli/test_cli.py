# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import lorakernels
from lorakernels.cli import bench, doctor
from lorakernels.cli.__main__ import COMMANDS, main
from lorakernels.train.options.options import FinetuneOptions


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: lorakernels {command}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doktor"], "unknown command 'doktor'; did you mean doctor?"),
        (["train"], "unknown command 'train'; did you mean finetune?"),
        (["fine-tune", "--r", "8"], "unknown command 'fine-tune'; did you mean finetune?"),
        (["merge"], "unknown command 'merge'; did you mean export?"),
        (["benchmark"], "unknown command 'benchmark'; did you mean bench?"),
        (["zzz"], "unknown command 'zzz'; there are doctor, bench, finetune, plan, export"),
        (
            ["doctor", "--jason"],
            "lorakernels doctor: error: unknown option --jason; did you mean --json?",
        ),
        (
            ["doctor", "--js"],
            "lorakernels doctor: error: unknown option --js; did you mean --json?",
        ),
        (["doctor", "cpu"], "lorakernels doctor: error: unexpected argument 'cpu'"),
        (["finetune", "--load-in-4bit"], "option --load-in-4bit: there is no 4-bit or 8-bit base"),
        (["finetune", "--learning-rate", "1e-3"], "option --learning-rate; did you mean --lr?"),
        (["finetune", "--lora-d", "0"], "option --lora-d; did you mean --"),
        (["finetune", "--r", "four"], "argument --r: invalid int value: 'four'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1, "one line, without the usage"


def test_no_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([])
    assert exit_info.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith("usage: lorakernels") and all(name in told for name in COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["lorakernels", "lorakernels.cli"])
def test_the_package_runs_as_a_module(module: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith("lorakernels ")


def test_versions_of_a_checkout_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PYTHONPATH alone brings no metadata of the package. A run would have ended at its adapter's card."""
    from lorakernels.train.model_card import model_card

    def none_found(name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", none_found)
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"lorakernels {lorakernels.__version__}\n"
    assert doctor.collect()["packages"]["lorakernels"] == lorakernels.__version__
    card = model_card(Path("base"), FinetuneOptions(), "", "", {}).decode()
    assert f"- lorakernels: {lorakernels.__version__}\n- torch: {torch.__version__}\n" in card


@pytest.mark.slow
def test_bench_runs_one_by_name_and_passes_its_arguments_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = ["--device", "cpu", "--shapes", "40x64", "--ranks", "5", "--repetitions", "1"]
    assert main(["bench", "quantize_grad", "--no-test", *options]) == 0
    out = capfd.readouterr().out
    assert "40x64" in out and "ours" in out and "WRONG" not in out


@pytest.mark.parametrize("named", [["all"], []], ids=["all", "no-name"])
def test_bench_all_runs_every_one_and_reports_the_worst(
    named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def fake(command: list[str]) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 1 if "philox" in command[1] else 0)

    monkeypatch.setattr(bench.subprocess, "run", fake)
    assert main(["bench", *named, "--no-test", "--repetitions", "2"]) == 1
    assert [Path(command[1]).stem for command in ran] == [f"bench_{n}" for n in bench.scripts()]
    assert all(command[2:] == ["--repetitions", "2"] for command in ran)


@pytest.mark.parametrize(
    ("flag", "script"), [("--tune", "tune"), ("--quick", "check_gpu")], ids=["tune", "quick"]
)
def test_bench_of_a_flag_runs_its_script_and_takes_no_name(
    flag: str, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Path] = []
    monkeypatch.setattr(bench, "_script", lambda path, options: ran.append(path) or 0)
    assert main(["bench", flag]) == 0
    assert [path.stem for path in ran] == [script] and ran[0].is_file()
    assert main(["bench", flag, "philox"]) == 2
    assert f"{flag} takes no name, found 'philox'" in capsys.readouterr().err


def test_bench_of_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lora_liner"]) == 2
    message = capsys.readouterr().err
    assert "no benchmark named 'lora_liner'" in message
    assert all(name in message for name in ("lora_linear", "philox", "fp8_state", "all"))


def test_bench_of_an_installed_wheel_says_where_the_benchmarks_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "FOLDER", bench.FOLDER / "missing")
    assert main(["bench"]) == 2
    assert "the benchmarks are in the source tree" in capsys.readouterr().err
