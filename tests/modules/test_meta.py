# SPDX-License-Identifier: Apache-2.0
"""Layers without values compute shapes, as nn.Linear does on the meta device; torch.jit.trace is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lorakernels import (
    BlockScaling,
    DelayedScaling,
    FrozenFP8Linear,
    LoRAConfig,
    LoRALinear,
    apply_lora,
    fuse,
    linear_cross_entropy,
)
from lorakernels.recipes import Recipe
from tests.fusion.fused_models import LINEARS, adapted

RECIPES = [None, DelayedScaling(), BlockScaling()]
recipes = pytest.mark.parametrize("fp8", RECIPES, ids=["plain", "delayed", "blocks"])
ON_META: dict[str, Any] = {"device": "meta"}


@recipes
@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.1}, {"use_dora": True}], ids=str)
def test_an_adapted_model_without_values_has_shapes(fp8: Recipe | None, options: Any) -> None:
    model = nn.Sequential(nn.Linear(32, 48, **ON_META), nn.Linear(48, 24, **ON_META))
    apply_lora(model, LoRAConfig(r=4, target_modules=["0", "1"], fp8=fp8, **options))
    for mode in (True, False):
        x = torch.randn(2, 3, 32, dtype=torch.bfloat16, requires_grad=True, **ON_META)
        y = model.train(mode)(x)
        assert (y.shape, y.dtype, y.device.type) == ((2, 3, 24), torch.bfloat16, "meta")
        model.zero_grad()
        y.sum().backward()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for name, p in {"x": x, **trained}.items():
            assert p.grad is not None and p.grad.shape == p.shape and p.grad.is_meta, name
        assert len(trained) >= 4


@recipes
def test_a_frozen_layer_without_values_has_a_shape(fp8: Recipe | None) -> None:
    x = torch.randn(3, 32, **ON_META)
    assert FrozenFP8Linear(32, 48, fp8=fp8, **ON_META)(x).shape == (3, 48)


def decoder(fp8: Recipe | None) -> tuple[nn.Module, dict[str, Any]]:
    """A fused model, and the arguments of its layers for 8 tokens."""
    model = adapted("Llama", LINEARS, model={"num_hidden_layers": 1}, fp8=fp8)
    fuse(model)
    h = torch.randn(1, 8, model.config.hidden_size)
    angles = model.model.rotary_emb(h, torch.arange(8)[None])
    return model, {"hidden_states": h, "position_embeddings": angles}


@pytest.mark.parametrize("fp8", RECIPES[:2], ids=["plain", "delayed"])
def test_a_fused_layer_moved_to_meta_has_shapes(fp8: Recipe | None) -> None:
    model, arguments = decoder(fp8)
    arguments = tree_map_only(torch.Tensor, lambda x: x.to("meta"), arguments)
    y = model.to("meta").model.layers[0](**arguments)
    assert y.is_meta and y.shape == arguments["hidden_states"].shape


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_trace_of_a_fused_layer_is_refused_by_name() -> None:
    model, arguments = decoder(None)
    h, angles = arguments.values()

    def run(x: torch.Tensor) -> Any:
        return model.model.layers[0](x, position_embeddings=angles)

    with pytest.raises(RuntimeError, match=r"use torch\.compile"):
        torch.jit.trace(run, h)


def test_a_loss_without_values_has_a_shape() -> None:
    hidden = torch.randn(5, 32, requires_grad=True, **ON_META)
    labels = torch.zeros(5, dtype=torch.int64, **ON_META)
    loss = linear_cross_entropy(hidden, torch.randn(16, 32, **ON_META), labels)
    loss.backward()
    assert loss.shape == () and hidden.grad is not None and hidden.grad.shape == (5, 32)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@recipes
@pytest.mark.parametrize("adapted", [True, False], ids=["LoRALinear", "FrozenFP8Linear"])
def test_a_trace_of_torch_jit_is_refused_by_name(fp8: Recipe | None, adapted: bool) -> None:
    """torch.jit asks a module for all its attributes first, also for scales that the recipe does not have."""
    config = LoRAConfig(r=4, fp8=fp8)
    layer = LoRALinear(32, 48, config=config) if adapted else FrozenFP8Linear(32, 48, fp8=fp8)
    has_state = isinstance(fp8, DelayedScaling)
    for name in ("fp8_scale", "fp8_amax_history", "fp8_max"):
        assert hasattr(layer, name) is has_state
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"use torch\.compile"):
            torch.jit.trace(layer, torch.randn(3, 32))
    assert layer(torch.randn(3, 32)).shape == (3, 48), "it runs afterwards"
