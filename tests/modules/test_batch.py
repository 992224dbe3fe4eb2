# SPDX-License-Identifier: Apache-2.0
"""Several adapters in one batch compute, train and are saved as each one alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lorakernels
from lorakernels import AdapterBatch, BlockScaling, DelayedScaling, LoRAConfig, LoRALinear
from lorakernels.modules.batch.batch import FACTORS
from tests.fusion.fused_models import FP32, difference
from tests.modules.batched_models import (
    NAMES,
    RECIPES,
    adapted,
    alone,
    batched,
    bound,
    far,
    rows,
    tiny_llama,
)


@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_are_those_of_each_alone(recipe: str, fused: bool) -> None:
    """Under BlockScaling each row has scales of its own, so that other adapters' rows do not change them."""
    model, batch = batched(*RECIPES[recipe])
    singles = {name: alone(model, batch, name) for name in NAMES}
    if fused:
        for each in (model, *singles.values()):
            lorakernels.fuse(each)
    ids = rows(model)
    out = model(input_ids=ids).logits
    dout = torch.randn_like(out)
    out.backward(dout)
    batch.give_gradients()
    for i, (name, single) in enumerate(singles.items()):
        own = single(input_ids=ids[i : i + 1]).logits
        own.backward(dout[i : i + 1])
        assert difference(out[i : i + 1], own) <= bound(recipe)
        assert far(model, batch, single, name) <= bound(recipe)


def test_an_fp8_base_sees_one_scale_for_all_rows() -> None:
    """Rows that are alike have that amax alone, too, and then the same bytes."""
    config = LoRAConfig(r=4, fp8=DelayedScaling())
    layer = LoRALinear(64, 48, config=config)
    model = nn.Sequential(layer)
    batch = lorakernels.batch_adapters(model, NAMES)
    nn.init.normal_(layer.lora_B)
    x, dy = torch.randn(8, 64), torch.randn(8, 48)
    singles = [alone(model, batch, name) for name in NAMES]
    whole = x.repeat(3, 1).requires_grad_()
    y = model(whole)
    y.backward(dy.repeat(3, 1))
    batch.give_gradients()
    for i, (name, single) in enumerate(zip(NAMES, singles, strict=True)):
        own = x.clone().requires_grad_()
        found = single(own)
        found.backward(dy)
        assert difference(y[8 * i : 8 * i + 8], found) <= 2 * FP32
        assert difference(whole.grad[8 * i : 8 * i + 8], own.grad) <= 2 * FP32
        assert far(model, batch, single, name) <= 2 * FP32


def test_each_trains_at_its_own_rate_as_alone() -> None:
    """Gradients have other orders of sums. By the same ones, AdamW's steps are the same to the bit."""
    model, batch = batched()
    rates = {"fr": {"lr": 1e-2}, "de": {"lr": 3e-3, "weight_decay": 0.1}}
    singles = {name: alone(model, batch, name) for name in NAMES}
    optimizer = torch.optim.AdamW(batch.param_groups(rates), lr=1e-3)
    batch.follow(optimizer)
    others = {
        name: torch.optim.AdamW(
            [p for p in single.parameters() if p.requires_grad], **{"lr": 1e-3} | rates.get(name, {})
        )
        for name, single in singles.items()
    }  # fmt: skip
    for _ in range(3):
        ids = rows(model)
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits
        logits.square().sum().backward()
        for i, (name, single) in enumerate(singles.items()):
            others[name].zero_grad()
            single(input_ids=ids[i : i + 1]).logits.square().sum().backward()
            assert far(model, batch, single, name) <= 2 * FP32
            for key, value in batch.parameters(name).items():
                single.get_parameter(key).grad = value.grad.clone()
            others[name].step()
        optimizer.step()
    for name, single in singles.items():
        for key, value in batch.parameters(name).items():
            assert torch.equal(value, single.get_parameter(key)), (name, key)


def test_gradients_are_there_for_grad_scaler_and_clipping() -> None:
    """A scale that is a power of two changes no bit. A step with infinities is left out, and the next one is clean."""
    found = []
    for scales in (False, True):
        model, batch = batched()
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(batch.param_groups(), lr=1e-2)
        batch.follow(optimizer)
        parts = [p for group in optimizer.param_groups for p in group["params"]]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scales)
        for step in range(4):
            overflows = step == 1
            optimizer.zero_grad()
            for _ in range(2):  # microbatches
                loss = model(input_ids=rows(model)).logits.square().mean()
                if scales or not overflows:
                    scaler.scale(loss * (torch.inf if overflows else 1.0)).backward()
            before = [p.clone() for p in parts]
            if not overflows:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(parts, 0.01)
                assert norm > 0.01
            if scales or not overflows:
                scaler.step(optimizer)
            scaler.update(1024.0 if scales else None)
            assert all(map(torch.equal, before, parts)) == overflows
        found.append(parts)
    assert all(map(torch.equal, *found))


def test_zero_grad_reaches_the_layers_and_microbatches_are_summed() -> None:
    """Also where the memory moves between two of them."""
    model, batch = batched()
    optimizer = torch.optim.SGD(batch.param_groups(), lr=0.1)
    batch.follow(optimizer)
    ids = rows(model)
    model(input_ids=ids).logits.square().mean().backward()
    optimizer.zero_grad()
    first = next(iter(batch.layers.values())).lora_A
    model(input_ids=ids).logits.square().mean().backward()
    once = first.grad.clone()
    first.data = first.data.clone()
    model(input_ids=ids).logits.square().mean().backward()
    assert torch.equal(first.grad, 2 * once)
    batch.parameters("fr")
    model(input_ids=ids).logits.square().mean().backward()
    torch.testing.assert_close(first.grad, 3 * once, rtol=1e-6, atol=0)


def to_bf16(model: Any, batch: AdapterBatch) -> tuple[Any, AdapterBatch]:
    return model.to(torch.bfloat16), batch


def assigned(model: Any, batch: AdapterBatch) -> tuple[Any, AdapterBatch]:
    values = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    for layer in batch.layers.values():
        layer.lora_A.requires_grad_(), layer.lora_B.requires_grad_()
    return model, batch


def copied(model: Any, batch: AdapterBatch) -> tuple[Any, AdapterBatch]:
    return copy.deepcopy((model, batch))


@pytest.mark.parametrize("early", [False, True], ids=["then an optimizer", "under an optimizer"])
@pytest.mark.parametrize("moved", [to_bf16, assigned, copied])
def test_an_optimizer_finds_parameters_that_have_moved(moved: Any, early: bool) -> None:
    """An optimizer that was made before serves what it was made for, not a copy."""
    model, batch = batched()
    optimizer = torch.optim.SGD(batch.param_groups(), lr=0.1)
    model, batch = moved(model, batch)
    if not early or moved is copied:
        optimizer = torch.optim.SGD(batch.param_groups(), lr=0.1)
    batch.follow(optimizer)
    old = {key: value.clone() for key, value in model.state_dict().items() if "lora_" in key}
    gradients = {}
    model(input_ids=rows(model)).logits.square().sum().backward()
    for key in old:
        gradients[key] = model.get_parameter(key).grad.clone()
    optimizer.step()
    for key, value in old.items():
        assert torch.equal(model.get_parameter(key), value.add(gradients[key], alpha=-0.1)), key


@pytest.mark.parametrize("followed", [False, True], ids=["alone", "followed"])
@pytest.mark.parametrize("moved", [to_bf16, assigned, copied])
def test_parts_that_have_moved_keep_no_gradient_of_before(moved: Any, followed: bool) -> None:
    """Moved once and once more: each has the layer's own gradient, or none."""
    model, batch = batched()
    if followed:
        batch.follow(torch.optim.SGD(batch.param_groups(), lr=0.1))
    for _ in range(2):
        model(input_ids=rows(model)).logits.square().sum().backward()
        batch.give_gradients()
        model, batch = moved(model, batch)
        for index, name in enumerate(NAMES):
            for key, part in batch.parameters(name).items():
                whole = model.get_parameter(key)
                assert part.data_ptr() == whole[index].data_ptr() and part.dtype == whole.dtype
                if part.grad is not None:
                    assert whole.grad is not None and torch.equal(part.grad, whole.grad[index])


def test_an_optimizer_of_the_model_trains_all() -> None:
    model, batch = batched()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    before = {name: [v.clone() for v in batch.parameters(name).values()] for name in NAMES}
    model(input_ids=rows(model)).logits.square().sum().backward()
    optimizer.step()
    for name in NAMES:
        now = batch.parameters(name).values()
        assert not any(map(torch.equal, before[name], now)), "views follow, and every factor moved"


def test_a_state_dict_holds_all() -> None:
    (model, batch), (other, theirs) = batched(), batched()
    other.load_state_dict(model.state_dict())
    for name in NAMES:
        found = zip(batch.parameters(name).values(), theirs.parameters(name).values(), strict=True)
        assert all(torch.equal(a, b) for a, b in found)


@pytest.mark.parametrize("fp8", [None, BlockScaling()], ids=["plain", "blocks"])
def test_torch_compile_computes_the_same(fp8: Any) -> None:
    layer = LoRALinear(64, 48, config=LoRAConfig(r=4, fp8=fp8))
    batch = lorakernels.batch_adapters(nn.Sequential(layer), NAMES)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(24, 64)
    found = [f(x) for f in (layer, torch.compile(layer, backend="aot_eager"))]
    grads = []
    for y in found:
        layer.zero_grad()
        y.square().sum().backward()
        grads.append([getattr(layer, factor).grad for factor in FACTORS])
    assert torch.equal(*found)
    assert all(map(torch.equal, *grads))
    assert len(batch.names) == 3


def merged() -> Any:
    model = adapted()
    lorakernels.merge_lora(model)
    return model


def mixture() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.MixtralConfig(
        vocab_size=64, num_hidden_layers=1, num_key_value_heads=2, num_local_experts=4, **sizes
    )
    model = transformers.MixtralForCausalLM(config)
    options = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    lorakernels.apply_lora(model, LoRAConfig(fp8=None, **options))
    return model


def with_biases() -> Any:
    model = tiny_llama(attention_bias=True)
    lorakernels.apply_lora(model, LoRAConfig(fp8=None, target_modules=["q_proj"], bias="lora_only"))
    return model


MODELS = {
    "no adapter": (tiny_llama, "model has no LoRALinear: call apply_lora first"),
    "merged": (merged, "q_proj is merged \(and .* more\): call unmerge_lora first"),
    "dropout": (lambda: adapted(lora_dropout=0.1), "has lora_dropout=0.1, expected 0 for several"),
    "dora": (lambda: adapted(use_dora=True), "q_proj is a DoRALinear, expected a LoRALinear"),
    "experts": (mixture, r"experts\.down_proj\.0 is of an expert, which takes tokens in an order of its own"),
    "biases": (with_biases, "q_proj has a trained bias, which all adapters would share: expected bias='none'"),
    "saved": (lambda: adapted(target_modules=["q_proj"], modules_to_save=["lm_head"]), "lm_head has trained"),
    "twice": (lambda: batched()[0], r"q_proj has several adapters in one batch .*: choose one by AdapterBatch.only"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_are_refused_stay_as_they_are(kind: str) -> None:
    make, message = MODELS[kind]
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        lorakernels.batch_adapters(model, NAMES)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.parametrize(
    ("names", "ranks", "message"),
    [
        ((), None, r"names must be at least one, all different, found \[\]"),
        (("a", "a"), None, r"all different, found \['a', 'a'\]"),
        (("a",), {"b": 2}, "ranks has no adapter named b in names"),
        (("a",), {"a": 5}, r"ranks\['a'\] must be 1 to 4, found 5"),
    ],
    ids=["none", "twice", "unknown", "too wide"],
)  # fmt: skip
def test_names_and_ranks_that_are_refused(names: Any, ranks: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lorakernels.batch_adapters(adapted(), names, ranks)


def test_calls_that_need_one_adapter_say_so(tmp_path: Any) -> None:
    model, batch = batched()
    layer = next(iter(batch.layers.values()))
    for call in (
        lambda: lorakernels.save_adapter(model, tmp_path),
        lambda: lorakernels.merge_lora(model),
        layer.delta_weight,
        layer.merge,
    ):
        with pytest.raises(ValueError, match=r"AdapterBatch\.only\(name\)"):
            call()
    with pytest.raises(KeyError, match="adapter 'es' must be one of fr, de, it"):
        batch.parameters("es")
    with pytest.raises(ValueError, match="3 adapters must divide the sequences, found 4 in x"):
        model(input_ids=rows(model, 4))


def test_an_exception_while_adapters_are_started_leaves_the_layers_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, calls, real = adapted(), [], LoRALinear.reset_adapter
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}

    def reset(layer: LoRALinear) -> None:
        real(layer)
        calls.append(layer)
        if len(calls) == 5:  # of the second layer, after one of its adapters
            raise MemoryError

    monkeypatch.setattr(LoRALinear, "reset_adapter", reset)
    with pytest.raises(MemoryError):
        lorakernels.batch_adapters(model, NAMES)
    assert all(p is before[n][0] and p.equal(before[n][1]) for n, p in model.named_parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
@pytest.mark.parametrize("fp8", [DelayedScaling(), BlockScaling()], ids=["delayed", "blocks"])
def test_replayed_steps_are_eager_ones(fp8: Any, fused: bool) -> None:
    """The same losses with graphs and without, by the kernels of segments: 128 rows for each adapter."""
    losses = []
    for graphs in (False, True):
        model = tiny_llama(hidden_size=256, intermediate_size=512).cuda().bfloat16()
        lora = LoRAConfig(r=8, target_modules="all-linear", fp8=fp8)
        lorakernels.apply_lora(model, lora)
        batch = lorakernels.batch_adapters(model, NAMES)
        if fused:
            lorakernels.fuse(model)
        trained = [p for p in model.train().parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05)
        attached = lorakernels.attach(model, optimizer, graphs=graphs)
        torch.manual_seed(1)
        found = []
        for _ in range(8):
            ids = torch.randint(0, 64, (len(batch.names), 128), device="cuda")
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        assert not graphs or attached.replaying, str(attached)
        attached.detach()
        losses.append(found)
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == len(losses[0]), "every step changes the adapters"
