# SPDX-License-Identifier: Apache-2.0
"""Layers under BlockScaling: what they hold, take and refuse; merging; several recipes in one model."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lorakernels import (
    BlockScaling,
    DelayedScaling,
    FrozenFP8Linear,
    LoRAConfig,
    LoRALinear,
    apply_lora,
    merge_lora,
    unmerge_lora,
)
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.linear.weights import dequantize_weight, quantize_weight
from lorakernels.values import Weight

BLOCKS = BlockScaling()
CONFIG = LoRAConfig(r=4, fp8=BLOCKS)


def layer_of(n: int = 200, k: int = 300, config: LoRAConfig = CONFIG) -> LoRALinear:
    layer = LoRALinear(k, n, True, config, name="it")
    nn.init.normal_(layer.lora_B, std=0.2)
    return layer


def held(layer: FrozenFP8Linear) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.stored.clone(), layer.weight_scale_inv.clone()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: BlockScaling("E5M2"), ValueError, "BlockScaling.fp8_format must be 'E4M3' or"),
        (lambda: BlockScaling(power_2_scale=1), TypeError, "power_2_scale must be True or False"),
        (lambda: LoRAConfig(fp8="blocks"), TypeError, "a DelayedScaling, a BlockScaling or None"),
    ],
    ids=["format", "power_2_scale", "no recipe"],
)  # fmt: skip
def test_a_recipe_refuses(make, error, message):
    with pytest.raises(error, match=message):
        make()


def te_recipe(power: bool = True, **changes):
    """With the attributes of transformer_engine.common.recipe.Float8BlockScaling."""
    quant = SimpleNamespace(power_2_scale=power, amax_epsilon=0.0)
    fields = {
        "fp8_format": SimpleNamespace(name="E4M3"),
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_quant_fwd_inp": quant,
        "fp8_quant_fwd_weight": quant,
        "fp8_quant_bwd_grad": quant,
        "fp8_dpa": False,
        "fp8_mha": False,
    }
    return SimpleNamespace(**fields | changes)


def test_it_is_made_of_transformer_engine_s_recipe():
    assert BlockScaling.from_te(te_recipe()) == BlockScaling(power_2_scale=True)
    hybrid = te_recipe(False, fp8_format=SimpleNamespace(name="HYBRID"))
    assert BlockScaling.from_te(hybrid) == BlockScaling("HYBRID")


class TEBlockScaling:
    """TE's recipe as far as `to_te` makes it: the constructor takes no QParams, and its own round to powers of two."""

    fp8_quant_fwd_inp = fp8_quant_fwd_weight = fp8_quant_bwd_grad = SimpleNamespace(
        power_2_scale=True, amax_epsilon=0.0
    )
    x_block_scaling_dim, w_block_scaling_dim = 1, 2

    def __init__(self, fp8_format):
        self.fp8_format = fp8_format


@pytest.mark.parametrize("power", [False, True], ids=["exact", "powers of two"])
@pytest.mark.parametrize("name", ["E4M3", "HYBRID"])
def test_transformer_engine_s_recipe_is_made_of_it(name, power, monkeypatch):
    formats = {each: SimpleNamespace(name=each) for each in ("E4M3", "HYBRID")}
    common = types.ModuleType("transformer_engine.common")
    common.recipe = SimpleNamespace(
        Float8BlockScaling=TEBlockScaling, Format=formats, QParams=SimpleNamespace
    )
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.common", common)
    ours = BlockScaling(name, power)
    assert BlockScaling.from_te(ours.to_te()) == ours


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        (te_recipe(x_block_scaling_dim=2), ValueError, "x_block_scaling_dim must be 1, got 2"),
        (
            te_recipe(fp8_quant_bwd_grad=SimpleNamespace(power_2_scale=False, amax_epsilon=0.0)),
            ValueError,
            "fp8_quant_bwd_grad.power_2_scale must be True, as fp8_quant_fwd_inp's, got False",
        ),
        (
            te_recipe(fp8_quant_fwd_inp=SimpleNamespace(power_2_scale=True, amax_epsilon=1e-4)),
            ValueError,
            "fp8_quant_fwd_inp.amax_epsilon must be 0.0, got 0.0001",
        ),
        (te_recipe(fp8_format=SimpleNamespace(name="E5M2")), ValueError, "fp8_format must be 'E4M3'"),
        (te_recipe(fp8_mha=True), ValueError, "fp8_mha must be False, got True"),
        (DelayedScaling(), TypeError, "Float8BlockScaling object, got DelayedScaling"),
    ],
    ids=["blocks", "some powers", "epsilon", "e5m2", "attention", "another recipe"],
)  # fmt: skip
def test_what_transformer_engine_s_recipe_may_not_ask(recipe, error, message):
    with pytest.raises(error, match=message):
        BlockScaling.from_te(recipe)


@pytest.mark.parametrize("power", [False, True], ids=["exact", "powers of two"])
@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (1, 129), (576, 96)], ids=str)
def test_each_block_has_the_scale_of_its_own_amax(shape, power):
    """A byte is within half a step of e4m3: 2⁻⁴ of the value, or half of 2⁻⁹ where the format has subnormals."""
    linear = nn.Linear(shape[1], shape[0], bias=False)
    with torch.no_grad():
        linear.weight *= 10.0 ** torch.randint(-5, 5, shape)
    layer = FrozenFP8Linear.from_linear(linear, BlockScaling(power_2_scale=power))
    scales, weight = layer.weight_scale_inv, linear.weight.detach()
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    found = layer.dequantized_weight()
    for i, rows in enumerate(weight.split(128)):
        for j, block in enumerate(rows.split(128, 1)):
            ideal = block.abs().max() / 448
            assert (ideal <= scales[i, j] <= 2 * ideal) if power else scales[i, j] == ideal
            assert not power or float(scales[i, j].log2()).is_integer()
            own = found[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            allowed = (2**-4 + 2**-20) * block.abs() + 2**-10 * scales[i, j]
            assert bool(((own - block).abs() <= allowed).all())


def test_there_is_no_state():
    model = nn.Sequential(nn.Linear(200, 130), nn.Linear(130, 40))
    report = apply_lora(model, LoRAConfig(target_modules=["0"], fp8=BLOCKS), frozen="fp8")
    assert report.fp8_state is None and report.scales_in_charge == "each block"
    assert isinstance(model[1], FrozenFP8Linear) and model[1].block_scaling == BLOCKS
    assert model[0].recipe == BLOCKS and model[0].fp8_state is None
    assert "base=e4m3 in blocks" in str(report) and "quantize_blocks" in report.adapted()[0].ops
    names = {"weight", "bias", "weight_scale_inv"}
    assert {k.partition(".")[2] for k in model.state_dict() if k.startswith("1.")} == names


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_compute_the_same(how):
    layer, x = layer_of(), torch.randn(3, 300)
    assert torch.equal(how(layer)(x), layer(x))


def test_casts_leave_bytes_and_scales_alone():
    layer = layer_of()
    before = held(layer)
    layer.to(torch.bfloat16)
    assert all(map(torch.equal, held(layer), before)) and layer.bias.dtype == torch.bfloat16


def test_merging_requantizes_from_the_exact_sum_and_unmerging_restores_the_bytes():
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 130))
    apply_lora(model, LoRAConfig(r=4, target_modules="all-linear", fp8=BLOCKS))
    for layer in model:
        nn.init.normal_(layer.lora_B, std=0.2)
    before = [held(layer) for layer in model]
    sums = [layer.merged_weight() for layer in model]
    merge_lora(model)
    for layer, total in zip(model, sums, strict=True):
        assert all(map(torch.equal, held(layer), quantize_weight(total, BLOCKS)))
        assert torch.equal(layer.merged_weight(), total)
    unmerge_lora(model)
    for layer, old in zip(model, before, strict=True):
        assert all(map(torch.equal, held(layer), old))


def test_an_adapter_that_is_not_finite_is_not_merged():
    layer = layer_of()
    before = held(layer)
    with torch.no_grad():
        layer.lora_A[0, 0] = torch.inf
    with pytest.raises(ValueError, match="must be finite"):
        layer.merge()
    assert not layer.merged and all(map(torch.equal, held(layer), before))


class TestLoading:
    def test_its_own_bytes(self):
        one, other = layer_of(), layer_of()
        assert other.load_state_dict(one.state_dict()) and torch.equal(other.stored, one.stored)
        assert torch.equal(other.weight_scale_inv, one.weight_scale_inv)

    def test_a_plain_weight_is_quantized(self):
        layer, weight = layer_of(), torch.randn(200, 300)
        state = {k: v for k, v in layer.state_dict().items() if k != "weight_scale_inv"}
        layer.load_state_dict({**state, "weight": weight})
        assert all(map(torch.equal, held(layer), quantize_weight(weight, BLOCKS)))

    def test_one_scale_becomes_each_block_s(self):
        """Without a change of a value. The entries of a delayed layer's state are passed over."""
        per_tensor = layer_of(config=LoRAConfig(r=4))
        layer = layer_of()
        layer.load_state_dict(per_tensor.state_dict())
        assert torch.equal(layer.stored, per_tensor.stored)
        assert torch.equal(layer.dequantized_weight(), per_tensor.dequantized_weight())

    def test_blocks_are_dequantized_for_a_plain_layer(self):
        layer, plain = layer_of(), layer_of(config=LoRAConfig(r=4, fp8=None))
        plain.load_state_dict(layer.state_dict())
        assert torch.equal(plain.weight, layer.dequantized_weight())

    @pytest.mark.parametrize(
        ("scales", "message"),
        [
            (torch.ones(4, 5), r"float32 \[2, 3\] for a weight \[200, 300\] .* \[4, 5\]"),
            (torch.ones(2, 3).double(), r"float32 \[2, 3\] .* found torch.float64"),
            (None, r"float32 \[2, 3\] .* found None"),
            (-torch.ones(2, 3), "finite and not negative, found 6 other values, the first -1.0"),
            (torch.full((2, 3), torch.nan), "finite and not negative, found 6 other values"),
        ],
        ids=["another block size", "float64", "missing", "negative", "not finite"],
    )
    def test_refuses_scales(self, scales, message):
        layer = layer_of()
        before, state = held(layer), layer.state_dict()
        state["weight_scale_inv"] = scales
        if scales is None:
            del state["weight_scale_inv"]
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(state)
        assert all(map(torch.equal, held(layer), before))

    def test_blocks_are_refused_by_a_layer_with_one_scale(self):
        with pytest.raises(RuntimeError, match="FP8 bytes need one weight_scale_inv"):
            layer_of(config=LoRAConfig(r=4)).load_state_dict(layer_of().state_dict())


@pytest.mark.parametrize(
    ("scale_inv", "recipe", "message"),
    [
        (torch.ones(1), BLOCKS, r"scale_inv must be \[2, 3\], found \(1,\)"),
        (torch.ones(2, 3), DelayedScaling(), r"scale_inv must be \[1\], found \(2, 3\)"),
        (torch.ones(2, 3), None, r"scale_inv must be \[1\]|DelayedScaling or a BlockScaling"),
    ],
    ids=["blocks", "delayed", "plain"],
)
def test_a_layer_refuses_another_recipe_s_scales(scale_inv, recipe, message):
    weight = Weight(torch.zeros(200, 300, dtype=torch.uint8), scale_inv)
    with pytest.raises(ValueError, match=message):
        FrozenFP8Linear.from_weight(weight, None, FrozenSpec(recipe))


class TestAdaptersOverFrozenLayers:
    def model(self, recipe: BlockScaling | DelayedScaling) -> nn.Sequential:
        made = FrozenFP8Linear.from_linear(nn.Linear(300, 200), recipe)
        return nn.Sequential(made, nn.Linear(200, 10))

    def test_blocks_over_blocks_keep_the_bytes(self):
        model = self.model(BLOCKS)
        before = held(model[0])
        report = apply_lora(model, LoRAConfig(target_modules=["0"], fp8=BLOCKS))
        assert all(map(torch.equal, held(model[0]), before))
        assert "FP8 bytes and scales kept" in report.adapted()[0].reason

    def test_blocks_over_one_scale_keep_the_bytes(self):
        model = self.model(DelayedScaling())
        before, values = model[0].stored.clone(), model[0].dequantized_weight()
        apply_lora(model, LoRAConfig(target_modules=["0"], fp8=BLOCKS))
        assert torch.equal(model[0].stored, before)
        assert torch.equal(model[0].dequantized_weight(), values)

    def test_one_scale_over_blocks_requantizes_and_says_so(self):
        model = self.model(BLOCKS)
        values = model[0].dequantized_weight()
        report = apply_lora(model, LoRAConfig(target_modules=["0"]))
        assert "block FP8 held with one scale" in report.adapted()[0].reason
        assert torch.equal(model[0].stored, quantize_weight(values)[0])

    def test_without_a_recipe_they_are_dequantized(self):
        model = self.model(BLOCKS)
        values = dequantize_weight(model[0].weight, model[0].weight_scale_inv, torch.bfloat16)
        apply_lora(model, LoRAConfig(target_modules=["0"], fp8=None))
        assert torch.equal(model[0].weight, values)

    def test_layers_that_are_not_targets_keep_their_recipe(self):
        """Two recipes in one model: each layer has its own, and the report shows both."""
        model = nn.Sequential(self.model(BLOCKS)[0], nn.Linear(200, 10))
        report = apply_lora(model, LoRAConfig(target_modules=["1"]))
        assert model[0].recipe == BLOCKS and model[1].recipe == DelayedScaling()
        assert list(report.fp8_state.names) == ["1"]
        shown = {row.name: (row.base, row.reason) for row in report.modules}
        assert shown["0"] == ("", "not a target, e4m3 in blocks") and shown["1"][0] == "e4m3"
        model(torch.randn(3, 300)).sum().backward()
