# SPDX-License-Identifier: Apache-2.0
"""What a family of decoder layers needs: one LayerSpec, registered. What it computes is tested with every other one."""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

from lorakernels import fuse, unfuse
from lorakernels.fusion import families
from lorakernels.fusion.families import LLAMA, QWEN2, LayerSpec, family_of, spec_of
from tests.fusion.fused_models import (
    BEHIND,
    FAMILIES,
    FP32,
    LINEARS,
    adapted,
    fp32_bound,
    fused_copy,
    model_of,
    run,
    same_within,
    tokens,
)

ROOT = Path(__file__).parents[2]
SOURCES = [p for p in sorted(ROOT.glob("lorakernels/fusion/*.py")) if p.name != "__init__.py"]
transformers = pytest.importorskip("transformers")


def registered(spec: LayerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, spec))
    monkeypatch.setitem(families._BY_LAYER, spec.layer, spec)


@pytest.mark.skipif(not hasattr(transformers, "MinistralConfig"), reason="needs transformers 5")
def test_one_spec_is_all_that_fuse_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["full_attention", "sliding_attention"]
    options = {"layer_types": kinds, "sliding_window": 5, "head_dim": 8}
    with pytest.raises(TypeError, match=r"layers\.0 is a MinistralDecoderLayer: fuse knows Llama"):
        fuse(model_of("Ministral", **options))
    registered(replace(QWEN2, family="Ministral"), monkeypatch)
    model = adapted("Ministral", LINEARS, model=options)
    twin, _ = fused_copy(model)
    x = tokens()
    same_within(run(twin, x), run(model, x), FP32)


@pytest.mark.skipif(not hasattr(transformers, "SeedOssConfig"), reason="needs transformers 4.56")
def test_a_family_refuses_in_words_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(layer: nn.Module) -> str | None:
        return "residual_dropout must be 0" if layer.mlp.residual_dropout else None

    registered(replace(LLAMA, family="SeedOss", refuse=refuse), monkeypatch)
    options = {"head_dim": 8, "attention_dropout": 0.0}
    fused_copy(adapted("SeedOss", model={**options, "residual_dropout": 0.0}))
    model = adapted("SeedOss", model={**options, "residual_dropout": 0.1})
    with pytest.raises(ValueError, match=r"^model\.layers\.0: residual_dropout must be 0$"):
        fuse(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_has_the_modules_of_its_spec(family: str) -> None:
    layer = model_of(family, head_dim=16).model.layers[0]
    spec = spec_of(layer)
    assert spec.family == family and spec.own_class(layer, "DecoderLayer") is type(layer)
    found = {owner: set(layer.get_submodule(owner)._modules) for owner in spec.children()}
    assert found == spec.children()
    rows = [sum(layer.get_submodule(p).out_features for p in paths) for paths in spec.groups]
    heads = spec.heads(layer)
    scale = {"Granite": 0.3, "Gemma2": 12**-0.5, "Gemma3": 12**-0.5}.get(family, 16**-0.5)
    assert heads == (4, 2, 16, scale) and rows == [(4 + 2 * 2) * 16, 32, 2 * 48, 32]


def test_fuse_describes_each_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks and rewiring take the description, instead of the layer's spec again."""
    described: list[nn.Module] = []
    for name, module in list(sys.modules.items()):
        if name.startswith("lorakernels.fusion.") and "spec_of" in vars(module):
            monkeypatch.setattr(module, "spec_of", lambda x: described.append(x) or spec_of(x))
    model = adapted("Qwen3", ("up_proj",))
    fuse(model, keep_linears=True)
    assert described == list(model.model.layers)


def test_a_subclass_of_a_layer_is_another_class() -> None:
    kind = type(model_of("Llama").model.layers[0])
    assert family_of(kind) is LLAMA
    assert family_of(type("LlamaDecoderLayer", (kind,), {"__module__": "own"})) is None
    assert family_of(type("OtherDecoderLayer", (kind,), {"__module__": kind.__module__})) is None
    with pytest.raises(TypeError, match=r"layer must be one of LlamaDecoderLayer, .*found Linear"):
        spec_of(nn.Linear(2, 2))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_other_file_names_a_part_of_a_layer(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for spec in families.FAMILIES:
        own = (spec.attention, *spec.all_norms, spec.activation, *spec.dropouts)
        settings = (spec.window, spec.rope, spec.residual_factor, spec.cap)
        places = (*own, *chain(*spec.groups), *filter(None, settings))
        words = {place.rpartition(".")[2] for place in places}
        assert not {word for word in words if re.search(rf"\b{word}\b", text)}


def test_the_docs_and_fuse_name_every_family() -> None:
    names = ", ".join(FAMILIES)
    page = (ROOT / "docs" / "fused-layers.md").read_text(encoding="utf-8")
    assert f"transformers' {names}" in " ".join(page.split())
    assert f"(transformers' {names})" in " ".join((fuse.__doc__ or "").split())


@pytest.mark.parametrize("save", ["full", "recompute", "fp8", "checkpoint"])
def test_a_factor_of_the_residual_is_of_both_sums(save: str) -> None:
    """Factor 0 leaves the embedding as it is: neither attention nor the MLP may reach the last norm."""
    model = adapted("Granite", LINEARS, model={"residual_multiplier": 0.0})
    twin, _ = fused_copy(model, save=save)
    x = tokens()
    found = run(twin, x)
    same_within(found, run(model, x), FP32)
    assert not any(grad.any() for name, grad in found.items() if "lora" in name)


@pytest.mark.parametrize("family", ["Granite", "SmolLM3", *BEHIND])
def test_packed_rows_of_a_family_with_settings(family: str) -> None:
    """Two documents in a row are two rows of one document each."""
    model, _ = fused_copy(adapted(family))
    x = tokens(2, 6)
    starts = torch.tensor([0, 6, 12], dtype=torch.int32)
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 6}
    positions = torch.arange(6).repeat(2)[None]
    together = model(x.reshape(1, 12), position_ids=positions, use_cache=False, **packed).logits
    alone = model(x, use_cache=False).logits
    found, expected = together.detach().view_as(alone), alone.detach()
    same_within({"": found}, {"": expected}, fp32_bound(family))


def test_a_layer_without_rope_does_not_see_where_a_token_is() -> None:
    model, _ = fused_copy(adapted("SmolLM3", model={"no_rope_layers": [1, 0]}).eval())
    layers, h = model.model.layers, torch.randn(1, 8, 32)
    at = [model.model.rotary_emb(h, torch.arange(8)[None] * step) for step in (1, 3)]
    with torch.no_grad():
        first, second = ([layer(h, position_embeddings=a) for a in at] for layer in layers)
    assert torch.equal(*second) and not torch.allclose(*first)


def test_unfused_norms_are_transformers_own_again() -> None:
    model = adapted("Gemma3", LINEARS)
    twin, _ = fused_copy(model)
    x = tokens()
    run(copy.deepcopy(twin), x)
    assert type(twin.model.norm).__name__ == "FusedGemma3RMSNorm"
    unfuse(twin)
    assert vars(twin.model.norm).keys() == vars(model.model.norm).keys()
    same_within(run(twin, x), run(model, x), 0.0)
