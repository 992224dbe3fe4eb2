# SPDX-License-Identifier: Apache-2.0
"""Layers whose weight their owner reads: the tables have all of transformers', and adapters or FP8 do not go there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from lorakernels import LoRAConfig, apply_lora  # noqa: E402
from lorakernels.modules.model.owners import DTYPE_IS_READ, WEIGHT_IS_READ  # noqa: E402

# A read that is no isinstance, no shape or device, and no comparison of dtypes
READ = re.compile(
    r"(?<!isinstance\()\bself\.(\w+)\.weight\b(?!\.(?:shape|device)|\.dtype\s*[!=]=)(\.dtype)?"
)
# Reads of the class's own initialization or tying, or in a mode that does not train: the layer is called otherwise
CALLED = {
    ("BloomAttention", "dense"),  # pretraining_tp > 1 with slow_but_exact
    ("BloomMLP", "dense_4h_to_h"),
    ("BridgeTowerMLMHead", "decoder"),
    ("DisentangledSelfAttention", "in_proj"),  # with query_states of another step
    ("EsmFoldSelfAttention", "g_proj"),
    ("FlavaMaskedPredictionHead", "decoder"),
    ("Gemma4AssistantForCausalLM", "lm_head"),  # drafts tokens
    ("Gemma4UnifiedAssistantForCausalLM", "lm_head"),
    ("Gemma3nTextAltUp", "prediction_coefs"),  # clamped in its dtype, then called
    ("LSHSelfAttention", "query_key"),  # generates with a cache
    ("LSHSelfAttention", "value"),
    *(
        (f"MiniCPM{kind}ViTWindowAttentionMerger", name)
        for kind in ("Ocr", "V4_6", "V4_7")
        for name in ("linear_1", "linear_2")
    ),
}


def reads() -> Iterator[tuple[str, str, bool]]:
    """(class, name of its linear layer, whether only the dtype is read) in transformers' models."""
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        if not READ.search(text):
            continue
        parts = re.split(r"^class (\w+)", text, flags=re.M)
        for kind, body in zip(parts[1::2], parts[2::2], strict=True):
            body = re.split(r"^(?=[a-zA-Z@])", body, flags=re.M)[0]
            linear = set(re.findall(r"self\.(\w+) = (?:nn\.)?\w*Linear\(", body))
            for match in READ.finditer(body):
                if match[1] in linear:
                    yield kind, match[1], bool(match[2])


def test_the_tables_have_the_reads_of_transformers() -> None:
    """A new release adds classes: they belong in a table, or in CALLED."""
    tables = {False: WEIGHT_IS_READ, True: DTYPE_IS_READ}
    seen = set(reads())
    assert len(seen) > 90
    missing = {
        (kind, name)
        for kind, name, dtype in seen
        if kind not in tables[dtype].get(name, ()) and (kind, name) not in CALLED
    }
    assert not missing
    classes = {(kind, name) for kind, name, _ in seen}
    entries = {
        (k, name) for table in tables.values() for name, kinds in table.items() for k in kinds
    }
    assert entries <= classes


def deepseek() -> nn.Module:
    config = transformers.DeepseekV32Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, index_n_heads=2, index_head_dim=16, index_topk=4,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.DeepseekV32ForCausalLM(config)


def gemma3n() -> nn.Module:
    config = transformers.Gemma3nTextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_kv_shared_layers=0, laurel_rank=4, layer_types=["full_attention"], activation_sparsity_pattern=[0.0],
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Gemma3nForCausalLM(config)


MODELS: dict[str, tuple[Any, str, list[str]]] = {
    "DeepSeek-V3.2": (deepseek, "DeepseekV32Indexer works in the dtype", ["indexer.weights_proj"]),
    "Gemma 3n": (
        gemma3n,
        "Gemma3nTextAltUp reads the weight",
        ["altup.correction_coefs", "altup.prediction_coefs"],
    ),
}


@pytest.mark.parametrize("frozen", ["plain", "fp8"])
@pytest.mark.parametrize("case", MODELS)
def test_it_is_refused_by_name_and_what_is_said_helps(case: str, frozen: str) -> None:
    make, message, exclude = MODELS[case]
    with pytest.raises(ValueError, match=f"{message}.*{re.escape(repr(exclude))}"):
        apply_lora(make(), LoRAConfig(r=2, target_modules="all-linear"), frozen=frozen)
    model = make()
    config = LoRAConfig(r=2, target_modules="all-linear", exclude_modules=exclude)
    report = apply_lora(model, config, frozen=frozen)
    ids = torch.arange(12).view(1, 12)
    model.train()(ids).logits.sum().backward()
    assert ("works with its weight" in str(report)) == (frozen == "fp8")


def test_a_router_whose_weight_is_read_stays_plain() -> None:
    """LongCat's is called classifier, and casts the weight to fp32: of FP8 values, without their scale."""
    from lorakernels.modules.model.frozen_targets import frozen_targets

    class LongcatFlashTopkRouter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(16, 16)

    model = nn.ModuleDict({"router": LongcatFlashTopkRouter(), "other": nn.Linear(16, 16)})
    taken, stays = frozen_targets(model, (), ())
    assert taken == ["other"]
    assert stays == {"router.classifier": "LongcatFlashTopkRouter works with its weight"}
