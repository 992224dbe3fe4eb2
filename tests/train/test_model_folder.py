# SPDX-License-Identifier: Apache-2.0
"""What a user gives as --model that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lorakernels.cli.__main__ import main
from lorakernels.train.model.folder import why_no_model

FILES = {
    "x.gguf": "",
    "w/model.safetensors": "",
    "adapter/adapter_config.json": json.dumps({"base_model_name_or_path": "models/base"}),
    "broken/adapter_config.json": "{",
    "run/adapter/adapter_config.json": json.dumps({"base_model_name_or_path": "models/base"}),
    "merging/adapter/adapter_config.json": "{}",
    "merging/merged/config.json": "{}",
    "models--org--name/snapshots/abc/config.json": "{}",
    "quantized/q4.gguf": "",
    "notes/readme.txt": "",
}
WHY = {
    "x.gguf": "x.gguf is a GGUF file: give the folder of the model that it was made from",
    "w/model.safetensors": "is a file of weights, expected a folder with config.json: its own is w",
    "adapter": "adapter is an adapter; its base is models/base: give that",
    "broken": "broken is an adapter; its base is not named in adapter_config.json",
    "run": "run is the output of a run: its base is models/base",
    "merging": "merging is the output of a run: give merging/merged",
    "models--org--name": "a folder of the hub's cache: give models--org--name/snapshots/abc",
    "quantized": "quantized has no config.json; quantized/q4.gguf is a GGUF file",
    "notes": "model directory notes has no config.json",
    "org/name": "org/name does not exist or is not a directory; to download it: hf download org/name",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", WHY)
def test_it_is_said_what_it_is(name: str) -> None:
    assert WHY[name] in str(why_no_model(Path(name)))


@pytest.mark.parametrize(
    "words",
    ["finetune --data d --output o", "plan", "export --adapter adapter --output o"],
    ids=["finetune", "plan", "export"],
)
def test_every_command_says_it(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "--model", "x.gguf"]) == 1
    told = capsys.readouterr().err
    assert WHY["x.gguf"] in told and told.count("\n") == 1


def test_a_model_is_none_of_these(tmp_path: Path) -> None:
    assert why_no_model(tmp_path / "merging" / "merged") is None
