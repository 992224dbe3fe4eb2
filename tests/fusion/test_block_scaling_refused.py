# SPDX-License-Identifier: Apache-2.0
"""What is not done under BlockScaling is refused by name, and nothing is changed: parallelize."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lorakernels import BlockScaling, LoRAConfig, apply_lora
from lorakernels.parallel.tensor.check import check, targets_in
from lorakernels.parallel.tensor.layers import ColumnLoRA, cut

transformers = pytest.importorskip("transformers")


@pytest.fixture
def model() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 40, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    config = LoRAConfig(r=2, target_modules=["q_proj", "down_proj"], fp8=BlockScaling())
    apply_lora(made, config, frozen="fp8")
    return made


def cut_in_two(model: Any) -> None:
    cut(model.model.layers[0].self_attn.q_proj, ColumnLoRA, SimpleNamespace(size=2))  # type: ignore[arg-type]


def split_in_two(model: Any) -> None:
    check(model, targets_in(model), SimpleNamespace(size=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (split_in_two, r"layers.0\S* follows BlockScaling and has out_features \d+, which must be a multiple of"),
        (cut_in_two, r"q_proj follows BlockScaling and has out_features 64, which must be a multiple of 2 ranks · 128"),
    ],
    ids=["parallelize", "a parallel layer"],
)  # fmt: skip
def test_refused_by_name(change: Any, message: str, model: Any) -> None:
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        change(model)
    assert [type(module) for module in model.modules()] == before
