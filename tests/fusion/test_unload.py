# SPDX-License-Identifier: Apache-2.0
"""unload, merge_and_unload, a merged model's state_dict, and the one of a run in progress."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lorakernels import (
    DelayedScaling,
    FrozenFP8Linear,
    LoRAConfig,
    LoRALinear,
    apply_lora,
    disable_lora,
    merge_and_unload,
    merge_lora,
    training_state_dict,
    unload,
    unmerge_lora,
)
from lorakernels.modules.model.trained_parts import saved_modules

FP8 = DelayedScaling()
BASES = pytest.mark.parametrize("fp8", [None, FP8], ids=["plain base", "FP8 base"])


class Block(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.out(torch.tanh(self.q(x)) * self.k(x)))


class Model(nn.Module):
    """Two places share one block; the head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 24)
        first = Block()
        self.blocks = nn.ModuleList([first, Block(), first])
        self.head = nn.Linear(24, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(fp8: DelayedScaling | None = None, **config) -> tuple[Model, Model]:
    """(the base, a copy with adapters, every trained parameter away from its first value)."""
    base = Model().eval()
    model = copy.deepcopy(base)
    config = {"target_modules": ["q", "k"], "r": 3, "lora_alpha": 6, **config}
    apply_lora(model, LoRAConfig(fp8=fp8, **config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return base, model


def tokens() -> Tensor:
    return torch.randint(0, 11, (2, 5))


def expected_weight(layer: LoRALinear) -> Tensor:
    base = layer.dequantized_weight().double()
    return base + layer.scaling * (layer.lora_B.double() @ layer.lora_A.double())


def ours(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, FrozenFP8Linear)]


@BASES
@pytest.mark.parametrize("merged", [False, True], ids=["not merged", "merged"])
def test_merge_and_unload_is_w_plus_scaling_b_a_rounded_once(fp8, merged):
    _, model = trained(fp8, rank_pattern={"k": 5}, use_rslora=True)
    model = model.bfloat16()
    layers = {path: model.get_submodule(path) for path in ours(model)}
    expected = {path: expected_weight(layer) for path, layer in layers.items()}
    if merged:
        merge_lora(model)
    assert merge_and_unload(model) is model and not ours(model)
    for path, exact in expected.items():
        found = model.get_submodule(path)
        assert type(found) is nn.Linear and found.weight.dtype == torch.bfloat16
        assert not found.weight.requires_grad and not found.training
        # fp32 sums of three products, then one rounding, by 2⁻⁸ at most
        torch.testing.assert_close(found.weight.double(), exact, rtol=2**-8 + 2**-15, atol=1e-6)
    assert model.blocks[0] is model.blocks[2], "a shared module stays shared"


@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
def test_the_merged_model_computes_what_the_adapted_one_did(bias):
    _, model = trained(bias=bias, target_modules=["q", "out"], modules_to_save=["norm"])
    ids = tokens()
    expected = model(ids)
    merge_and_unload(model)
    torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=1e-5)
    assert set(model.state_dict()) == set(Model().state_dict())


@BASES
@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
def test_unload_gives_the_base_back(fp8, bias):
    base, model = trained(fp8, bias=bias, modules_to_save=["norm"])
    expected = {path: model.get_submodule(path).dequantized_weight() for path in ours(model)}
    unload(model)
    assert not ours(model)
    for name, value in base.state_dict().items():
        found = model.state_dict()[name]
        path, _, kind = name.rpartition(".")
        exact = expected.get(path.replace("blocks.2", "blocks.0")) if kind == "weight" else None
        assert torch.equal(found, value if fp8 is None or exact is None else exact), name
    if fp8 is None:
        ids = tokens()
        assert torch.equal(model(ids), base(ids))


@BASES
def test_unload_of_a_merged_model_keeps_what_was_trained(fp8):
    _, model = trained(fp8, bias="all", modules_to_save=["norm"])
    other = merge_and_unload(copy.deepcopy(model))
    merge_lora(model)
    unload(model)
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("call", [unload, merge_and_unload])
def test_an_unloaded_model_is_a_new_base(call):
    """What apply_lora remembers of it is as it is now, and no earlier values."""
    _, model = trained(bias="all", modules_to_save=["norm"])
    call(model)
    ids = tokens()
    expected = model(ids)
    apply_lora(model, LoRAConfig(target_modules=["out"], fp8=None))
    assert not saved_modules(model)
    with torch.no_grad(), disable_lora(model):
        assert torch.equal(model(ids), expected)


def test_a_tied_head_is_merged_alone():
    """Tied to the embedding, and tied again after apply_lora had given it memory of its own."""
    base, model = trained(target_modules=["head"])
    model.head.weight = model.embed.weight
    ids = tokens()
    expected = model(ids)
    merge_lora(model)
    assert torch.equal(model.embed.weight, base.embed.weight)
    torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merge_and_unload(model)(ids), expected, rtol=1e-5, atol=1e-5)


def test_the_dtype_of_fp8_weights_is_the_models_or_the_one_asked_for():
    _, model = trained(FP8)
    half = unload(copy.deepcopy(model).bfloat16())
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    asked = unload(model, dtype=torch.float16).blocks[0].q
    assert (asked.weight.dtype, asked.bias.dtype) == (torch.float16, torch.float16)
    alone = LoRALinear(8, 4, bias=False, config=LoRAConfig(r=2))
    assert type(unload(alone)) is nn.Linear and unload(alone).weight.dtype == torch.bfloat16


def test_frozen_fp8_layers_without_adapters_unload_too():
    model = nn.Sequential(nn.LayerNorm(24), FrozenFP8Linear.from_linear(nn.Linear(24, 8)))
    expected = model[1].dequantized_weight()
    with pytest.raises(ValueError, match="no LoRALinear"):
        merge_and_unload(model)
    assert torch.equal(unload(model)[1].weight, expected)
    with pytest.raises(ValueError, match="plain already"):
        unload(model)


@BASES
def test_the_state_dict_of_a_merged_model_is_the_merged_model(fp8):
    _, model = trained(fp8, bias="lora_only", modules_to_save=["norm"])
    apart = {name: value.clone() for name, value in model.state_dict().items()}
    merge_lora(model)
    state = model.state_dict()
    assert not any("lora_" in name for name in state)
    if fp8 is None:
        plain = Model().eval()
        plain.load_state_dict(state)
    else:
        plain = Model().eval()
        for path in ours(model):
            parent, _, name = path.rpartition(".")
            linear = plain.get_submodule(path)
            setattr(plain.get_submodule(parent), name, FrozenFP8Linear.from_linear(linear, fp8))
        plain.blocks[2] = plain.blocks[0]
        plain.load_state_dict(state)
    ids = tokens()
    assert torch.equal(plain.eval()(ids), model(ids))

    going_on = training_state_dict(model)
    assert list(going_on) == list(apart)
    for name, value in apart.items():
        assert torch.equal(going_on[name].float(), value.float()), name
    assert model.blocks[0].q.merged
    unmerge_lora(model)
    model.load_state_dict(going_on)
    assert all(torch.equal(v.float(), apart[n].float()) for n, v in model.state_dict().items())


@BASES
def test_an_unmerged_layer_has_forgotten_its_old_base(fp8):
    _, model = trained(fp8)
    _, other = trained(fp8)
    merge_lora(model)
    unmerge_lora(model)
    model.load_state_dict(other.state_dict())
    merge_and_unload(model)
    for name, value in merge_and_unload(other).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def snapshot(model: nn.Module) -> dict[str, object]:
    state = {n: v.clone() for n, v in training_state_dict(model).items()}
    return {"modules": {n: id(m) for n, m in model.named_modules()}, "state": state}


def assert_as_before(model: nn.Module, before: dict) -> None:
    now = snapshot(model)
    assert now["modules"] == before["modules"]
    for name, value in before["state"].items():
        assert torch.equal(now["state"][name].float(), value.float()), name


@pytest.mark.parametrize("call", [unload, merge_and_unload])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_exception_leaves_the_model_as_it_was(call, at, monkeypatch):
    _, model = trained(FP8, bias="all", modules_to_save=["norm"])
    before, calls = snapshot(model), []
    weight = LoRALinear.dequantized_weight

    def failing(self, *args):
        calls.append(1)
        if len(calls) > at:
            raise MemoryError
        return weight(self, *args)

    monkeypatch.setattr(LoRALinear, "dequantized_weight", failing)
    with pytest.raises(MemoryError):
        call(model)
    monkeypatch.undo()
    assert_as_before(model, before)
    assert not ours(call(model))


def test_what_cannot_be_unloaded_is_refused_by_name_and_unchanged():
    _, model = trained()
    before = snapshot(model)
    with disable_lora(model), pytest.raises(ValueError, match="leave disable_lora first"):
        unload(model)
    model.blocks[0].q.merge()
    with pytest.raises(ValueError, match="some adapters are merged and some are not"):
        unload(model)
    model.blocks[0].q.unmerge()
    model.blocks[1].k.lora_B.data.fill_(float("inf"))
    with pytest.raises(ValueError, match=r"blocks\.1\.k: the weight would not be finite"):
        merge_and_unload(model)
    model.blocks[1].k.lora_B.data.copy_(before["state"]["blocks.1.k.lora_B"])
    assert_as_before(model, before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_no_plain_weight_has_is_refused(dtype):
    layer = LoRALinear(24, 10, config=LoRAConfig(r=2))
    for call in (unload, merge_and_unload):
        with pytest.raises(TypeError, match=f"found {dtype}"):
            call(layer, dtype=dtype)
