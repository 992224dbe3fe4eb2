# SPDX-License-Identifier: Apache-2.0
"""Models with towers, whose tensors have other names in the files than in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("rich", reason="one of the ways is finetune's")

from lorakernels import (  # noqa: E402
    LoRAConfig,
    apply_lora,
    check_export,
    export_model,
    load_quantized,
    merge_and_unload,
    save_adapter,
)
from lorakernels.train.model.model import load_model  # noqa: E402

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
PROJECTED = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
QUERIES = r".*(language_model|model)\.layers.*q_proj"


def gemma3() -> Any:
    sizes = {**VISION, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=TEXT, vision_config=sizes, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def llama4() -> Any:
    """AutoModelForCausalLM takes its text part alone."""
    text = {**TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2}
    vision = {**VISION, **PROJECTED, "image_size": 28, "patch_size": 14}
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    return transformers.Llama4ForConditionalGeneration(config)


def mistral3() -> Any:
    """AutoModelForCausalLM has no class for it."""
    vision = {**VISION, "image_size": 28, "patch_size": 14, "head_dim": 16}
    config = transformers.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral"},
        vision_config=vision | {"model_type": "pixtral"},
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def write(make: Any, folder: Path) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = make().to(torch.bfloat16)
    model.save_pretrained(folder)  # by the names that the family's files have
    return model


@pytest.mark.parametrize("make", [gemma3, llama4], ids=lambda f: f.__name__)
def test_all_ways_find_the_tensors(make: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("lorakernels.train.model.model.TOKENIZER_FILES", ("config.json",))
    base, merged, adapter = (tmp_path / name for name in ("base", "merged", "adapter"))
    write(make, base)
    said: list[str] = []
    expected = load_model(base, torch.bfloat16, torch.device("cpu"), said.append)
    loaded = load_quantized(base, device="cpu", frozen="plain", progress=False)
    values = expected.state_dict()
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, values[name]), name
    assert bool(said) == bool(loaded.left_out) == (make is llama4)
    assert all("vision" in name or "multi_modal" in name for name in loaded.left_out)

    apply_lora(expected, LoRAConfig(r=2, fp8=None, target_modules=QUERIES))
    for parameter in expected.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    save_adapter(expected, adapter)
    export_model(base, adapter, merged)
    again = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.bfloat16)
    values = merge_and_unload(expected).state_dict()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in values.items())
    files = [load_file(folder / "model.safetensors").keys() for folder in (base, merged)]
    assert files[0] == files[1]


def test_a_model_without_a_causal_lm_is_refused_in_one_line(tmp_path: Path) -> None:
    expected = write(mistral3, tmp_path / "base").state_dict()
    message = r"^transformers has no causal LM of a Mistral3Config \(model_type 'mistral3'\)[^\n]*"
    with pytest.raises(ValueError, match=f"{message}give load_quantized a model_class$"):
        load_quantized(tmp_path / "base", device="cpu", progress=False)
    with pytest.raises(ValueError, match=f"{message}merge_and_unload merges"):
        check_export(tmp_path / "base", tmp_path / "merged")
    loaded = load_quantized(
        tmp_path / "base",
        device="cpu",
        frozen="plain",
        progress=False,
        model_class=transformers.Mistral3ForConditionalGeneration,
    )
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
