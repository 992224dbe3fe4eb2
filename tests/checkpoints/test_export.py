# SPDX-License-Identifier: Apache-2.0
"""export_model in bf16: the tensors, bit for bit, that merge_and_unload leaves, and the files around them."""

from __future__ import annotations

import copy
import json
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from lorakernels import LoRAConfig, apply_lora, export_model, save_adapter
from lorakernels.checkpoints.base.shards import Directory
from lorakernels.checkpoints.export.plan import read_adapter
from lorakernels.checkpoints.loading.load import FP8Weight
from lorakernels.modules.model.convert import dequantize
from tests.adapter_files import Model
from tests.checkpoints.exported import (
    logits,
    merged_tensors,
    reload,
    tensors_of,
    write_adapter,
    write_base,
)
from tests.small_checkpoints import block_fp8

CASES = {
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {"model.layers.0.self_attn.q_proj": 7},
        "alpha_pattern": {"down_proj": 3},
    },
    "rslora": {"target_modules": ["k_proj", "o_proj"], "use_rslora": True},
    "biases under adapters": {"bias": "lora_only"},
    "every bias": {"bias": "all", "modules_to_save": ["norm"]},
    "an adapted head": {"target_modules": ["q_proj", "lm_head"]},
    "a trained head": {"modules_to_save": ["lm_head"]},
    "a trained embedding": {"modules_to_save": ["embed_tokens"]},
}


def assert_same_tensors(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = tensors_of(folder)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_bf16_is_merge_and_unload_bit_for_bit(case, tied, tmp_path):
    """Qwen2: biases on q, k, v."""
    base = write_base(tmp_path / "base", "Qwen2", tie_word_embeddings=tied)
    model = write_adapter(base, tmp_path / "adapter", **CASES[case])
    done = export_model(base, tmp_path / "adapter", tmp_path / "merged")
    expected = merged_tensors(model)
    apart = "head" in case or "embedding" in case
    if tied and not apart:
        del expected["lm_head.weight"]
    assert_same_tensors(tmp_path / "merged", expected)
    again = reload(tmp_path / "merged")
    assert torch.equal(logits(again), logits(model))
    assert again.config.tie_word_embeddings == (tied and not apart)
    assert done.shards == len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    assert done.bytes == sum(t.numel() * t.element_size() for t in expected.values())


def test_an_fp32_base_is_rounded_once_and_one_file_stays_one(tmp_path):
    base = write_base(tmp_path / "base", dtype=torch.float32, shard="1GB")
    write_adapter(base, tmp_path / "adapter")
    export_model(base, tmp_path / "adapter", tmp_path / "merged")
    found, before, lora = (tensors_of(tmp_path / d) for d in ("merged", "base", "adapter"))
    for name, value in before.items():
        path = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{path}.lora_A.weight" in lora:
            value = value + 2.0 * (lora[f"{path}.lora_B.weight"] @ lora[f"{path}.lora_A.weight"])
        assert torch.equal(found[name], value.bfloat16()), name
    assert [p.name for p in (tmp_path / "merged").glob("*.safetensors*")] == ["model.safetensors"]
    assert reload(tmp_path / "merged").dtype == torch.bfloat16


def test_what_a_bf16_base_holds_in_fp32_stays_so(tmp_path):
    base = write_base(tmp_path / "base", shard="1GB")
    tensors = tensors_of(base)
    tensors["model.norm.weight"] = torch.randn(128)
    tensors["extra.steps"] = torch.tensor([3])
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    write_adapter(base, tmp_path / "adapter")
    export_model(base, tmp_path / "adapter", tmp_path / "merged")
    found = tensors_of(tmp_path / "merged")
    for name in ("model.norm.weight", "extra.steps"):
        assert found[name].dtype == tensors[name].dtype and torch.equal(found[name], tensors[name])


def test_a_block_fp8_base_is_dequantized(tmp_path):
    """144 wide: blocks that are not whole."""
    tensors = block_fp8(tmp_path / "base", same=False)
    plain = {
        name: dequantize(FP8Weight(name, value, tensors[f"{name}_scale_inv"], (128, 128)))
        if f"{name}_scale_inv" in tensors
        else value
        for name, value in tensors.items()
        if not name.endswith("_scale_inv")
    }
    (tmp_path / "plain").mkdir()
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    write_adapter(tmp_path / "plain", tmp_path / "adapter")
    for name in ("base", "plain"):
        export_model(tmp_path / name, tmp_path / "adapter", tmp_path / f"of {name}")
    expected = tensors_of(tmp_path / "of plain")  # which stays fp32 where nothing is merged
    assert_same_tensors(tmp_path / "of base", {k: v.bfloat16() for k, v in expected.items()})
    assert "quantization_config" not in (tmp_path / "of base" / "config.json").read_text()
    reload(tmp_path / "of base")


def test_the_small_files_come_along_and_the_adapters_tokenizer_wins(tmp_path):
    base = write_base(tmp_path / "base")
    write_adapter(base, tmp_path / "adapter")
    (base / ".hidden.json").write_text("{}")
    export_model(base, tmp_path / "adapter", tmp_path / "a")
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (base / name).read_bytes()
    assert not {".hidden.json", "adapter_config.json"} & {
        p.name for p in (tmp_path / "a").iterdir()
    }
    (tmp_path / "adapter" / "tokenizer.json").write_text("{}")
    export_model(base, tmp_path / "adapter", tmp_path / "b")
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "b" / "chat_template.jinja").exists(), (
        "the base's belongs to its tokenizer"
    )
    assert (tmp_path / "b" / "LICENSE").exists()


def test_one_tensor_of_the_base_is_in_memory_at_a_time(tmp_path, monkeypatch):
    base = write_base(tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    alive: weakref.WeakSet = weakref.WeakSet()
    most, read = [0], []

    class Counting(Directory):
        def open(self, shard):
            context = super().open(shard)

            class Opened:
                def __enter__(self):
                    get = context.__enter__()

                    def counted(name):
                        tensor = get(name)
                        alive.add(tensor.untyped_storage())
                        most[0] = max(most[0], len(alive))
                        read.append(name)
                        return tensor

                    return counted

                def __exit__(self, *error):
                    return context.__exit__(*error)

            return Opened()

    monkeypatch.setattr("lorakernels.checkpoints.export.model.Directory", Counting)
    export_model(base, tmp_path / "adapter", tmp_path / "merged", format="fp8")
    assert len(read) == len(Directory(base).tensors)
    assert most[0] <= 2, "the one that is being written, and the next"


def test_files_are_what_safetensors_itself_reads(tmp_path):
    """Offsets without gaps, aligned to the dtype; an index that names every tensor's file."""
    base = write_base(tmp_path / "base")
    write_adapter(base, tmp_path / "adapter")
    export_model(base, tmp_path / "adapter", tmp_path / "merged", format="fp8")
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    seen = {}
    for path in (tmp_path / "merged").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            seen |= {name: path.name for name in list(file.keys())}
    assert index["weight_map"] == seen
    total = sum(t.numel() * t.element_size() for t in tensors_of(tmp_path / "merged").values())
    assert index["metadata"]["total_size"] == total


def test_a_base_whose_tied_names_are_both_in_the_file(tmp_path):
    base = write_base(tmp_path / "base", tie_word_embeddings=True, shard="1GB")
    tensors = tensors_of(base)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    model = write_adapter(base, tmp_path / "adapter", target_modules=["lm_head"])
    export_model(base, tmp_path / "adapter", tmp_path / "merged")
    again = reload(tmp_path / "merged")
    assert not again.config.tie_word_embeddings
    merged_tensors(model)
    assert torch.equal(logits(again), logits(model))


def test_only_the_base_under_an_adapter_loses_pefts_name_for_it(tmp_path):
    """A saved module may have a part of that name itself."""
    model = Model()
    model.head = nn.Sequential(OrderedDict(base_layer=nn.Linear(12, 7)))
    config = LoRAConfig(target_modules=["q"], modules_to_save=["head"], bias="lora_only", fp8=None)
    adapted = copy.deepcopy(model)
    apply_lora(adapted, config)
    save_adapter(adapted, tmp_path)
    nothing: Any = None  # only adapters of experts read the base's files
    found = read_adapter(model, tmp_path, nothing)
    layers = [f"layers.{i}.q" for i in (0, 1)]
    assert set(found.deltas) == {*layers}
    assert set(found.values) == {f"head.base_layer.{each}" for each in ("weight", "bias")} | {
        f"{path}.bias" for path in layers
    }
