# SPDX-License-Identifier: Apache-2.0
"""A small model's directory, read by us and by transformers, and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lorakernels import LoRAConfig, apply_lora, load_quantized

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich", reason="the generator of checkpoints is finetune's")
from tests.synthetic import Synthetic as Synthetic  # noqa: E402
from tests.synthetic import write_checkpoint as write_checkpoint  # noqa: E402

transformers.utils.logging.disable_progress_bar()

LORA = LoRAConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])


def config(kind: str = "Llama", **changes: Any) -> Any:
    """Sizes with partial 128 × 128 blocks, biases where the architecture has them."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 144,
        "intermediate_size": 272,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    return getattr(transformers, f"{kind}Config")(**(sizes | changes))


def theirs(folder: Path, lora: LoRAConfig | None, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    torch.manual_seed(5)
    if lora is not None:
        apply_lora(model, lora)
    return model


def ours(folder: Path, **options: Any) -> Any:
    torch.manual_seed(5)
    return load_quantized(folder, device="cpu", progress=False, **options)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    """Names, order, dtypes and bits of everything, buffers included; mode, and what trains."""
    for what in ("named_parameters", "named_buffers"):
        found, expected = ({n: t for n, t in getattr(m, what)()} for m in (one, other))
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
            assert found[name].requires_grad == tensor.requires_grad, name
            assert torch.equal(_bytes(found[name]), _bytes(tensor)), name
    modes = [{n: (type(m), m.training) for n, m in model.named_modules()} for model in (one, other)]
    assert modes[0] == modes[1]
    ids = torch.arange(24).view(2, 12)
    for model in (one, other):
        model.eval()
    with torch.no_grad():
        assert torch.equal(one(input_ids=ids).logits, other(input_ids=ids).logits)


def block_fp8(folder: Path, same: bool) -> dict[str, Tensor]:
    """A synthetic block-FP8 checkpoint, its scales made unequal unless `same`; its tensors."""
    write_checkpoint(folder, config(), block_fp8=True, shard_bytes=144 * 272)
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        if not same:
            for name in part:
                if name.endswith("_scale_inv"):
                    part[name] = part[name] * torch.rand_like(part[name])
            save_file(part, path, {"format": "pt"})
        tensors |= part
    return tensors


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)
