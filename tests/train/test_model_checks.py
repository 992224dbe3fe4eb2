# SPDX-License-Identifier: Apache-2.0
"""Which models finetune refuses, and by what margin it takes the right ones: checked at the sizes that people train."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lorakernels import DelayedScaling, LoRAConfig, apply_lora
from lorakernels.train.data.packing import PackedBatch, PackedRows, attention_mask
from lorakernels.train.errors import ModelError
from lorakernels.train.model import model as train_model
from lorakernels.train.model.checks import check_model, isolation
from lorakernels.train.model.model import hidden_states, summed_loss
from lorakernels.values import LogitChange

SMALL = {
    "vocab_size": 264,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {"intermediate_size": 96, "num_key_value_heads": 2}


def small(kind: str, attention: str | None = None, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **more})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", LLAMA),
        ("qwen2", LLAMA),
        ("gpt_neox", {"intermediate_size": 96}),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
        ("gemma2", {**LLAMA, "head_dim": 16}),
        ("granite", {**LLAMA, "logits_scaling": 8.0}),
        ("cohere", LLAMA),
    ],
    ids=["rotary", "with biases", "parallel", "learned positions", "capped", "divided", "scaled"],
)
@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "fp8"])
def test_right_models_change_nothing_with_their_places(
    kind: str, more: dict[str, Any], fp8: DelayedScaling | None
) -> None:
    model = small(kind, "eager" if kind == "gemma2" else "sdpa", **more)
    apply_lora(model, LoRAConfig(r=2, target_modules="all-linear", fp8=fp8))
    computes = []
    model.register_forward_pre_hook(lambda *_: computes.append(torch.is_grad_enabled()))
    check_model(model)
    assert model.training, "left as it was"
    assert not any(computes), "whole weights that are lent would stay in an autograd graph"
    model.eval()
    assert isolation(model).neighbour == 0, "every token keeps its column, every tensor its amax"


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("bloom", {}, r"does not run as finetune runs a decoder"),
        ("rwkv", {"attention_hidden_size": 64}, "see each other"),
        ("recurrent_gemma", {**LLAMA, "num_key_value_heads": 1, "lru_width": 64}, "changes logits"),
    ],
    ids=["ALiBi of a 2-D mask", "recurrent", "recurrent and capped"],
)  # fmt: skip
def test_models_that_would_be_trained_wrongly_are_refused(
    kind: str, more: dict[str, Any], said: str
) -> None:
    model = small(kind, **more)
    with pytest.raises(ModelError, match=said):
        check_model(model)
    assert model.training, "left as it was"


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("doge", LLAMA, r"tokens see later ones where it gets no mask"),
        ("falcon", {}, r"does not run as finetune runs a decoder, without a mask: TypeError"),
    ],
    ids=["a mask of its own", "needs a mask"],
)
def test_models_that_are_wrong_without_a_mask_alone_are_refused_so(
    kind: str, more: dict[str, Any], said: str
) -> None:
    model = small(kind, "sdpa", **more)
    check_model(model, isolate=True)
    for isolate in (False, None):  # None checks both
        with pytest.raises(ModelError, match=rf"{said}.*; leave --no-isolate-documents out$"):
            check_model(model, isolate)
    assert model.training, "left as it was"


def test_recurrent_layers_are_taken_where_a_row_is_one_sequence() -> None:
    model = small("lfm2", "sdpa", **LLAMA, layer_types=["conv", "full_attention"])
    with pytest.raises(ModelError, match="see each other"):
        check_model(model)
    check_model(model, isolate=False)
    rows = PackedRows(torch.randint(264, (50,)).numpy(), np.array([[0, 20], [20, 50]]), 24)
    batch = rows.batch([0, 1])
    with torch.no_grad():
        loss = summed_loss(model.eval(), batch, 16, isolate=False)
        logits = model(input_ids=batch.input_ids).logits
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("isolate", [True, False], ids=["documents apart", "rows"])
def test_a_model_whose_own_attention_looks_ahead_is_refused(isolate: bool) -> None:
    """A causal mask would let it compute what it does not compute elsewhere."""
    more = {**LLAMA, "head_dim": 16, "use_bidirectional_attention": True}
    model = small("gemma3_text", "sdpa", **more)
    said = "by transformers' usual call" if isolate else "see later ones"
    with pytest.raises(ModelError, match=rf"{said}.*finetune cannot train it correctly$"):
        check_model(model, isolate)


def in_place_of(model: Any, places: Any) -> None:
    """The model's decoder, with other position_ids than it is given."""
    forward = model.model.forward
    model.model.forward = lambda position_ids=None, **kw: forward(
        position_ids=places(position_ids), **kw
    )


def test_positions_that_count_a_rows_columns_are_refused() -> None:
    """Learned positions of the row: harmless with rotary ones, which only know distances."""
    learned = small("opt", "sdpa", ffn_dim=96, word_embed_proj_dim=64)
    rotary = small("llama", "sdpa", **LLAMA)
    for model in (learned, rotary):
        in_place_of(
            model,
            lambda ids: None if ids is None else torch.arange(ids.shape[1]).expand_as(ids),
        )
    with pytest.raises(ModelError, match="by where they lie in a row, not by their position_ids"):
        check_model(learned)
    check_model(rotary)


def test_logits_that_are_not_finite_are_refused() -> None:
    model = small("llama", "sdpa", **LLAMA)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = math.nan
    with pytest.raises(ModelError, match="changes logits"):
        check_model(model)


@pytest.fixture(params=[False, True], ids=["eager", "capturing"])
def capturing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes what runs for a captured stream: then it does not look at values."""
    from transformers.utils import import_utils

    if request.param:
        monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)


@pytest.mark.parametrize("fused", [False, True], ids=["as they are", "fused"])
def test_rows_as_one_sequence_reach_attention_without_a_mask(
    make: Any, rows: PackedRows, fused: bool, capturing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask, whatever it says, rules the fast kernels out. Documents apart need one, as their rows do not say so."""
    trainer, _ = make(False, fused, isolate_documents=False)
    model, batch = trainer.model.eval(), rows.batch([0, 1, 2])
    trainer.close()
    seen: list[tuple[Any, Any]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def attention(*args: Any, attn_mask: Any = None, is_causal: bool = False, **kw: Any) -> Any:
        seen.append((attn_mask, is_causal))
        return real(*args, attn_mask=attn_mask, is_causal=is_causal, **kw)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    with torch.no_grad():
        dense = hidden_states(model, batch, isolate=False)
        assert seen == [(None, True)] * 2
        apart = hidden_states(model, batch)
    assert [mask.shape for mask, _ in seen[2:]] == [(3, 1, 24, 24)] * 2
    assert model.config._attn_implementation == "sdpa", "as it was"
    # padding, at a row's end, is seen by nothing before it
    cut = PackedBatch(*(t[:, :20] for t in batch.tensors()[:4]), -1)  # type: ignore[index, misc]
    with torch.no_grad():
        torch.testing.assert_close(
            hidden_states(model, cut, isolate=False), dense[:, :20], rtol=1e-3, atol=1e-3
        )
    assert not torch.allclose(dense, apart, rtol=1e-3, atol=1e-3)


# On a GPU


def wide(width: str, layers: int) -> Any:
    """Llama-3.1-8B's or Llama-2-70B's widths, random weights, bf16, on the GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, middle, heads = {"8B": (4096, 14336, 32), "70B": (8192, 28672, 64)}[width]
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=middle,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            torch.manual_seed(11)
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def like_trained(model: nn.Module) -> None:
    """Rows of unequal size, norms too, and a few channels twenty times as large, as trained Llamas have them."""
    torch.manual_seed(12)
    with torch.no_grad():
        for parameter in model.parameters():
            rows = torch.exp(0.6 * torch.randn(parameter.shape[0], device=parameter.device))
            parameter.mul_(rows.view(-1, *[1] * (parameter.ndim - 1)).to(parameter.dtype))
            if parameter.ndim == 1:
                parameter[7::1021] *= 20


@pytest.fixture
def cleared() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [False, True], ids=["random", "like trained"])
@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("width", "layers"), [("8B", 8), ("70B", 3)], ids=["8B", "70B"])
def test_llamas_of_real_widths_are_taken_and_leaking_ones_refused(
    width: str, layers: int, fp8: DelayedScaling | None, trained: bool,
    monkeypatch: pytest.MonkeyPatch, cleared: None,
) -> None:  # fmt: skip
    """What rounding does is far below the bound, what a leak does is above it. `pytest -s` shows the numbers."""
    model = wide(width, layers)
    if trained:
        like_trained(model)
    apply_lora(model, LoRAConfig(r=16, target_modules="all-linear", fp8=fp8))
    check_model(model)
    model.eval()
    found = isolation(model)
    print(f"\n{width} × {layers}, fp8 {fp8 is not None}, like trained {trained}: {found}", end=" ")
    assert found.neighbour <= found.rounding / 10 and found.place <= found.rounding / 2
    monkeypatch.setattr(
        train_model, "attention_mask", lambda segments: attention_mask(torch.zeros_like(segments))
    )
    leaking = isolation(model)
    print(f"leaking {leaking}")
    assert leaking.neighbour > 1.5 * leaking.rounding
    with pytest.raises(ModelError, match="see each other"):
        check_model(model)


@pytest.mark.parametrize(
    "change", [LogitChange(1 / 7), LogitChange(1.0, 20.0)], ids=["factor", "cap"]
)
def test_a_config_that_says_something_else_of_the_logits_is_refused(
    change: LogitChange, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = small("granite", "sdpa", **LLAMA, logits_scaling=8.0)
    capped = small("gemma2", "eager", **LLAMA, head_dim=16)
    monkeypatch.setattr("lorakernels.train.model.checks.change_of_logits", lambda _: change)
    for model in (scaled, capped):
        with pytest.raises(ModelError, match="changes logits"):
            check_model(model)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 2.0}),
        ("granite", {"logits_scaling": 0.125}),
        ("cohere", {"logit_scale": 4.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_loss_is_the_models_own_where_logits_change(kind: str, more: dict[str, Any]) -> None:
    model = small(kind, "eager" if kind == "gemma2" else "sdpa", **LLAMA, **more)
    documents = [torch.randint(264, (length,)) for length in (5, 7)]
    labels = torch.cat([torch.cat([d[1:], torch.tensor([-100])]) for d in documents])[None]
    places = torch.cat([torch.arange(len(d)) for d in documents])[None]
    owners = torch.tensor([0] * 5 + [1] * 7)[None]
    batch = PackedBatch(torch.cat(documents)[None], labels, places, owners, 10)
    found = summed_loss(model, batch, 4)
    logits = [model(d[None], use_cache=False).logits[0, :-1] for d in documents]
    expected = nn.functional.cross_entropy(
        torch.cat(logits), torch.cat([d[1:] for d in documents]), reduction="sum"
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
