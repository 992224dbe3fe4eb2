# SPDX-License-Identifier: Apache-2.0
"""Bases and adapters in directories, and what transformers makes of the merged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lorakernels import LoRAConfig, apply_lora, merge_and_unload, save_adapter

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "use_cache": False,
}
TOKENIZER = {"version": "1.0", "model": {"type": "BPE"}}


def write_base(
    folder: Path,
    kind: str = "Llama",
    *,
    shard: str = "100KB",
    dtype: Any = torch.bfloat16,
    **sizes: Any,
) -> Path:
    """A small base in several files, with the small files that lie beside weights."""
    config = getattr(transformers, f"{kind}Config")(
        **(SIZES | {"tie_word_embeddings": False} | sizes)
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.normal_(parameter, float("norm" in name), std=0.1)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("mine")
    return folder


def load_base(folder: Path) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def write_adapter(base: Path, folder: Path, **config: Any) -> nn.Module:
    """An adapter over `base` that moves its logits; the adapted model, over a bf16 base."""
    model = load_base(base).eval()
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **config}
    apply_lora(model, LoRAConfig(fp8=None, **config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    save_adapter(model, folder)
    return model


def merged_tensors(model: nn.Module) -> dict[str, Tensor]:
    return merge_and_unload(model).state_dict()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def reload(folder: Path, **options: Any) -> nn.Module:
    """As transformers reads it; what it would only warn of is an error."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **{"dtype": "auto", **options}
    )
    assert not any(info.values()), info
    return model


def logits(model: nn.Module) -> Tensor:
    ids = torch.arange(24).view(2, 12) % SIZES["vocab_size"]
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits
