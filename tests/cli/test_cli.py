# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import sys

import pytest
import torch

from lorakernels.cli import bench, doctor
from lorakernels.cli.__main__ import COMMANDS, main
from lorakernels.kernels.ladder import OPS


def test_doctor_json_holds_every_op_of_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["devices"]) == 1 + torch.cuda.device_count()
    for device in facts["devices"]:
        assert set(device["ops"]) == set(OPS)
        assert all(op["implementation"] and op["reason"] for op in device["ops"].values())
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["extension"]["build"]["version"] == facts["packages"]["lorakernels"]


def test_doctor_text_names_versions_ops_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in (torch.__version__, "lorakernels._C", *OPS, "PyTorch on the CPU"):
        assert part in text


def facts_without(error: str) -> dict[str, object]:
    extension = {"error": error, "build": None, "cuda_runtime": None}
    return {**doctor.collect(), "extension": extension}


def test_doctor_without_the_extension_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = facts_without("no such file")
    monkeypatch.setattr(doctor, "collect", lambda: facts)
    assert main(["doctor"]) == 1
    assert "missing: no such file" in capsys.readouterr().out


def test_a_broken_transformer_engine_does_not_break_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert doctor._transformer_engine("2.0") == "import fails: exit code 1"
    assert doctor._transformer_engine(None) == "not installed"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: lorakernels {command}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doktor"], "invalid choice: 'doktor'"),
        ([], "required: COMMAND"),
        (["doctor", "--jason"], "lorakernels doctor: error: unrecognized arguments: --jason"),
    ],
    ids=["unknown-command", "no-command", "unknown-option"],
)
def test_wrong_usage_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_bench_runs_and_passes_its_arguments_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", "--shapes", "4x16x32", "--repetitions", "1"]) == 0
    out = capfd.readouterr().out
    assert "4x16x32" in out and "lorakernels-fp8" in out and "WRONG" not in out


def test_bench_of_an_installed_wheel_says_where_the_benchmarks_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SCRIPT", bench.SCRIPT.with_name("missing.py"))
    assert main(["bench"]) == 2
    assert "the benchmarks are in the source tree" in capsys.readouterr().err
