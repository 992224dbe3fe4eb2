# SPDX-License-Identifier: Apache-2.0
"""Several adapters in one batch compute, train and are saved as each one alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lorakernels
from lorakernels import AdapterBatch, BlockScaling, DelayedScaling, LoRAConfig, LoRALinear
from lorakernels.modules.batch import FACTORS

NAMES = ("fr", "de", "it")
TOKENS = 16


def tiny_llama(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **{"vocab_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2, **sizes, **changes}
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.config.use_cache = False
    return model


# by the recipe's name, with sizes that it takes: the rows of k and v are a block
RECIPES = {
    "plain": (None, {}),
    "blocks": (BlockScaling(), {"hidden_size": 256, "intermediate_size": 128}),
    "blocks, e5m2": (BlockScaling("HYBRID", True), {"hidden_size": 256, "intermediate_size": 128}),
}


def adapted(fp8: Any = None, sizes: Any = None, **options: Any) -> Any:
    model = tiny_llama(**(sizes or {}))
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | options
    lorakernels.apply_lora(model, LoRAConfig(fp8=fp8, **options))
    return model.train()


def batched(fp8: Any = None, sizes: Any = None, **options: Any) -> tuple[Any, AdapterBatch]:
    """With values in every B."""
    model = adapted(fp8, sizes)
    batch = lorakernels.batch_adapters(model, NAMES, **options)
    for name in NAMES:
        for key, value in batch.parameters(name).items():
            if key.endswith("lora_B"):
                own = batch.ranks.get(name, value.shape[1])
                nn.init.normal_(value.data[:, :own], std=0.1)
    return model, batch


def alone(model: Any, batch: AdapterBatch, name: str) -> Any:
    with batch.only(name):
        return copy.deepcopy(model)


def rows(model: Any, count: int = len(NAMES)) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (count, TOKENS))


def differing(model: Any, batch: AdapterBatch, single: Any, name: str) -> list[str]:
    """Parameters whose gradients are not those of `single`."""
    given = batch.parameters(name)
    return [
        key for key, own in given.items() if not torch.equal(own.grad, single.get_parameter(key).grad)
    ]  # fmt: skip


@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_those_of_each_alone(recipe: str, fused: bool) -> None:
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
        assert torch.equal(out[i : i + 1], own)
        assert differing(model, batch, single, name) == []


@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_sequences_in_any_order_have_their_adapters(recipe: str, fused: bool) -> None:
    """As PEFT's adapter_names: an adapter twice, one not at all, and the base alone."""
    names = ["de", "__base__", "fr", "de"]
    model, batch = batched(*RECIPES[recipe])
    singles = {name: alone(model, batch, name) for name in NAMES}
    base = copy.deepcopy(singles["fr"])
    if fused:
        for each in (model, base, *singles.values()):
            lorakernels.fuse(each)
    ids = rows(model, len(names))
    with batch.rows(names):
        out = model(input_ids=ids).logits
    dout = torch.randn_like(out)
    out.backward(dout)
    batch.give_gradients()
    for i, name in enumerate(names):
        if name == "__base__":
            with lorakernels.disable_lora(base):
                own = base(input_ids=ids[i : i + 1]).logits
        else:
            own = singles[name](input_ids=ids[i : i + 1]).logits
            own.backward(dout[i : i + 1])
        assert torch.equal(out[i : i + 1], own)
    for name in NAMES:
        for key, value in batch.parameters(name).items():
            expected = singles[name].get_parameter(key).grad
            assert value.grad is not None
            if expected is None:
                assert name == "it" and value.grad.count_nonzero() == 0
            else:
                torch.testing.assert_close(
                    value.grad, expected
                )  # two sums, added in one order or the other
    with (
        batch.rows(["fr"]),
        batch.only("de"),
        pytest.raises(ValueError, match="exclude each other"),
    ):
        model(input_ids=ids)
    with pytest.raises(KeyError, match="adapter 'es' must be one of"), batch.rows(["es"]):
        pass
    with pytest.raises(ValueError, match="names must have one for each sequence"), batch.rows([]):
        pass


@pytest.mark.parametrize("init", ["olora", "pissa"])
def test_adapters_that_start_from_the_weight(init: str, tmp_path: Any) -> None:
    """All start as the base, and files fit it. What lacks the initial adapter is refused."""
    model, base = adapted(init_lora_weights=init), tiny_llama()
    message = f"init_lora_weights='{init}' has changed the weight, so "
    with pytest.raises(ValueError, match=message + "every adapter needs the whole rank"):
        lorakernels.batch_adapters(model, NAMES, {"de": 2})
    batch = lorakernels.batch_adapters(model, NAMES, {"de": 4})
    ids = rows(model)
    torch.testing.assert_close(model(input_ids=ids).logits, base(input_ids=ids).logits)
    for name in NAMES:
        for key, value in batch.parameters(name).items():
            if key.endswith("lora_B"):
                nn.init.normal_(value.data, std=0.1)
    with batch.rows(["it", "de"]):
        found = model(input_ids=ids[:2]).logits
    with batch.only("de"):
        lorakernels.save_adapter(model, tmp_path)
    lorakernels.load_adapter(base, tmp_path, fp8=None)
    torch.testing.assert_close(base(input_ids=ids[1:2]).logits, found[1:])
    with (
        pytest.raises(ValueError, match=message + "no sequence can have the base alone"),
        batch.rows(["it", None]),
    ):
        pass


def test_rows_inside_rows_hold_until_their_own_end() -> None:
    model, batch = batched()
    ids = rows(model)
    with torch.no_grad(), batch.rows(["it", "fr", "de"]):
        before = model(input_ids=ids).logits
        with pytest.raises(RuntimeError, match="inside"), batch.rows(["de"]):
            model(input_ids=ids)
            raise RuntimeError("inside")
        assert torch.equal(model(input_ids=ids).logits, before)
    assert all(layer.adapter_rows is None for layer in batch.layers.values())


def test_an_fp8_base_sees_one_scale_for_all_rows() -> None:
    """Rows that are alike have that amax alone, too: then the bits are equal."""
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
        assert torch.equal(y[8 * i : 8 * i + 8], found)
        assert torch.equal(whole.grad[8 * i : 8 * i + 8], own.grad)
        assert differing(model, batch, single, name) == []


def test_each_trains_at_its_own_rate_as_alone() -> None:
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
        optimizer.step()
        for i, (name, single) in enumerate(singles.items()):
            others[name].zero_grad()
            single(input_ids=ids[i : i + 1]).logits.square().sum().backward()
            others[name].step()
    for name, single in singles.items():
        for key, value in batch.parameters(name).items():
            assert torch.equal(value, single.get_parameter(key)), (name, key)


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


def test_what_needs_all_adapters_says_so_inside_only() -> None:
    model, batch = batched()
    optimizer = torch.optim.SGD(batch.param_groups(), lr=0.1)
    batch.follow(optimizer)
    before = copy.deepcopy(model.state_dict())
    with batch.only("fr"):
        model(input_ids=rows(model, 1)).logits.sum().backward()
        for call in (
            optimizer.step,
            batch.param_groups,
            batch.give_gradients,
            lambda: batch.only("de").__enter__(),
        ):
            with pytest.raises(RuntimeError, match=r"q_proj\.lora_A is one adapter's: inside"):
                call()
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


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


def test_ranks_below_the_layers_stay_below() -> None:
    model, batch = batched(ranks={"de": 2})
    optimizer = torch.optim.AdamW(batch.param_groups(), lr=1e-2)
    batch.follow(optimizer)
    for _ in range(2):
        model(input_ids=rows(model)).logits.square().sum().backward()
        optimizer.step()
    for key, value in batch.parameters("de").items():
        rest = value[2:] if key.endswith("lora_A") else value[:, 2:]
        assert rest.count_nonzero() == 0, key


def test_files_are_peft_s(tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")
    model, batch = batched(ranks={"de": 2})
    ids = rows(model)
    out = model(input_ids=ids).logits
    base = tiny_llama()
    for i, name in enumerate(NAMES):
        with batch.only(name):
            lorakernels.save_adapter(model, tmp_path / name)
        config = peft.PeftConfig.from_pretrained(tmp_path / name)
        assert (config.r, config.lora_alpha) == ((2, 4) if name == "de" else (4, 8))
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name)
        torch.testing.assert_close(theirs(input_ids=ids[i : i + 1]).logits, out[i : i + 1])


def test_what_is_loaded_inside_only_stays(tmp_path: Any) -> None:
    model, batch = batched()
    with batch.only("it"):
        lorakernels.save_adapter(model, tmp_path)
    with batch.only("fr"):
        lorakernels.load_adapter(model, tmp_path)
    for one, other in zip(
        batch.parameters("fr").values(), batch.parameters("it").values(), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
def test_one_that_is_merged_serves_no_others(fused: bool) -> None:
    model, batch = batched()
    if fused:
        lorakernels.fuse(model)
    ids = rows(model)
    before = model(input_ids=ids).logits
    with batch.only("fr"):
        lorakernels.merge_lora(model)
        torch.testing.assert_close(model(input_ids=ids[:1]).logits, before[:1])
    with pytest.raises(RuntimeError, match="q_proj has several adapters, and one is merged"):
        model(input_ids=ids)
    lorakernels.unmerge_lora(model)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_an_exception_inside_only_gives_the_batch_back() -> None:
    model, batch = batched()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="inside"), batch.only("de"):
        raise RuntimeError("inside")
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert next(iter(batch.layers.values())).lora_A.shape[0] == 3


@pytest.mark.parametrize("call", ["batch_adapters", "only"])
def test_an_exception_in_the_middle_leaves_the_model_as_it_was(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = batched() if call == "only" else (adapted(), None)
    before = copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters())
    fails = torch.Tensor.clone
    calls = iter(range(100))

    def clone(tensor: Tensor, **options: Any) -> Tensor:
        if next(calls) == 9:  # of the fifth layer
            raise torch.OutOfMemoryError("full")
        return fails(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        if batch is None:
            lorakernels.batch_adapters(model, NAMES)
        else:
            with batch.only("de"):
                raise AssertionError("not reached")
    monkeypatch.undo()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


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
    "merged": (merged, "q_proj is merged: unmerge it first"),
    "dropout": (lambda: adapted(lora_dropout=0.1), "has lora_dropout=0.1, expected 0 for several"),
    "dora": (lambda: adapted(use_dora=True), "q_proj is a DoRALinear, expected a LoRALinear"),
    "experts": (mixture, r"experts\.down_proj\.0 is of an expert, which takes tokens in an order of its own"),
    "biases": (with_biases, "q_proj has a trained bias, which all adapters would share: expected bias='none'"),
    "saved": (lambda: adapted(target_modules=["q_proj"], modules_to_save=["lm_head"]), "lm_head has trained"),
    "twice": (lambda: batched()[0], "q_proj has several adapters: choose one by AdapterBatch.only"),
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
    with pytest.raises(ValueError, match="has 3 adapters, which must divide the rows, found 64"):
        model(input_ids=rows(model, 4))


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
