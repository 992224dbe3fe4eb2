# SPDX-License-Identifier: Apache-2.0
"""The angles of a document are those that it has alone, whatever else is in the call and whatever came before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels import LoRAConfig, angles_by_document, apply_lora, fuse, unfuse

transformers = pytest.importorskip("transformers")

TRAINED = 8  # tokens
LENGTHS = (3, 11, 8, 9, 1)  # below, beyond and at the trained length
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
    "original_max_position_embeddings": TRAINED,
    "factor": 8.0,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def model_of(kind: str, rope: dict[str, Any], most: int = 64) -> Any:
    torch.manual_seed(0)
    more: dict[str, Any] = {}
    if kind == "gemma3_text":  # one kind of RoPE for each kind of layer
        local = {"rope_type": "default", "rope_theta": 1e4}
        rope = {"full_attention": rope, "sliding_attention": local}
        more = {"layer_types": [*rope]}
    config = transformers.AutoConfig.for_model(
        kind, **SIZES, **more, max_position_embeddings=most, rope_parameters=copy.deepcopy(rope)
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def rotary_of(model: Any) -> nn.Module:
    return model.get_decoder().rotary_emb


def places(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def angles(rotary: nn.Module, positions: Tensor) -> list[Tensor]:
    """[cos, sin] of each kind of layer."""
    kinds = getattr(rotary, "rope_type", "")
    calls = [{"layer_type": layer} for layer in kinds] if isinstance(kinds, dict) else [{}]
    x = torch.zeros(1, 1, 32)
    return [table for call in calls for table in rotary(x, position_ids=positions, **call)]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("gemma3_text", {}),
        ("phimoe", {"short_mscale": 1.1, "long_mscale": 1.3}),
    ],
    ids=["factors", "kinds of layers", "other sizes of cos and sin"],
)
def test_a_packed_document_has_the_angles_that_it_has_alone(
    kind: str, more: dict[str, Any]
) -> None:
    model = model_of(kind, LONG | more)
    alone = [angles(copy.deepcopy(rotary_of(model)), places(n)) for n in LENGTHS]
    expected = [torch.cat(parts, 1) for parts in zip(*alone, strict=True)]
    positions = places(*LENGTHS)
    before = angles(rotary_of(model), positions)
    assert any(not torch.equal(a, b) for a, b in zip(before, expected, strict=True))
    handles = angles_by_document(model)
    assert len(handles) == 1 and angles_by_document(model) == [], "once"
    for result, wanted in zip(angles(rotary_of(model), positions), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    # two rows of one microbatch, of which one is long
    rows = torch.cat([places(11), places(4, 7)])
    short = angles(rotary_of(model), places(4))
    for result, wanted in zip(angles(copy.deepcopy(rotary_of(model)), rows), short, strict=True):
        torch.testing.assert_close(result[1:, :4], wanted, rtol=0, atol=0)
    handles[0].remove()
    for result, wanted in zip(angles(rotary_of(model), positions), before, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)


def test_a_generated_token_has_the_angles_of_its_position() -> None:
    """Decoding gives one position at a time, as far as the row is."""
    model = model_of("llama", LONG)
    plain = copy.deepcopy(rotary_of(model))
    angles_by_document(model)
    for position in (TRAINED - 1, TRAINED):
        at = torch.tensor([[position]])
        for result, wanted in zip(angles(rotary_of(model), at), angles(plain, at), strict=True):
            torch.testing.assert_close(result, wanted, rtol=0, atol=0)


def test_fused_layers_compute_packed_documents_as_if_each_were_alone() -> None:
    model = model_of("llama", LONG)
    apply_lora(model, LoRAConfig(r=2, target_modules="all-linear", fp8=None))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(64, (1, sum(LENGTHS)))
    with torch.no_grad():
        alone = torch.cat([model.model(part)[0] for part in ids.split(LENGTHS, 1)], 1)
        starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
        where = {"position_ids": places(*LENGTHS), "cu_seq_lens_q": starts, "max_length_q": 11}
        fuse(model)
        packed = model.model(ids, attention_mask=torch.ones(1, 1, 1, 1).bool(), **where)[0]
        # two orders of fp32 sums through two layers; other angles change it by 1e-1
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
        unfuse(model)
    assert not rotary_of(model)._forward_hooks


def test_dynamic_angles_are_those_of_the_call_and_not_of_a_longer_one_before() -> None:
    model = model_of("llama", DYNAMIC, most=TRAINED)
    expected = {n: angles(copy.deepcopy(rotary_of(model)), places(n)) for n in (8, 9, 11)}
    angles_by_document(model)
    for length in (9, 11, 9, 8):
        result = angles(rotary_of(model), places(length))
        for table, wanted in zip(result, expected[length], strict=True):
            torch.testing.assert_close(table, wanted, rtol=0, atol=0)


def test_dynamic_angles_of_several_lengths_are_refused_in_training() -> None:
    model = model_of("llama", DYNAMIC, most=TRAINED)
    angles_by_document(model)
    model(torch.zeros(1, 11, dtype=torch.long), position_ids=places(3, 8))
    with pytest.raises(ValueError, match=r"one call must have at most 8 tokens.*found 9 and fewer"):
        model(torch.zeros(1, 12, dtype=torch.long), position_ids=places(3, 9))
