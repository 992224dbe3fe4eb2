# SPDX-License-Identifier: Apache-2.0
"""The README's Python runs as it stands, on a small Llama; what it says of a GPU is left to one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lorakernels
from lorakernels import LoRAConfig, PhiloxState, apply_lora

transformers = pytest.importorskip("transformers")
TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
TEN_LINES, FUSED, SAVING, GRAPHS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a block finds: the public names, and a model in memory and in path/to/llama."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes, **heads))
    model.save_pretrained("path/to/llama")
    return {**vars(lorakernels), "model": model}


def run(code: str, names: dict[str, Any]) -> None:
    exec(code if torch.cuda.is_available() else code.replace(".cuda()", ""), names)


def train(names: dict[str, Any]) -> None:
    model, optimizer = names["model"], names["optimizer"]
    model.train()
    ids = torch.arange(16, device=model.device)[None]
    for _ in range(5):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_ten_lines(names: dict[str, Any]) -> None:
    before, after = TEN_LINES.split(
        "...  # train as always: model.train(), backward, step, zero_grad\n"
    )
    assert len([line for line in (before + after).splitlines() if line]) <= 10
    run(before, names)
    train(names)
    run(after, names)
    assert names["attached"].steps == 5
    assert Path("my-adapter/adapter_model.safetensors").is_file()


def test_fused_layers(names: dict[str, Any]) -> None:
    run(FUSED, names)


@pytest.mark.parametrize("line", SAVING.splitlines(), ids=lambda line: line.split("(")[0])
def test_saving(names: dict[str, Any], line: str) -> None:
    apply_lora(names["model"], LoRAConfig(target_modules="all-linear"))
    run(line, names)
    folder = re.findall(r'"([\w-]+)"', line)[0]
    assert list(Path(folder).glob("*.safetensors"))


@pytest.mark.gpu
def test_graphs(names: dict[str, Any]) -> None:
    philox = PhiloxState(1, "cuda")
    config = LoRAConfig(target_modules="all-linear")
    report = apply_lora(names["model"].cuda(), config, rng_state=philox)
    run(GRAPHS, {**names, "report": report, "philox": philox})
