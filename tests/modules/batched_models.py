# SPDX-License-Identifier: Apache-2.0
"""A small model with several adapters, and each adapter's model alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lorakernels
from lorakernels import AdapterBatch, BlockScaling, LoRAConfig
from tests.fusion.fused_models import FP32, difference

NAMES = ("fr", "de", "it")
TOKENS = 16


def tiny_llama(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **{"vocab_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2, **sizes, **changes}
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.config.use_cache = False
    return model


# by the recipe's name, with sizes that it takes: the rows of k and v are a block
RECIPES = {
    "plain": (None, {}),
    "blocks": (BlockScaling(), {"hidden_size": 256, "intermediate_size": 128}),
    "blocks, e5m2": (BlockScaling("HYBRID", True), {"hidden_size": 256, "intermediate_size": 128}),
}


def adapted(fp8: Any = None, sizes: Any = None, **options: Any) -> Any:
    model = tiny_llama(**(sizes or {}))
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | options
    lorakernels.apply_lora(model, LoRAConfig(fp8=fp8, **options))
    return model.train()


def batched(fp8: Any = None, sizes: Any = None, **options: Any) -> tuple[Any, AdapterBatch]:
    """With values in every B."""
    model = adapted(fp8, sizes)
    batch = lorakernels.batch_adapters(model, NAMES, **options)
    for name in NAMES:
        for key, value in batch.parameters(name).items():
            if key.endswith("lora_B"):
                nn.init.normal_(value.data, std=0.1)
    return model, batch


def alone(model: Any, batch: AdapterBatch, name: str) -> Any:
    with batch.only(name):
        return copy.deepcopy(model)


def rows(model: Any, count: int = len(NAMES)) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (count, TOKENS))


def far(model: Any, batch: AdapterBatch, single: Any, name: str) -> float:
    """The largest difference of an adapter's gradients from those of `single`."""
    pairs = ((p.grad, single.get_parameter(key).grad) for key, p in batch.parameters(name).items())
    return max(difference(ours, theirs) for ours, theirs in pairs)


def bound(recipe: str) -> float:
    """Of a norm's relative difference from each adapter alone, whose products have fewer rows.

    A CPU may add them in another order. Over blocks, a last bit may then turn roundings, each by 2^-3 of an element.
    """
    return 2 * FP32 if recipe == "plain" else 2.0**-3
