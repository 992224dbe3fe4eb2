# SPDX-License-Identifier: Apache-2.0
"""Adapters that start from the base weight: OLoRA and PiSSA, against their definitions, and against PEFT's layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels import (
    BlockScaling,
    DelayedScaling,
    LoRAConfig,
    apply_lora,
    disable_lora,
    fuse,
    load_quantized,
    merge_and_unload,
    merge_lora,
    training_state_dict,
    unload,
    unmerge_lora,
)
from lorakernels.modules.linear.initial import initial_adapter
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.model.merge import lora_modules
from tests.adapter_files import Model, randomize

WAYS = ("olora", "pissa", "pissa_niter_8")
RECIPES = {"plain": None, "delayed": DelayedScaling(), "block": BlockScaling()}
TARGETS = {"target_modules": ["q", "v"], "r": 3, "lora_alpha": 5, "rank_pattern": {"0.q": 5}}
# One rounding to e4m3, 3 bits of mantissa, is at most 2⁻⁴ of a value. Two of them meet in a comparison.
TWO_ROUNDINGS = 2 * 2.0**-4


def config(how: str, fp8: Any = None, **fields: Any) -> LoRAConfig:
    return LoRAConfig(**{**TARGETS, "init_lora_weights": how, "fp8": fp8, **fields})


def apart(one: Tensor, other: Tensor) -> float:
    """The norm of the difference over the norm of `other`, in float64."""
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


@pytest.fixture
def base() -> Model:
    torch.manual_seed(torch.seed() % 2**31)
    return Model().eval()


@pytest.mark.parametrize("shape", [(20, 12), (12, 20), (7, 7)], ids=str)
def test_olora_is_the_start_of_a_qr_decomposition(shape):
    weight, r = torch.randn(shape), 4
    found = initial_adapter("q", weight, config("olora", r=r, rank_pattern={}), None)
    q, u = torch.linalg.qr(weight.double())
    # Householder's Q in fp32 is off by a few K ulp: 20 · 2⁻²³ is 2.4e-6
    torch.testing.assert_close(found.B.double(), q[:, :r], rtol=0, atol=2e-5)
    torch.testing.assert_close(found.A.double(), u[:r], rtol=0, atol=1e-4)


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_16"])
def test_pissa_leaves_the_small_singular_values(how):
    weight, r = torch.randn(24, 15), 4
    found = initial_adapter("q", weight, config(how, r=r, rank_pattern={}), None)
    values = torch.linalg.svdvals(weight.double())
    rest = torch.linalg.svdvals(found.rest.double())
    # 16 subspace iterations leave (σ₅/σ₄)³² of the fifth direction, so the randomised one has a looser bound
    bound = 1e-4 if how == "pissa" else 0.05
    torch.testing.assert_close(rest[: 15 - r], values[r:], rtol=bound, atol=bound)
    norms = found.A.norm(dim=1), found.B.norm(dim=0)
    torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-5)  # √S on either side


@pytest.mark.parametrize("how", ["olora", "pissa"])
@pytest.mark.parametrize("rslora", [False, True], ids=["lora", "rslora"])
def test_weights_logits_and_gradients_are_pefts(base, how, rslora):
    peft = pytest.importorskip("peft")
    fields = {**TARGETS, "use_rslora": rslora, "init_lora_weights": how}
    theirs = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**fields)).train()
    ours = copy.deepcopy(base)
    apply_lora(ours, config(how, use_rslora=rslora))
    ours.train()
    x = torch.randn(6, 12)
    y, reference = ours(x), theirs(x)
    # float32 rounding: sums of at most 20 products, through two layers and a norm
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(y, reference, **close)
    dy = torch.randn_like(y)
    y.backward(dy)
    reference.backward(dy)
    for name, layer in ours.named_modules():
        if isinstance(layer, LoRALinear):
            peer = theirs.base_model.model.get_submodule(name)
            a, b = peer.lora_A["default"].weight, peer.lora_B["default"].weight
            torch.testing.assert_close(layer.weight, peer.base_layer.weight, **close)
            torch.testing.assert_close(layer.lora_A, a, **close)
            torch.testing.assert_close(layer.lora_B, b, **close)
            torch.testing.assert_close(layer.lora_A.grad, a.grad, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(layer.lora_B.grad, b.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fp8", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("how", WAYS)
def test_the_model_starts_as_the_base_and_goes_back_to_it(base, how, fp8):
    """At first, with the adapter off, and after unload: W, up to the rounding of what the layer holds."""
    bound = 1e-5 if fp8 is None else TWO_ROUNDINGS
    model, x = copy.deepcopy(base), torch.randn(9, 12)
    apply_lora(model, config(how, fp8))
    assert apart(model(x), base(x)) < bound
    randomize(model)
    model.train()
    assert apart(model(x), base(x)) > 0.15  # more than any bound of this test
    for layer in [None, *lora_modules(model).values()]:
        if layer is not None:
            layer.scaling = 3.0  # what the weight lacks stays what the first one took
        with disable_lora(model):
            assert apart(model(x), base(x)) < bound
    unload(model)
    for name in ("layers.0.q", "layers.1.v"):
        weight = base.get_submodule(name).weight
        assert apart(model.get_submodule(name).weight, weight) < bound, name


@pytest.mark.parametrize("fp8", RECIPES.values(), ids=RECIPES)
def test_merging_adds_the_adapter_to_what_is_held(base, fp8):
    model = copy.deepcopy(base)
    apply_lora(model, config("pissa", fp8))
    randomize(model)
    layer = model.get_submodule("layers.0.q")
    assert isinstance(layer, LoRALinear)
    kept = layer.stored.clone()
    product = layer.scaling * (layer.lora_B.double() @ layer.lora_A.double()).detach()
    expected = layer.base_weight().double() + product
    merge_lora(model)
    bound = 1e-6 if fp8 is None else 2.0**-4
    assert apart(layer.dequantized_weight(), expected) < bound
    unmerge_lora(model)
    assert torch.equal(layer.stored, kept)
    plain = merge_and_unload(model)
    assert apart(plain.get_submodule("layers.0.q").weight.detach(), expected) < 1e-6


@pytest.mark.parametrize("how", ["olora", "pissa"])
def test_w_less_the_adapter_is_what_is_quantized(base, how):
    """The bytes are those of W′ in fp32, rounded once, also over a bf16 base with bf16 adapters."""
    model = copy.deepcopy(base).bfloat16()
    weight = model.layers[0].q.weight.detach().clone()
    apply_lora(model, config(how, DelayedScaling()), adapter_dtype=None)
    layer = model.layers[0].q
    assert layer.lora_A.dtype == torch.bfloat16 == layer.lora_A_init.dtype
    product = (layer.lora_B.double() @ layer.lora_A.double()).detach()
    rest = weight.double() - layer.scaling * product
    step = float(rest.abs().max()) / 448 * 2.0**-9  # half the smallest subnormal of e4m3, scaled
    error = (layer.dequantized_weight().double() - rest).abs()
    assert bool((error <= rest.abs() * 2.0**-4 * 1.001 + step).all())


def test_a_state_dict_takes_the_initial_adapter_along(base):
    model, other = copy.deepcopy(base), copy.deepcopy(base)
    apply_lora(model, config("pissa", DelayedScaling()))
    randomize(model)
    nn.init.normal_(other.layers[0].q.weight)
    apply_lora(other, config("pissa", DelayedScaling()))
    other.load_state_dict(training_state_dict(model))
    x = torch.randn(5, 12)
    assert torch.equal(other.eval()(x), model.eval()(x))
    with disable_lora(other), disable_lora(model):
        assert torch.equal(other(x), model(x))


def test_reset_gives_the_initial_adapter_again(base):
    apply_lora(base, config("olora"))
    layer = base.layers[0].q
    before = [p.detach().clone() for p in (layer.lora_A, layer.lora_B)]
    randomize(base)
    layer.reset_adapter()
    assert torch.equal(layer.lora_A, before[0]) and torch.equal(layer.lora_B, before[1])


def test_a_seed_gives_the_same_randomised_start():
    weight, made = torch.randn(30, 20), []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(initial_adapter("q", weight, config("pissa_niter_2"), None))
    assert all(torch.equal(one, other) for one, other in zip(made[0][:2], made[1][:2], strict=True))


REFUSED = {
    "rank": (
        {"rank_pattern": {"1.v": 13}},
        ValueError,
        r"at most 12 for layers\.1\.v\.weight .*r=13",
    ),
    "float64": ({}, TypeError, r"layers\.0\.q in float32, .* found torch\.float64"),
    "inf": ({}, ValueError, r"found inf or NaN in layers\.0\.q\.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_changes(base, case):
    fields, error, message = REFUSED[case]
    if case == "float64":
        base.layers[0].q.double()
    if case == "inf":
        base.layers[0].q.weight.data[0, 0] = float("inf")
    before = {name: (type(m), id(m)) for name, m in base.named_modules()}
    with pytest.raises(error, match=message):
        apply_lora(base, config("olora", **fields))
    assert {name: (type(m), id(m)) for name, m in base.named_modules()} == before


def test_an_fp8_base_is_refused_by_name(base):
    apply_lora(base, LoRAConfig(target_modules=["q"]), frozen="fp8")
    unadapted = nn.Sequential(base.layers[0].v)
    with pytest.raises(TypeError, match=r"'pissa' starts from the weight of 0 in .*float8_e4m3fn"):
        apply_lora(unadapted, LoRAConfig(target_modules=["0"], init_lora_weights="pissa"))


def test_what_never_holds_the_weight_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="'olora' starts from the 16-bit weight, which load_quantized"
    ):
        load_quantized(tmp_path, lora=config("olora"))
    with pytest.raises(ValueError, match="'olora' starts from a weight: use from_linear"):
        LoRALinear(8, 8, config=config("olora"))
    with pytest.raises(ValueError, match="target_parameters do not take"):
        LoRAConfig(target_parameters=["experts.down_proj"], init_lora_weights="olora")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(12, 20), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.q(x), self.k(x)), -1)


def test_a_fused_model_computes_the_adapter_and_refuses_to_switch_it_off():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 50, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    tokens = torch.randint(50, (2, 8))
    model = copy.deepcopy(base)
    chosen = LoRAConfig(r=3, target_modules="all-linear", init_lora_weights="pissa", fp8=None)
    apply_lora(model, chosen)
    fuse(model)
    expected = base(tokens).logits
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-3, atol=1e-4)
    with disable_lora(model), pytest.raises(ValueError, match="'pissa' has changed the weight"):
        model(tokens)
    unload(model)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "delayed"])
def test_a_compiled_layer_switches_it_off(base, fp8):
    apply_lora(base, config("olora", fp8, lora_dropout=0.5))
    randomize(base)
    layer, x = base.layers[0].q.train(), torch.randn(6, 12)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    layer.disable_adapters = True
    layer.eval()
    expected = layer(x)
    bound = 1e-5 if fp8 is None else 1e-3
    assert apart(compiled(x), expected) < bound
    layer.train()
    assert apart(compiled(x), layer(x)) < (bound if fp8 is None else TWO_ROUNDINGS)
