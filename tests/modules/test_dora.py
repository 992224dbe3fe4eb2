# SPDX-License-Identifier: Apache-2.0
"""DoRA: a trained magnitude for each row, against float64, against PEFT's layers, and in PEFT's files."""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
from lorakernels.checkpoints.adapters.files import load_adapter, read_adapter, save_adapter
from lorakernels.modules.linear.dora import DoRALinear
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.numerics.dropout import dropout_keep, keep_scale
from lorakernels.parallel import shard_base
from lorakernels.state.philox import draw_slot
from lorakernels.values import Dropout
from tests.adapter_files import CONFIG, WEIGHTS, Model, peft_load, randomize
from tests.dry_cuda import dry_cuda

RECIPES = {"plain": None, "delayed": DelayedScaling(), "block": BlockScaling()}
# float32: sums of at most 20 products, through two layers and norms
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
# One rounding to e4m3 is at most 2⁻⁴ of a value; x and W are both rounded.
FP8_BOUND = 2 * 2.0**-4


def config(fp8: Any = None, **fields: Any) -> LoRAConfig:
    given = {"target_modules": ["q", "v"], "r": 3, "lora_alpha": 5, "use_dora": True, **fields}
    return LoRAConfig(**given, fp8=fp8)


def apart(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


def trained(base: nn.Module, fp8: Any = None, **fields: Any) -> Any:
    model = copy.deepcopy(base)
    apply_lora(model, config(fp8, **fields))
    randomize(model)
    return model.eval()


def doubles(layer: DoRALinear) -> list[Tensor]:
    parts = (layer.base_weight(), layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)
    return [part.detach().double().requires_grad_() for part in parts]


@pytest.fixture
def base() -> Model:
    torch.manual_seed(torch.seed() % 2**31)
    return Model().eval()


@pytest.mark.parametrize("fp8", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("p", [0.0, 0.4], ids=["whole", "dropout"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_values_and_gradients_are_the_definitions(fp8, p, bias):
    k, n = 24, 40
    layer = DoRALinear.from_linear(nn.Linear(k, n, bias), config(fp8, r=4, lora_dropout=p))
    for parameter in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
        nn.init.normal_(parameter)
    x, dy = torch.randn(7, k, requires_grad=True), torch.randn(7, n)
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    y = layer.train()(x)
    y.backward(dy)
    weight, a, b, m = doubles(layer)
    wide = x.detach().double().requires_grad_()
    direction = weight + layer.scaling * (b @ a)
    g = m / direction.detach().norm(dim=1)
    rest = 0.0 if layer.bias is None else layer.bias.detach().double()
    if p:
        torch.manual_seed(seed)
        keep = dropout_keep(Dropout(draw_slot(None, x.device), p, layer.site), *x.shape)
        dropped = wide * keep * keep_scale(p)
        lora = layer.scaling * (dropped @ a.T) @ b.T
        expected = wide @ weight.T + rest + (g - 1) * (dropped @ weight.T) + g * lora
    else:
        expected = g * (wide @ direction.T) + rest
    expected.backward(dy.double())
    # dy is e5m2, a rounding of 2⁻³
    limit, grads = (1e-5, 1e-5) if fp8 is None else (FP8_BOUND, 2 * 2.0**-3)
    assert apart(y, expected) < limit
    assert apart(x.grad, wide.grad) < grads
    found = (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)
    for name, mine, theirs in zip("ABm", found, (a, b, m), strict=True):
        assert apart(mine.grad, theirs.grad) < grads, name


def beside_the_product(layer: DoRALinear, x: Tensor) -> Tensor:
    """As over a plain base: m / ‖W + s · B A‖ multiplies what the product has written."""
    y = LoRALinear.forward(layer, x)
    bias = 0.0 if layer.bias is None else layer.bias.float()
    factor = layer.lora_magnitude_vector.float() / layer.norms()
    return ((y.float() - bias) * factor + bias).to(y.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_column_scale_is_the_factor_beside_the_product(
    device: torch.device, dtype: torch.dtype, bias: bool
) -> None:
    """Delayed scales, so that dy · g is cast as it would be; also with m that is negative, tiny or 0.

    bf16 rounds y once here and twice there, 2^-8 of it, s and B once each, and dy · g. fp32 has other orders of sums,
    which may turn a rounding of dy to e5m2.
    """
    bound = 1e-3 if dtype == torch.float32 else 2.0**-5
    linear = nn.Linear(128, 256, bias, device=device, dtype=dtype)
    layer = DoRALinear.from_linear(linear, config(DelayedScaling(), r=8, bias="all")).train()
    for parameter in layer.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        layer.lora_magnitude_vector[:3] = torch.tensor([0.0, 1e-20, -1e-3])
    rows, dy = torch.randn(2, 64, 128), torch.randn(2, 64, 256)
    found = []
    for forward in (beside_the_product, beside_the_product, DoRALinear.forward):
        layer.zero_grad()
        x = rows.to(device, dtype, copy=True).requires_grad_()
        y = forward(layer, x)
        y.backward(dy.to(y))
        found.append(
            {"y": y, "x": x.grad}
            | {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
        )
        assert layer.fp8_state is not None
        if len(found) == 1:
            layer.fp8_state.reduce_and_update()
    assert found[1].keys() == found[2].keys()
    assert ("bias" in found[1]) == bias
    for name, expected in found[1].items():
        error = apart(found[2][name], expected)
        assert error <= bound, (name, error)
    m, theirs = (each["lora_magnitude_vector"][:3] for each in found[1:])
    torch.testing.assert_close(theirs, m, rtol=bound, atol=bound * float(m.abs().max()))


def test_hopper_runs_one_product_with_a_scale_for_each_column() -> None:
    linear = nn.Linear(256, 512, dtype=torch.bfloat16)
    layer = DoRALinear.from_linear(linear, config(DelayedScaling(), r=8))
    x = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
    with dry_cuda() as recorded:
        y = layer(x)
        y.backward(torch.ones_like(y))
    launches = [call for call in recorded.calls if call.kind != "torch"]
    assert {call.kind for call in launches} == {"extension"}
    assert [call.name for call in launches][1:] == [
        "quantize_lora_down", "fp8_linear_lora", "quantize_grad", "lora_grad_a", "fp8_grad_input"
    ]  # fmt: skip
    assert launches[2].arguments["by_column"] is True


def test_dropout_adds_a_product_without_an_adapter_and_counts_as_one_forward() -> None:
    """An FP8State in "auto" takes a layer that runs twice for the first of the model."""
    linear = nn.Linear(256, 512, dtype=torch.bfloat16)
    layer = DoRALinear.from_linear(linear, config(DelayedScaling(), r=8, lora_dropout=0.1)).train()
    x = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
    begun = []
    with dry_cuda() as recorded:
        with mock.patch.object(layer.fp8_state, "on_training_forward", begun.append):
            y = layer(x)
        y.backward(torch.ones_like(y))
    launches = [call for call in recorded.calls if call.kind != "torch"]
    assert Counter(call.name for call in launches) == {
        "dropout_mask": 1, "quantize_lora_down": 2, "fp8_linear_lora": 2, "quantize_grad": 2,
        "lora_grad_a": 1, "fp8_grad_input": 2,
    }  # fmt: skip
    assert begun == [layer.column]


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_a_checkpoint_over_fp8_computes_the_same(reentrant: bool) -> None:
    layer = DoRALinear.from_linear(nn.Linear(24, 40), config(DelayedScaling())).eval()
    randomize(layer)
    x, grads = torch.randn(7, 24, requires_grad=True), []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        layer.zero_grad()
        run(x).square().sum().backward()
        grads.append([p.grad for p in layer.parameters() if p.requires_grad])
    assert all(map(torch.equal, *grads))


class Drawn(nn.Module):
    """PEFT's dropout with our masks, of the next slot of torch's generator."""

    def __init__(self, layer: DoRALinear) -> None:
        super().__init__()
        self.numbers = layer.lora_dropout, layer.site

    def forward(self, x: Tensor) -> Tensor:
        mask = Dropout(draw_slot(None, x.device), *self.numbers)
        return x * dropout_keep(mask, *x.shape) * keep_scale(mask.p)


@pytest.mark.parametrize("p", [0.0, 0.4], ids=["whole", "dropout"])
def test_weights_logits_and_gradients_are_pefts(base, p):
    peft = pytest.importorskip("peft")
    fields = {"target_modules": ["q", "v"], "r": 3, "lora_alpha": 5, "use_dora": True}
    given = peft.LoraConfig(**fields, lora_dropout=p)
    theirs = peft.get_peft_model(copy.deepcopy(base), given).train()
    ours = copy.deepcopy(base)
    apply_lora(ours, config(lora_dropout=p))
    pairs = []
    for name, layer in ours.train().named_modules():
        if isinstance(layer, LoRALinear):
            peer = theirs.base_model.model.get_submodule(name)
            if p:
                peer.lora_dropout["default"] = Drawn(layer)
            a, b = peer.lora_A["default"].weight, peer.lora_B["default"].weight
            m = peer.lora_magnitude_vector["default"].weight
            torch.testing.assert_close(layer.lora_magnitude_vector, m, **CLOSE)
            randomize(layer)
            own = (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)
            pairs += zip(own, (a, b, m), strict=True)
    with torch.no_grad():
        for mine, its in pairs:
            its.copy_(mine)
    x, found, seed = torch.randn(6, 12), [], torch.seed() % 2**31
    for model in (ours, theirs):
        torch.manual_seed(seed)
        found.append(model(x))
    y, reference = found
    torch.testing.assert_close(y, reference, **CLOSE)
    dy = torch.randn_like(y)
    y.backward(dy)
    reference.backward(dy)
    for mine, its in pairs:
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fp8", RECIPES.values(), ids=RECIPES)
def test_starts_as_the_base_merges_and_goes_back(base, fp8):
    model, x = copy.deepcopy(base), torch.randn(9, 12)
    apply_lora(model, config(fp8))
    start = model(x)
    assert apart(start, base(x)) < (1e-5 if fp8 is None else FP8_BOUND)
    randomize(model)
    after = model(x)
    assert apart(after, start) > 0.05
    with disable_lora(model):
        torch.testing.assert_close(model(x), start, **CLOSE)
    layer = model.layers[0].q
    weight, a, b, m = doubles(layer)
    direction = weight + layer.scaling * (b @ a)
    expected = (m / direction.norm(dim=1))[:, None] * direction
    kept = layer.stored.clone()
    merge_lora(model)
    assert not any("lora" in key for key in layer.state_dict())
    assert apart(layer.dequantized_weight(), expected) < (1e-6 if fp8 is None else 2.0**-4)
    unmerge_lora(model)
    assert torch.equal(layer.stored, kept)
    plain = merge_and_unload(copy.deepcopy(model))
    assert apart(plain.layers[0].q.weight, expected) < 1e-6
    unload(model)
    assert apart(model.layers[0].q.weight, weight) < 1e-6


@pytest.mark.parametrize("fp8", RECIPES.values(), ids=RECIPES)
def test_small_magnitudes_and_factors_keep_their_digits_in_fp16(fp8):
    """g ⊙ B may be below the normal numbers of fp16 where the result is not."""
    layer = DoRALinear.from_linear(nn.Linear(24, 40, bias=False), config(fp8, r=4, lora_alpha=4))
    with torch.no_grad():
        layer.lora_A.normal_(std=2.0**6)
        layer.lora_B.normal_(std=2.0**-6)
        layer.lora_magnitude_vector.copy_(layer.norms() * 2.0**-12)
    weight, a, b, m = doubles(layer)
    direction = weight + layer.scaling * (b @ a)
    x = torch.randn(7, 24, dtype=torch.float16)
    y = layer.eval()(x)
    expected = (m / direction.norm(dim=1)) * (x.double() @ direction.T)
    # 24 numbers of x A, each of A, B and s and the result are rounded to fp16, 2⁻¹¹; W x is a small part of it
    assert y.dtype == torch.float16 and apart(y, expected) < 2.0**-8


@pytest.mark.parametrize("fp8", RECIPES.values(), ids=RECIPES)
def test_reset_starts_anew_with_the_norms_of_the_weight(fp8):
    layer = DoRALinear.from_linear(nn.Linear(24, 40), config(fp8)).eval()
    x = torch.randn(7, 24)
    first = layer(x)
    for _ in range(2):
        randomize(layer)
        assert apart(layer(x), first) > 0.1
        layer.reset_adapter()
        assert torch.equal(layer.lora_magnitude_vector, layer.norms()) and not layer.lora_B.any()
        assert apart(layer(x), first) < 1e-6


@pytest.mark.parametrize("fp8", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("p", [0.0, 0.4], ids=["whole", "dropout"])
def test_autocast_is_a_cast_of_x(fp8, p):
    layer = DoRALinear.from_linear(nn.Linear(24, 40), config(fp8, lora_dropout=p)).train()
    randomize(layer)
    twin, x = copy.deepcopy(layer), torch.randn(7, 24)
    torch.manual_seed(1)
    expected = twin(x.bfloat16())
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    y.sum().backward(), expected.sum().backward()
    for (name, one), (_, other) in zip(
        layer.named_parameters(), twin.named_parameters(), strict=True
    ):
        assert name in ("weight", "bias") or torch.equal(one.grad, other.grad), name


def test_a_row_of_zeros_stays_finite():
    linear = nn.Linear(8, 5, bias=False)
    linear.weight.data[2] = 0
    layer = DoRALinear.from_linear(linear, config())
    y = layer(torch.randn(3, 8))
    y.sum().backward()
    assert bool(y.isfinite().all()) and bool(layer.lora_magnitude_vector.grad.isfinite().all())


@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "fp8"])
def test_training_with_dropout_lowers_a_loss(fp8):
    layer = DoRALinear.from_linear(nn.Linear(16, 16), config(fp8, lora_dropout=0.1)).train()
    optimizer = torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=0.05)
    x, target = torch.randn(64, 16), torch.randn(64, 16)
    losses = []
    for _ in range(30):
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_pefts_files_both_ways(base, tmp_path):
    model, x = trained(base), torch.randn(5, 12)
    save_adapter(model, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / CONFIG).read_text())["use_dora"] is True
    held = load_file(tmp_path / "ours" / WEIGHTS)
    assert held["base_model.model.layers.0.q.lora_magnitude_vector"].shape == (20,)
    peer = peft_load(base, tmp_path / "ours").eval()
    torch.testing.assert_close(peer(x), model(x), **CLOSE)
    peer.save_pretrained(tmp_path / "theirs")
    assert load_file(tmp_path / "theirs" / WEIGHTS).keys() == held.keys()
    for fresh in (copy.deepcopy(base), trained(base)):  # plain, and over another adapter
        load_adapter(fresh, tmp_path / "theirs", fp8=None)
        assert torch.equal(fresh.eval()(x), model(x))
    found = read_adapter(model, tmp_path / "theirs")
    name = "layers.1.v.lora_magnitude_vector"
    assert torch.equal(found[name], model.get_parameter(name))


def test_a_state_dict_takes_the_magnitudes_along(base):
    model, other, x = (
        trained(base, DelayedScaling()),
        trained(base, DelayedScaling()),
        torch.ones(1, 12),
    )
    merge_lora(model)
    state = training_state_dict(model)
    unmerge_lora(model)
    other.load_state_dict(state)
    assert torch.equal(other(x), model(x))


def test_a_file_without_magnitudes_is_refused(base, tmp_path):
    save_adapter(trained(base, use_dora=False), tmp_path / "plain")
    with pytest.raises(ValueError, match=r"(?s)4 missing.*lora_magnitude_vector"):
        load_adapter(trained(base), tmp_path / "plain", fp8=None)
    mixed = trained(base, target_modules=["q"])
    both = LoRAConfig(r=2, fp8=None)
    mixed.layers[0].v = LoRALinear.from_linear(mixed.layers[0].v, both, name="layers.0.v")
    with pytest.raises(ValueError, match="use_dora must be the same in all layers of a file"):
        save_adapter(mixed, tmp_path / "mixed")


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 50, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    apply_lora(model, config(target_modules="all-linear"))
    return model


def test_what_does_not_compute_it_refuses_by_name():
    model = llama()
    with pytest.raises(ValueError, match=r"q_proj has use_dora=True, which a fused layer does not"):
        fuse(model)
    assert all(type(m) is DoRALinear for m in model.modules() if isinstance(m, LoRALinear))
    layer = model.model.layers[0].mlp.up_proj
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"use_dora=True runs eager only, found torch.compile"):
        compiled(torch.randn(2, 32))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"target_parameters": ["e.down_proj"]}, "go with target_parameters"),
        ({"init_lora_weights": "olora"}, "go with init_lora_weights='olora'"),
    ],
    ids=["experts", "olora"],
)
def test_a_config_refuses_what_does_not_go_together(fields, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(use_dora=True, **fields)


def test_each_class_refuses_the_others_config():
    with pytest.raises(ValueError, match="use_dora=True needs a DoRALinear, found LoRALinear"):
        LoRALinear(4, 4, config=config())
    with pytest.raises(ValueError, match="use_dora=False needs a LoRALinear, found DoRALinear"):
        DoRALinear(4, 4, config=LoRAConfig())


def test_load_quantized_takes_it_over_a_whole_base_only(tmp_path):
    model = unload(llama())
    model.save_pretrained(tmp_path)
    chosen = config(DelayedScaling(), target_modules="all-linear")
    loaded = load_quantized(tmp_path, lora=chosen, device="cpu", progress=False)
    layer = loaded.model.model.layers[0].mlp.up_proj
    torch.testing.assert_close(
        layer.lora_magnitude_vector.detach(), layer.base_weight().norm(dim=1)
    )
    with pytest.raises(ValueError, match="use_dora=True needs whole weights"):
        load_quantized(tmp_path, lora=chosen, device="cpu", progress=False, offload=0.5)
    with pytest.raises(ValueError, match="use_dora=True, whose norms need the whole weight"):
        shard_base(loaded.model, None, offload=0.5)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(6, 24), (2, 3, 24)], ids=["rows", "sequences"])
def test_a_result_that_is_changed_in_place_is_refused_or_does_not_matter(bias, shape):
    """Backward reads the product, which is the result where no bias is added."""
    layer = DoRALinear.from_linear(nn.Linear(24, 40, bias), config(DelayedScaling(), r=4)).eval()
    x = torch.randn(shape)
    parameters = [layer.lora_A, layer.lora_B, layer.lora_magnitude_vector]
    expected = torch.autograd.grad((2 * layer(x)).sum(), parameters)
    y = layer(x).mul_(2)
    if bias:
        assert all(map(torch.equal, torch.autograd.grad(y.sum(), parameters), expected))
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
