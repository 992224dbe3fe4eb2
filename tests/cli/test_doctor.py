# SPDX-License-Identifier: Apache-2.0
"""`lorakernels doctor`: its facts, its page, and what it advises."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks.report import costs
from lorakernels.cli import doctor, doctor_page
from lorakernels.cli.__main__ import main
from lorakernels.cli.costs import SLOWER
from lorakernels.ops.choice import implementations


def test_doctor_json_holds_every_op_of_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["devices"]) == 1 + torch.cuda.device_count()
    for device in facts["devices"]:
        assert {op.removesuffix(" (blocks)") for op in device["ops"]} == set(implementations("cpu"))
        assert all(op["implementation"] and op["reason"] for op in device["ops"].values())
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["extension"]["build"]["version"] == facts["packages"]["lorakernels"]


def test_the_page_names_versions_ops_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in (torch.__version__, "Build of lorakernels._C", "PyTorch on the CPU"):
        assert part in text
    assert text.startswith("lorakernels can train here, on ")
    if not torch.cuda.is_available():
        assert f"all {len(implementations('cpu'))} ops" in text


def gpu(capability: tuple[int, int], graph: str = "") -> dict[str, Any]:
    """What `collect` finds of one GPU."""
    return {
        "device": "cuda:0",
        "name": "NVIDIA A100",
        "capability": list(capability),
        "ops_as_on": list(capability),
        "memory_gib": 80.0,
        "multiprocessors": 108,
        "ops": doctor._ops("cuda", capability),
        "cudnn_graph": graph,
    }


def facts(*gpus: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = doctor.collect()
    devices = [device for device in found["devices"] if device["device"] == "cpu"]
    return {**found, "devices": [*devices, *gpus], **more}


def test_an_a100_gets_a_row_for_each_op_with_its_cost_and_the_command_that_changes_it() -> None:
    """The extension that is built here holds kernels for Hopper alone."""
    found = gpu((8, 0))
    page = doctor_page.render(facts(found, torch={"cuda_build": "13.0", "cuda_available": True}))
    assert page.startswith("lorakernels can train here, on 1 GPU.")
    rows = page.partition("What each op takes on cuda:0\n")[2].partition("\n\n")[0].splitlines()
    assert len(rows) == len(found["ops"]) + 1
    in_blocks = set(found["ops"]) - set(implementations("cpu"))
    assert in_blocks == {"fp8_linear_lora (blocks)", "fp8_grad_input (blocks)"}
    for (op, entry), row in zip(found["ops"].items(), rows, strict=False):
        assert (
            row.startswith(f"  {op}  ")
            and entry["implementation"] in row
            and entry["reason"] in row
        )
        factor = SLOWER.get((op, entry["implementation"]))
        assert row.endswith(f"[{factor:g} ×]" if factor else entry["reason"])
    slower = sum((op, entry["implementation"]) in SLOWER for op, entry in found["ops"].items())
    assert rows[-1].split()[0] == str(slower) and slower > 0
    assert 'LORAKERNELS_CUDA_ARCHS="80"' in page.partition("What would change that")[2]


def test_slower_implementations_cost_what_the_records_say() -> None:
    assert costs.table() == SLOWER
    assert {op for op, _ in SLOWER} <= set(implementations("cpu"))


HOST = {"compiler": "gcc", "cuda": False}
MISSING = {"error": "no such file", "build": None, "cuda_runtime": None}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"extension": MISSING}, "The extension: `pip install"),
        ({"extension": {"error": None, "build": HOST, "cuda_runtime": {}}}, "set CUDA_HOME"),
        ({"packages": {"peft": None}}, '"lorakernels[hf]"'),
        ({"packages": {"nvidia-cudnn-frontend": None}}, '"lorakernels[cudnn]"'),
        ({"packages": {"nvidia-cudnn-frontend": "1.23"}}, "by cuDNN's graphs: cuDNN is older"),
    ],
    ids=["no extension", "no nvcc", "no PEFT", "no cuDNN graphs", "an old cuDNN"],
)
def test_what_to_install(more: dict[str, Any], said: str) -> None:
    found = facts(
        gpu((9, 0), graph="cuDNN is older"), **{k: v for k, v in more.items() if k != "packages"}
    )
    found["packages"] = dict.fromkeys(found["packages"], "1.0") | more.get("packages", {})
    assert any(said in hint for hint in doctor_page.advice(found))


def test_nothing_is_advised_where_all_is_there() -> None:
    found = facts(gpu((9, 0)), torch={"cuda_build": "13.0", "cuda_available": True})
    found["packages"] = dict.fromkeys(found["packages"], "1.0")
    found["devices"][-1]["ops"] = {"rope_qkv": {"implementation": "triton", "reason": "one pass"}}
    assert list(doctor_page.advice(found)) == []
    assert "What would change that" not in doctor_page.render(found)


@pytest.mark.parametrize("why", ["LORAKERNELS_CUDA=0 was set", None])
def test_doctor_says_why_there_is_no_csrc(why: str | None) -> None:
    build = {"compiler": "gcc", "cuda": False, **({"why_no_cuda": why} if why else {})}
    lines = doctor_page._build({"error": None, "build": build, "cuda_runtime": {}})
    assert f"host part only ({why or 'no nvcc was found'}, when it was built)" in lines[-1]


def test_doctor_without_the_extension_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = facts(extension=MISSING)
    monkeypatch.setattr(doctor, "collect", lambda: found)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("lorakernels cannot train here") and "missing: no such file" in said


def test_a_broken_transformer_engine_does_not_break_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert doctor._transformer_engine("2.0") == "import fails: exit code 1"
    assert doctor._transformer_engine(None) == "not installed"


@pytest.mark.parametrize("folders", [["/a"], ["/a", "/b"]], ids=["one cuDNN", "two"])
def test_doctor_says_whether_transformer_engine_brings_another_cudnn(
    folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = subprocess.CompletedProcess([], 0, "\n".join(folders) + "\n", "")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: found)
    two = ", with parts of two cuDNNs (/a and /b): CUDNN_HOME and LD_LIBRARY_PATH help"
    assert doctor._transformer_engine("2.0") == "imports" + two * (len(folders) > 1)
