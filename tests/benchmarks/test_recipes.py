# SPDX-License-Identifier: Apache-2.0
"""benchmarks/recipes: `finetune` takes the options of each file, and the plan that stands above them can be made."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.report.recipes import RECIPES, Recipe
from lorakernels.cli.__main__ import main
from lorakernels.train.options.sources import resolve

pytest.importorskip("transformers")
FOLDER = Path(__file__).parents[2] / "benchmarks" / "recipes"
# Of the models' own config.json
SIZES = {
    "Llama-3.1-8B-Instruct": (4096, 14336, 32, 32, 128256, 131072),
    "Llama-3.1-405B": (16384, 53248, 126, 128, 128256, 131072),
    "Llama-2-70b-8k": (8192, 28672, 80, 64, 32000, 8192),
}
NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def test_every_recipe_has_a_row() -> None:
    assert {recipe.file for recipe in RECIPES} == {path.name for path in FOLDER.glob("*.yaml")}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.file)
def test_a_recipe_can_be_planned_and_its_options_are_known(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (FOLDER / recipe.file).read_text("utf-8")
    (plan,) = re.findall(r"^#   lorakernels (plan .*)$", text, re.MULTILINE)
    model = re.findall(r"--model models/(\S+)", plan)[0]
    config = dict(zip(NAMES, SIZES[model], strict=True)) | {"num_key_value_heads": 8}
    (tmp_path / "models" / model).mkdir(parents=True)
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "models" / model / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(plan)) == 0
    assert "tokens a second" in capsys.readouterr().out
    options = resolve({"config": str(FOLDER / recipe.file), "output": "out"}, {})
    assert f"--seq-len {options.seq_len} " in plan and options.model == f"models/{model}"
