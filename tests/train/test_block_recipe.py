# SPDX-License-Identifier: Apache-2.0
"""`lorakernels finetune --fp8-recipe block`: it trains, says what it holds, and resumes to the same bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

Cli = Callable[..., int]


def losses(output: Path) -> list[float]:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record.get("loss") is not None]


@pytest.fixture
def wide_model(model_dir: Path, tmp_path: Path) -> Path:
    """Its q, k and v have 128 rows each, so that a fused layer's blocks are theirs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "wide"
    shutil.copytree(model_dir, folder)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig.from_pretrained(model_dir, **sizes, **heads, head_dim=64)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
def test_an_offloaded_base_gives_the_same_adapter(
    fuse: bool, cli: Cli, base_args: list[str], deep_model: Path, wide_model: Path, tmp_path: Path
) -> None:
    form = ["--fuse", "--model", wide_model] if fuse else ["--no-fuse", "--model", deep_model]
    run = [*base_args, *form, "--steps", 2, "--fp8-recipe", "block"]
    assert cli(*run, "--output", tmp_path / "whole") == 0
    assert cli(*run, "--output", tmp_path / "away", "--offload", "0.5") == 0
    whole, away = (
        (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes()
        for name in ("whole", "away")
    )
    assert whole == away


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "asked", "said"),
    [
        (["--save", "recompute"], ["--save", "checkpoint"], "save checkpoint"),
        (
            ["--save", "recompute"],
            ["--save", "checkpoint", "--offload-activations"],
            "save checkpoint-offload",
        ),
        (["--save", "full"], ["--memory-budget", 1], "save full"),
        (["--save", "fp8"], ["--save", "fp8", "--offload-activations"], "save fp8-offload"),
    ],
    ids=["recomputed", "recomputed of the host's", "within a budget", "FP8 on the host"],
)
def test_what_a_layer_keeps_is_chosen_as_without_blocks(
    kept: list[object],
    asked: list[object],
    said: str,
    cli: Cli,
    base_args: list[str],
    wide_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = [*base_args, "--fuse", "--model", wide_model, "--steps", 2, "--fp8-recipe", "block"]
    assert cli(*run, *kept, "--output", tmp_path / "kept") == 0
    capsys.readouterr()
    assert cli(*run, *asked, "--output", tmp_path / "asked") == 0
    assert said in "".join(capsys.readouterr())
    one, other = (
        (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes()
        for name in ("kept", "asked")
    )
    assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
def test_it_trains_and_resumes_to_the_same_bits(
    fuse: bool,
    cli: Cli,
    base_args: list[str],
    wide_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["--fuse", "--model", wide_model] if fuse else []
    run = [*base_args, *more, "--output", tmp_path, "--steps", 8, "--save-every", 4]
    assert cli(*run, "--fp8-recipe", "block") == 0
    said = "".join(capsys.readouterr())
    assert "frozen weights in FP8 blocks" in said
    assert ("layers: 1 fused layers" in said) == fuse
    whole = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    found = losses(tmp_path)
    assert len(found) >= 2 and found[-1] < found[0]
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")
    assert cli(*run, "--resume") == 1
    assert "fp8_recipe was 'block', now it is 'delayed'" in "".join(capsys.readouterr())
    assert cli(*run, "--resume", "--fp8-recipe", "block") == 0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == whole
