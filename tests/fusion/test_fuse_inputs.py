# SPDX-License-Identifier: Apache-2.0
"""What a fused layer is given: packed sequences, padding, a sliding window, a key-value cache, no adapters at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels import DelayedScaling, apply_lora
from lorakernels.autograd.attention import graphed
from lorakernels.autograd.attention.choose import attend_packed
from lorakernels.config import LoRAConfig
from lorakernels.fusion import parts
from lorakernels.kernels.cudnn import attention as kernel
from lorakernels.kernels.cudnn.form import Form
from tests.fusion.fused_models import (
    BEHIND,
    FP32,
    LINEARS,
    PACKINGS,
    adapted,
    difference,
    fp32_bound,
    fused_copy,
    model_of,
    named,
    run,
    same_within,
    tokens,
)


def test_packed_sequences_by_mask_and_positions() -> None:
    model = adapted()
    twin, _ = fused_copy(model)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None].expand(2, -1)
    starts = torch.tensor([0] * 5 + [1] * 7)
    allowed = (starts[:, None] == starts) & torch.ones(12, 12, dtype=torch.bool).tril()
    mask = allowed[None, None].expand(2, 1, 12, 12)
    x = tokens()
    found = [run(m, x, attention_mask=mask, position_ids=positions) for m in (twin, model)]
    same_within(*found, FP32)
    assert difference(found[0]["logits"], run(twin, x)["logits"]) > 1e-2


@pytest.mark.parametrize("save", ["recompute", "checkpoint"])
@pytest.mark.parametrize("family", PACKINGS)
def test_packed_sequences_by_their_starts(family: str, save: str) -> None:
    """As flash attention takes them, one without tokens among them; a mask beside them is not read."""
    model = adapted(family)
    twin, _ = fused_copy(model, save=save)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None].expand(2, -1)
    owner = torch.tensor([0] * 5 + [1] * 7)
    mask = (owner[:, None] == owner) & torch.ones(12, 12, dtype=torch.bool).tril()
    starts = torch.tensor([0, 5, 5, 12, 17, 24], dtype=torch.int32)
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 7}
    x = tokens()
    found = run(twin, x, position_ids=positions, **packed)
    expected = run(
        model, x, position_ids=positions, attention_mask=mask[None, None].expand(2, 1, 12, 12)
    )
    same_within(found, expected, FP32)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q must be int32 \[sequences \+ 1\]"):
        starts = starts.long()
        twin(x, use_cache=False, cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q must be int32 \[sequences \+ 1\]"):
        twin(x, use_cache=False, cu_seq_lens_q=starts.int()[None])


def test_attention_is_told_of_the_longest_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """And chosen anew for packed ones: not all backends take both."""
    twin, _ = fused_copy(adapted())
    x, told = tokens(), []

    def attend(name, q, k, v, starts, longest, scale):  # type: ignore[no-untyped-def]
        told.append(longest)
        return attend_packed(name, q, k, v, starts, longest, scale)

    monkeypatch.setattr("lorakernels.fusion.layer.attend_packed", attend)
    packed = {"cu_seq_lens_q": torch.tensor([0, 12, 24], dtype=torch.int32), "use_cache": False}
    twin(x, use_cache=False)
    twin(x, max_length_q=12, **packed)
    twin(x, **packed)
    assert told == [12, 12, 24, 24]
    assert len(twin.model.layers[0].lorakernels.fused.chosen) == 2


def test_a_layer_remembers_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MOST_CHOSEN", 3)
    plain = adapted()
    twin, _ = fused_copy(plain)
    for length in range(2, 12):
        x = tokens(1, length)
        found, expected = (model(x, use_cache=False).logits for model in (twin, plain))
        torch.testing.assert_close(found, expected, rtol=FP32, atol=FP32)
        assert 1 <= len(twin.model.layers[0].lorakernels.fused.chosen) <= 3


def test_shapes_of_graphs_are_forgotten_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once no more graphs are built, a shape whose graph exists would get another backend, or be refused."""
    monkeypatch.setattr(parts, "MOST_CHOSEN", 3)
    twin, _ = fused_copy(adapted())
    layer = twin.model.layers[0].lorakernels.fused
    for key, name in enumerate(("cudnn_graph", "packed", "packed", "flash")):
        layer.choose((key,), name)
    assert layer.chosen == {(0,): "cudnn_graph", (3,): "flash"}
    for key in range(4, 8):
        layer.choose((key,), "cudnn_graph")
    assert layer.chosen == {(6,): "cudnn_graph", (7,): "cudnn_graph"}


def test_packed_rows_get_another_backend_where_no_more_graphs_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs are for rounded numbers of documents and of tokens of the longest, and the choice is for any of them."""
    taken: list[str] = []
    built: set[tuple[int, int]] = set()

    def choose_packed(*arguments: object) -> str:
        return "cudnn_graph" if len(built) < 2 else "torch"

    def attend(name, q, k, v, starts, longest, scale):  # type: ignore[no-untyped-def]
        taken.append(name)
        if name == "cudnn_graph":
            built.add((kernel.rounded(len(starts) - 1), longest))
        return attend_packed("torch", q, k, v, starts, longest, scale)

    def is_built(form: Form, device: torch.device) -> bool:
        return (form.rows, form.longest) in built

    monkeypatch.setattr("lorakernels.fusion.layer.choose_packed", choose_packed)
    monkeypatch.setattr("lorakernels.fusion.layer.attend_packed", attend)
    monkeypatch.setattr(graphed, "MOST", 2)
    monkeypatch.setattr(kernel, "built", lambda: len(built))
    monkeypatch.setattr(kernel, "is_built", is_built)
    twin, _ = fused_copy(adapted())
    x = tokens(2, 256)

    def run_with(documents: int) -> list[str]:
        taken.clear()
        starts = torch.linspace(0, 512, documents + 1, dtype=torch.int32)
        twin(x, use_cache=False, cu_seq_lens_q=starts, max_length_q=128)
        return taken

    layers = len(twin.model.layers)
    assert run_with(4) == run_with(8) == ["cudnn_graph"] * layers
    assert run_with(16) == ["torch"] * layers
    assert run_with(8) == ["cudnn_graph"] * layers
    assert sorted(twin.model.layers[0].lorakernels.fused.chosen.values()) == [
        "cudnn_graph",
        "torch",
    ]


def test_attention_is_chosen_anew_for_deterministic_algorithms() -> None:
    """cuDNN, which may have been chosen before, has none."""
    twin, _ = fused_copy(adapted())
    x = tokens()
    twin(x, use_cache=False)
    torch.use_deterministic_algorithms(True)
    try:
        twin(x, use_cache=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(twin.model.layers[0].lorakernels.fused.chosen) == 2


@pytest.mark.parametrize("family", PACKINGS)
def test_a_layer_that_is_told_to_look_ahead(family: str) -> None:
    model = adapted(family)
    twin, _ = fused_copy(model)
    h = torch.randn(2, 12, 32)
    angles = model.model.rotary_emb(h, torch.arange(12)[None])
    options = {"position_embeddings": angles, "attention_mask": None}
    for causal in (False, True):
        found, expected = (m.model.layers[0](h, is_causal=causal, **options) for m in (twin, model))
        assert difference(found, expected) <= FP32


def test_packed_sequences_as_transformers_collates_them() -> None:
    """Equal tensors, not one, once the batch has been moved to where the model is."""
    from transformers import BatchEncoding, DataCollatorWithFlattening

    model = adapted()
    twin, _ = fused_copy(model)
    rows = [{"input_ids": tokens(1, length)[0].tolist()} for length in (5, 1, 7)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate(rows)
    starts, ends = (batch[f"cu_seq_lens_{name}"] for name in "qk")
    assert starts is not ends and starts.dtype == torch.int32
    found = twin(**BatchEncoding(batch).to("cpu"), use_cache=False)
    found.loss.backward()
    alone = [model(torch.tensor([row["input_ids"]]), use_cache=False).logits for row in rows]
    assert difference(found.logits, torch.cat(alone, 1)) <= FP32
    with torch.inference_mode():
        batch = {**batch, "cu_seq_lens_k": starts.to(torch.int64).to(torch.int32)}
        assert torch.equal(twin(**batch, use_cache=False).logits, found.logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seq_lens_k": torch.tensor([0, 12, 24])}, r"int32 \[3\] on cpu, found int64 \[3\]"),
        ({"cu_seq_lens_k": torch.tensor([0, 24], dtype=torch.int32)}, r"found int32 \[2\] on cpu"),
        ({"cu_seq_lens_q": None}, "must be equal to cu_seq_lens_q, None, found"),
        ({"max_length_k": 11}, r"must be equal, found \(12, 11\)"),
    ],
    ids=["dtype", "shape", "keys alone", "longest"],
)
def test_sequences_of_keys_that_are_not_those_of_queries_are_refused(change, message: str) -> None:
    model, _ = fused_copy(adapted())
    starts = torch.tensor([0, 12, 24], dtype=torch.int32)
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 12}
    with pytest.raises(ValueError, match=message):
        model(tokens(), use_cache=False, **{**packed, "max_length_k": 12, **change})


@pytest.mark.parametrize("family", ["Mistral", "Phi3", "SmolLM3", "Gemma2", "Gemma3"])
def test_padding_and_a_sliding_window_come_as_masks(family: str) -> None:
    switch = {"use_sliding_window": True} if family == "SmolLM3" else {}
    model = adapted(family, model={"sliding_window": 5, **switch})
    twin, _ = fused_copy(model)
    x, mask = tokens(), torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    for options in ({}, {"attention_mask": mask}):
        same_within(run(twin, x, **options), run(model, x, **options), fp32_bound(family))


def logits_of(model: Any, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Of each token that is generated after x."""
    more = {"output_logits": True, "return_dict_in_generate": True}
    found: tuple[Tensor, ...] = model.generate(x, **options, **more).logits
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, {"dtype": torch.bfloat16, "fp8": DelayedScaling()}])
@pytest.mark.parametrize("family", [*PACKINGS, "Granite", "SmolLM3", *BEHIND])
def test_generation_with_a_cache_is_the_layers_own(family: str, kind: dict[str, Any]) -> None:
    model = adapted(family, LINEARS, **kind).eval()  # `fuse` makes the others FP8, too
    twin, _ = fused_copy(model)
    x = tokens(2, 5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(twin.generate(x, **options), model.generate(x, **options))
    for logits, own in zip(logits_of(twin, x, options), logits_of(model, x, options), strict=True):
        assert torch.equal(logits, own)  # equal tokens would not show another rounding
    twin.train()  # as TRL's GRPOTrainer leaves it while it generates
    assert torch.equal(twin.generate(x, **options), model.train().generate(x, **options))
    with pytest.raises(RuntimeError, match="without a key-value cache"):
        twin(x, use_cache=True)


@pytest.mark.parametrize("length", [8, 12], ids=["short factors", "long factors"])
def test_angles_that_come_with_a_factor(length: int) -> None:
    """LongRoPE's cos and sin are longer than one, so that backward is no inverse of forward."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 8,
    }
    sizes = {"rope_parameters": rope, "original_max_position_embeddings": 8}
    model = adapted("Phi3", model=sizes)
    cos, _ = model.model.rotary_emb(torch.zeros(1, 1, 32), torch.zeros(1, 1, dtype=torch.long))
    assert cos.min() > 1.1
    twin, _ = fused_copy(model)
    x = tokens(2, length)
    same_within(run(twin, x), run(model, x), FP32)


def test_a_dropout_behind_the_embedding_that_transformers_does_not_have() -> None:
    model = adapted("Phi3", model={"embd_pdrop": 0.5})
    twin, _ = fused_copy(model)
    x = tokens()
    same_within(run(twin, x), run(model, x), FP32)


@pytest.mark.parametrize("family", PACKINGS)
def test_apply_lora_keeps_away_from_what_was_never_adapted(family: str) -> None:
    """Adapters on the MLP only: attention runs frozen, and the first layer's input may need no gradient."""
    plain = model_of(family)
    targets = named(("gate_proj", "down_proj"), family)
    apply_lora(plain, LoRAConfig(r=4, target_modules=[*targets], fp8=None))
    twin, _ = fused_copy(plain)
    x = tokens()
    for m in (plain, twin):
        m.zero_grad()
        m(x, labels=x, use_cache=False).loss.backward()
    for (name, p), q in zip(twin.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad.norm() > 0:
            assert difference(p.grad, q.grad) <= FP32, name
