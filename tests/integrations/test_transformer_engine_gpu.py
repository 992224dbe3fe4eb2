# SPDX-License-Identifier: Apache-2.0
"""Against Transformer Engine itself, bit for bit. Sizes are multiples of 16, as its FP8 GEMMs want them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels import BlockScaling, DelayedScaling, LoRAConfig, apply_lora
from lorakernels.integrations.transformer_engine import (
    convert_te_model,
    from_te_linear,
    load_te_state,
    why_not,
)
from lorakernels.state.fp8 import FP8State

E4M3 = torch.float8_e4m3fn


def same(a: Tensor, b: Tensor) -> Tensor:
    """0-dim bool: equal bits, or NaN in both."""
    bits = a.contiguous().view(torch.int32) == b.contiguous().view(torch.int32)
    return (bits | (a.isnan() & b.isnan())).all()


@pytest.fixture
def te() -> Iterator[Any]:
    te = pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    yield te
    FP8GlobalStateManager.reset()


def te_recipes(te: Any) -> Any:
    from transformer_engine.common import recipe

    return recipe


def make(te: Any, recipe: Any, *sizes: int, **options: Any) -> Any:
    """A frozen bf16 te.Linear whose weight is FP8 from the start."""
    with te.quantized_model_init(enabled=True, recipe=recipe):
        linear = te.Linear(*sizes, params_dtype=torch.bfloat16, **options)
    return linear.requires_grad_(False)


def train(te: Any, model: nn.Module, recipe: Any, features: int, steps: int = 4) -> None:
    """Forward and backward under TE, so that its scales of x and dy leave 1."""
    for step in range(steps):
        x = torch.randn(32, features, device="cuda", dtype=torch.bfloat16) * (step + 1)
        x.requires_grad_()
        with te.autocast(enabled=True, recipe=recipe):
            y = model(x)
        y.backward(torch.randn_like(y) * 1e-3)


@pytest.mark.gpu
def test_recipes_of_te(te):
    recipes = te_recipes(te)
    changes = {"margin": 2, "amax_history_len": 31, "amax_compute_algo": "most_recent"}
    theirs = recipes.DelayedScaling(fp8_format=recipes.Format.E4M3, reduce_amax=False, **changes)
    ours = DelayedScaling(fp8_format="E4M3", reduce_amax=False, **changes)
    assert DelayedScaling.from_te(theirs) == ours and ours.to_te() == theirs
    assert DelayedScaling.from_te(recipes.DelayedScaling()) == DelayedScaling()
    assert DelayedScaling().to_te() == recipes.DelayedScaling()
    for blocks in (BlockScaling(), BlockScaling("HYBRID", power_2_scale=True)):
        assert BlockScaling.from_te(blocks.to_te()) == blocks
    assert BlockScaling(power_2_scale=True).to_te() == recipes.Float8BlockScaling()
    for kind in ("MXFP8BlockScaling", "Float8CurrentScaling", "Float8BlockScaling"):
        with pytest.raises(TypeError, match=f"got {kind}"):
            DelayedScaling.from_te(getattr(recipes, kind)())
    for field, value in (("amax_compute_algo", torch.amax), ("fp8_dpa", True)):
        with pytest.raises(ValueError, match=rf"DelayedScaling\.{field}"):
            DelayedScaling.from_te(recipes.DelayedScaling(**{field: value}))


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kind", ["DelayedScaling", "Float8CurrentScaling"])
def test_te_linear_keeps_its_bytes(te, kind, bias):
    linear = make(te, getattr(te_recipes(te), kind)(), 64, 96, bias=bias)
    raw, scale_inv = linear.weight._data.clone(), linear.weight._scale_inv.clone()
    layer = from_te_linear(linear, LoRAConfig(r=4))
    assert (layer.out_features, layer.in_features) == (96, 64) == tuple(raw.shape)
    assert raw.unique().numel() > 20  # not a weight of zeros
    assert torch.equal(layer.weight.view(torch.uint8), raw)
    assert torch.equal(layer.weight_scale_inv, scale_inv.view(1))
    assert (layer.bias is None) != bias
    dequantized = linear.weight.dequantize(dtype=torch.float32)
    assert torch.equal(layer.dequantized_weight(), dequantized)


@pytest.mark.gpu
def test_why_not_knows_te(te):
    assert why_not(te.Linear(64, 64)) is None
    assert why_not(te.Linear(64, 64, parallel_mode="column")) is None  # of one rank
    assert "no linear weight" in why_not(te.RMSNorm(64))
    for module, reason in (
        (te.LayerNormLinear(64, 64), "normalises"),
        (te.LayerNormMLP(64, 128), "two weights"),
        (te.GroupedLinear(2, 64, 64), "per group"),
        (te.MultiheadAttention(64, 4), "arguments"),
        (te.TransformerLayer(64, 128, 4), "built of"),
        (te.ops.Linear(64, 64), "fusible"),
        (te.Linear(64, 64, parameters_split=("q_", "k_")), "q_weight"),
        (te.Linear(64, 64, return_bias=True), "return_bias"),
        (te.Linear(64, 64, parallel_mode="row", tp_size=2), "tp_size=2"),
    ):
        assert reason in why_not(module), type(module)
    if te.is_fp8_block_scaling_available():
        linear = make(te, te_recipes(te).Float8BlockScaling(), 128, 128)
        assert "Float8BlockwiseQTensor" in why_not(linear)


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_trained_state_loads_and_quantizes_with_the_same_bits(te, algorithm):
    """W is the identity with scale 1, so y is x's FP8 values times scale_inv: one wrong bit in the scale shows."""
    recipe = te_recipes(te).DelayedScaling(amax_history_len=8, amax_compute_algo=algorithm)
    linear = make(te, recipe, 64, 64, bias=False, init_method=nn.init.eye_)
    train(te, linear, recipe, 64)
    layer = from_te_linear(linear, LoRAConfig(r=4, fp8=DelayedScaling.from_te(recipe)), name="fc")
    load_te_state(linear, layer.fp8_state, "fc")
    for key, rows in (
        ("scaling_fwd", layer.fp8_state.forward),
        ("scaling_bwd", layer.fp8_state.backward),
    ):
        theirs = linear.fp8_meta[key]
        assert theirs.scale[0] != 1 and (theirs.amax_history[:, 0] > 0).sum() == 4
        assert same(rows[-1, 0], theirs.scale[0]) and same(rows[:-1, 0], theirs.amax_history[:, 0])
    before = layer.fp8_scale
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16) * 20  # some of it saturates
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        expected = linear(x)
    assert torch.equal(layer.train()(x), expected)
    assert torch.equal(layer.fp8_scale, before)


@pytest.mark.gpu
def test_a_state_of_another_kind_is_refused(te):
    recipe = te_recipes(te).Float8CurrentScaling()
    state = FP8State(["fc"], DelayedScaling(), "cuda")
    for linear in (te.Linear(64, 64), make(te, recipe, 64, 64)):
        with pytest.raises(ValueError, match="must be the state of delayed scaling"):
            load_te_state(linear, state, "fc")
    untouched = make(te, te_recipes(te).DelayedScaling(), 64, 64)
    state.forward.fill_(2.0)
    load_te_state(untouched, state, "fc")
    assert not state.forward.any() and not state.backward.any()


@pytest.mark.gpu
def test_forward_equals_te_with_the_same_scales(te):
    """Both multiply the same FP8 bytes and round to bf16 once; they differ in the order of the fp32 sums only.

    Against the exact product: TE's error is bf16's rounding (2⁻⁸ of the value) plus that of Hopper's FP8 sums, together
    below 2⁻⁷ of the largest output; ours may be twice TE's, plus half a bf16 ulp (2⁻⁹).
    """
    recipe = te_recipes(te).DelayedScaling(amax_history_len=8)
    linear = make(te, recipe, 256, 128, bias=True)
    nn.init.normal_(linear.bias)
    train(te, linear, recipe, 256)
    config = LoRAConfig(r=8, lora_dropout=0.0, fp8=DelayedScaling.from_te(recipe))
    layer = from_te_linear(linear, config, name="fc").train()
    load_te_state(linear, layer.fp8_state, "fc")
    scale = layer.fp8_scale[0]
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    x8 = (x.float() * scale).clamp(-448, 448).to(E4M3).double() / scale.double()
    exact = x8 @ layer.dequantized_weight().double().t() + layer.bias.double()
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        theirs = linear(x)
    error_te = (theirs.double() - exact).abs().max()
    error = (layer(x).double() - exact).abs().max()
    largest = exact.abs().max()
    assert error_te < 2**-7 * largest
    assert error < 2 * error_te + 2**-9 * largest


@pytest.mark.gpu
def test_a_te_model_becomes_ours_and_trains(te):
    recipe = te_recipes(te).DelayedScaling(amax_history_len=8)
    first, second = make(te, recipe, 64, 128), make(te, recipe, 128, 64)
    model = nn.Sequential(first, nn.GELU(), te.RMSNorm(128, dtype=torch.bfloat16), second)
    train(te, model, recipe, 64)
    raw = [linear.weight._data.clone() for linear in (first, second)]
    assert convert_te_model(model) == ["0", "3"]
    state = model[0].fp8_state
    assert state.recipe == DelayedScaling(amax_history_len=8)
    for column, linear in enumerate((first, second)):
        assert same(state.forward[-1, column], linear.fp8_meta["scaling_fwd"].scale[0])
        assert same(state.backward[-1, column], linear.fp8_meta["scaling_bwd"].scale[0])
    apply_lora(model, LoRAConfig(r=8, target_modules=["0", "3"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    losses = []
    for _ in range(10):
        loss = (model.train()(x).float() - x.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and model[0].lora_B.abs().max() > 0
    for layer, expected in zip((model[0], model[3]), raw, strict=True):
        assert torch.equal(layer.weight.view(torch.uint8), expected)
