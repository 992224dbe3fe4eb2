# SPDX-License-Identifier: Apache-2.0
"""Files of a base that hold more than the model, something twice, or what transformers would read otherwise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("rich", reason="one of the ways is finetune's")

from lorakernels import load_quantized  # noqa: E402
from lorakernels.checkpoints.export.model import check_export  # noqa: E402
from lorakernels.integrations.quantizer import LoRAKernelsConfig  # noqa: E402
from lorakernels.train.errors import ModelError  # noqa: E402
from lorakernels.train.model.model import load_model  # noqa: E402
from tests.checkpoints.base_forms import IN_BLOCKS, TAKEN, Stored, in_blocks, write_form  # noqa: E402

BF16 = TAKEN["bf16"]
REFUSALS = (ValueError, ModelError)


def by_load_quantized(base: Path, said: list[str]) -> Any:
    loaded = load_quantized(base, device="cpu", frozen="plain", progress=False)
    said += loaded.left_out
    return loaded.model


def by_transformers(base: Path, said: list[str]) -> Any:
    return load_model(base, torch.bfloat16, torch.device("cpu"), said.append)


def by_quantizer(base: Path, said: list[str]) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, quantization_config=LoRAKernelsConfig()
    )


def by_export(base: Path, said: list[str]) -> None:
    check_export(base, base.parent / "merged")


WAYS = {
    "load_quantized": by_load_quantized,
    "transformers": by_transformers,
    "quantizer": by_quantizer,
    "export": by_export,
}
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorakernels.train.model.model.TOKENIZER_FILES", ("config.json",))


def add(base: Path, **tensors: Tensor) -> Path:
    """Add tensors; in their names, __ is a dot."""
    path = base / "model.safetensors"
    more = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(load_file(path) | more, path, {"format": "pt"})
    return base


def configure(base: Path, **changes: Any) -> Path:
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return base


def second_set(base: Path) -> str:
    """As an earlier save may leave it, with other values."""
    values = {name: value * 2 for name, value in load_file(base / "model.safetensors").items()}
    save_file(values, base / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = {"weight_map": dict.fromkeys(values, "model-00001-of-00001.safetensors")}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    return "holds two sets of weights, model.safetensors and 1 other"


def two_names(base: Path) -> str:
    """transformers reads the last one."""
    add(base, layers__0__input_layernorm__weight=torch.full((32,), 7.0))
    return r"layers\.0\.input_layernorm\.weight of the checkpoint are both model\.layers\.0"


def a_bias(base: Path) -> str:
    """Of a config that says attention_bias=False."""
    add(base, model__layers__0__self_attn__q_proj__bias=torch.ones(32))
    return r"model\.layers\.0\.self_attn\.q_proj\.bias"


def other_file(base: Path) -> str:
    configure(base, transformers_weights="other.safetensors")
    (base / "other.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    return r"transformers_weights='other\.safetensors'"


@ways
@pytest.mark.parametrize(
    "change", [second_set, two_names, a_bias, other_file], ids=lambda f: f.__name__
)
def test_a_base_of_two_meanings_is_refused_in_all_ways(
    change: Callable[[Path], str], way: str, tmp_path: Path
) -> None:
    base = write_form(tmp_path / "base", BF16)
    message = change(base)
    with pytest.raises(REFUSALS, match=message):
        WAYS[way](base, [])


@ways
def test_an_index_of_the_one_file_is_no_second_set(way: str, tmp_path: Path) -> None:
    base = write_form(tmp_path / "base", BF16)
    names = load_file(base / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    WAYS[way](base, [])


@pytest.mark.parametrize("way", ["load_quantized", "transformers"])
def test_what_is_not_read_is_said(way: str, tmp_path: Path, monkeypatch: Any) -> None:
    """What models compute, and, with its scales, what the class leaves out by its own list."""
    monkeypatch.setattr(
        transformers.LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", {r"^mtp\."}
    )
    base = write_form(tmp_path / "base", Stored(in_blocks, IN_BLOCKS))
    extra = in_blocks(torch.ones(32, 32))
    add(
        base,
        mtp__proj__weight=extra["weight"],
        mtp__proj__weight_scale_inv=extra["weight_scale_inv"],
    )
    add(base, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    said: list[str] = []
    WAYS[way](base, said)
    for name in ("mtp.proj.weight", "mtp.proj.weight_scale_inv", "rotary_emb.inv_freq"):
        assert name in " ".join(said)


@ways
def test_a_mask_of_bytes_is_no_quantized_weight(way: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Old files of GPT-NeoX hold a causal mask for each layer, which its class leaves out by its own list."""
    monkeypatch.setattr(
        transformers.LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", {r"self_attn\.bias$"}
    )
    base = write_form(tmp_path / "base", BF16)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.uint8).tril()
    add(base, model__layers__0__self_attn__bias=mask)
    WAYS[way](base, [])


def test_blocks_that_transformers_would_divide_evenly_are_refused_to_it(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """144 rows have 2 scales, for 128 and 16 of them. transformers takes 72 and 72."""
    base = write_form(tmp_path / "base", TAKEN["blocks"])

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("a reason before a value is read")

    monkeypatch.setattr("lorakernels.train.model.model.load_quantized", refuse)
    said: list[str] = []
    with pytest.raises(ModelError, match="does not consist of whole blocks"):
        by_transformers(base, said)
    assert re.search("a reason before a value is read", said[0])
