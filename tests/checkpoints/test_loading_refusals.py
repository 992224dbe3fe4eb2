# SPDX-License-Identifier: Apache-2.0
"""load_quantized: damaged checkpoints and wrong options are refused, mostly before any value is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorakernels import LoRAConfig
from lorakernels.checkpoints.base.shards import Directory
from tests.small_checkpoints import config, ours, transformers, write_checkpoint


def damage(folder: Path, how: str) -> str:
    """Break the checkpoint; what the error must say."""
    shards = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if how == "missing shard":
        shards[1].unlink()
        return f"lacks 1 of {len(shards)} files: {shards[1].name}"
    if how == "truncated shard":
        with shards[1].open("r+b") as file:
            file.truncate(shards[1].stat().st_size - 1)
        return f"{shards[1]} is truncated or corrupted"
    if how == "no safetensors":
        for path in [*shards, index]:
            path.unlink()
        return "lacks 1 of 1 files: model.safetensors"
    if how == "index lies":
        table = json.loads(index.read_text())
        table["weight_map"]["model.norm.weight"] = shards[0].name
        index.write_text(json.dumps(table))
        return "lacks 1 tensors of model.safetensors.index.json: model.norm.weight"
    tensors = load_file(shards[-1])
    if how == "missing and unexpected":
        tensors["model.other.weight"] = tensors.pop("model.norm.weight")
        expected = "1 missing (model.norm.weight) and 1 unexpected (model.other.weight)"
    elif how == "wrong shape":
        tensors["model.norm.weight"] = torch.ones(143, dtype=torch.bfloat16)
        expected = "model.norm.weight is [143] in the checkpoint, [144] in the model"
    elif how == "scale without e4m3":
        tensors["lm_head.weight_scale_inv"] = torch.ones(1)
        expected = "lm_head.weight is BF16 with lm_head.weight_scale_inv"
    else:
        name = next(n for n in tensors if n.endswith("mlp.down_proj.weight"))
        tensors[name][3, 5] = float("nan")
        expected = f"{name}: weight must be finite to be held in FP8"
    index.unlink()
    everything: dict[str, Tensor] = {}
    for path in shards[:-1]:
        everything |= load_file(path)
        path.unlink()
    shards[-1].unlink()
    save_file(everything | tensors, folder / "model.safetensors", {"format": "pt"})
    return expected


@pytest.mark.parametrize(
    "how",
    [
        "missing shard",
        "truncated shard",
        "no safetensors",
        "index lies",
        "missing and unexpected",
        "wrong shape",
        "scale without e4m3",
        "not finite",
    ],
)
def test_a_damaged_checkpoint_is_refused(how, tmp_path, monkeypatch):
    """And, but for a value, before any value is read."""
    write_checkpoint(tmp_path, config(), shard_bytes=400_000)
    expected = damage(tmp_path, how)
    read: list[str] = []
    real = Directory.open
    monkeypatch.setattr(Directory, "open", lambda self, s: (read.append(s), real(self, s))[1])
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        ours(tmp_path)
    assert expected in str(caught.value)
    assert bool(read) == (how == "not finite")


def test_a_tensor_in_two_shards_is_read_where_the_index_says(tmp_path):
    """Else refused: nothing says which one is meant."""
    write_checkpoint(tmp_path, config(), shard_bytes=400_000)
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    name = "model.layers.0.input_layernorm.weight"
    right = table["weight_map"][name]
    others = sorted(set(table["weight_map"].values()) - {right})
    for shard in others:
        save_file(load_file(tmp_path / shard) | {name: torch.full((144,), 7.0)}, tmp_path / shard)
    assert max(others) > right, "a later file would win"
    assert (ours(tmp_path).model.get_parameter(name) == 1).all()
    del table["weight_map"][name]
    index.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=rf"{name} is in \S+ and in \S+, but not in model"):
        Directory(tmp_path)


def test_a_tied_head_that_differs_is_refused(tmp_path):
    made = transformers.LlamaForCausalLM(config(tie_word_embeddings=False))
    made.save_pretrained(tmp_path)
    tied = config(tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        ours(tmp_path, config=tied)
    made.lm_head.weight = made.model.embed_tokens.weight
    save_file({n: t.clone() for n, t in made.state_dict().items()}, tmp_path / "model.safetensors")
    model = ours(tmp_path, config=tied).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frozen": "bf16"}, 'must be "fp8" or "plain"'),
        ({"lora": LoRAConfig(target_modules=["q_proj"], fp8=None)}, "lora.fp8 must be"),
        ({"lora": LoRAConfig(target_modules=["x_proj"])}, "matches no module"),
    ],
    ids=["frozen", "no recipe", "no target"],
)
def test_wrong_options_are_refused(options, message, tmp_path):
    write_checkpoint(tmp_path, config())
    with pytest.raises(ValueError, match=message):
        ours(tmp_path, **options)
