# SPDX-License-Identifier: Apache-2.0
"""LoRALinear and FrozenFP8Linear as nn.Modules: surface, dtype and device moves, copies, state_dict, merge."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lorakernels import (
    DelayedScaling,
    FrozenFP8Linear,
    LoRAConfig,
    LoRALinear,
    training_state_dict,
)
from lorakernels.modules.linear import stored_weight
from lorakernels.modules.linear.dora import DoRALinear

E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True, params=[torch.uint8, E4M3], ids=["stored as uint8", "stored as e4m3"])
def storage(request, monkeypatch):
    """What this torch version stores, and what the others do (stored_weight.STORAGE)."""
    monkeypatch.setattr(stored_weight, "STORAGE", request.param)


def make(fp8=True, dtype=None, **options):
    config = LoRAConfig(r=4, fp8=DelayedScaling() if fp8 else None, **options)
    layer = LoRALinear(24, 10, config=config, dtype=dtype)
    nn.init.normal_(layer.lora_B, std=0.3)
    return layer


def raw(t):
    return t.detach().contiguous().view(torch.uint8)


def test_the_surface_of_nn_linear_and_the_adapter():
    layer = make()
    assert (layer.in_features, layer.out_features) == (24, 10)
    assert layer.weight.shape == (10, 24) and layer.weight.dtype == E4M3
    assert (
        layer.bias.shape == (10,)
        and layer.lora_A.shape == (4, 24)
        and layer.lora_B.shape == (10, 4)
    )
    assert layer.scaling == 8 / 4
    trained = {n for n, p in layer.named_parameters() if p.requires_grad}
    assert trained == {"lora_A", "lora_B"}
    assert "r=4" in repr(layer) and "base=e4m3" in repr(layer)
    weight = layer._parameters["weight"]
    assert weight.numel() * weight.element_size() == 240, "one byte per parameter"


def test_from_linear_equals_the_linear_at_init():
    linear = nn.Linear(32, 16, dtype=torch.bfloat16)
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    plain = LoRALinear.from_linear(linear, LoRAConfig(fp8=None, lora_dropout=0.5))
    exact = x.double() @ linear.weight.double().t() + linear.bias.double()
    torch.testing.assert_close(plain(x), exact.bfloat16(), rtol=2**-8, atol=0)
    assert plain.lora_A.dtype == torch.float32 and plain.weight is plain._parameters["weight"]
    fp8 = LoRALinear.from_linear(linear, LoRAConfig(), adapter_dtype=torch.bfloat16)
    error = (fp8.dequantized_weight() - linear.weight.float()).abs()
    step = linear.weight.float().abs() * 2**-4 + linear.weight.float().abs().max() / 448 * 2**-10
    assert (error <= step).all(), (
        "round to nearest: half an e4m3 step, 2⁻⁴ relative or half a subnormal"
    )
    assert fp8.lora_A.dtype == torch.bfloat16
    assert torch.equal(fp8.bias, linear.bias)


@pytest.mark.parametrize("how", ["half", "bfloat16", "to_bf16", "double"])
def test_to_dtype_never_touches_the_fp8_bytes(how):
    layer = make()
    kept = [raw(t).clone() for t in (layer.weight, layer.weight_scale_inv)]
    {
        "half": layer.half,
        "bfloat16": layer.bfloat16,
        "to_bf16": lambda: layer.to(torch.bfloat16),
        "double": layer.double,
    }[how]()
    now = [raw(t) for t in (layer.weight, layer.weight_scale_inv)]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    assert layer.weight_scale_inv.dtype == torch.float32 and layer.weight.dtype == E4M3
    assert layer.fp8_state.forward.dtype == torch.float32
    assert layer.lora_A.dtype == layer.bias.dtype != torch.float32


@pytest.mark.gpu
def test_to_device_moves_everything():
    layer = make().cuda()
    kept = layer.stored.clone()
    tensors = [
        *layer.parameters(),
        *layer.buffers(),
        layer.fp8_state.forward,
        layer.fp8_state.backward,
    ]
    assert all(t.is_cuda for t in tensors)
    assert torch.equal(layer.cpu().stored, kept.cpu())


def trained(layer):
    for _ in range(3):
        layer(torch.randn(6, 24, requires_grad=True)).pow(2).sum().backward()
    layer.zero_grad()
    return layer


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "plain"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "state_dict", "assign"])
def test_round_trips_bit_for_bit(how, fp8):
    layer = trained(make(fp8, lora_dropout=0.25))
    if how == "deepcopy":
        twin = copy.deepcopy(layer)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(layer))
    elif how == "torch.save":
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        twin = make(fp8, lora_dropout=0.25)
        twin.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    else:
        twin = make(fp8, lora_dropout=0.25)
        twin.load_state_dict(copy.deepcopy(layer.state_dict()), assign=how == "assign")
    for (key, a), b in zip(layer.state_dict().items(), twin.state_dict().values(), strict=True):
        assert a.dtype == b.dtype and torch.equal(raw(a), raw(b)), key
    x = torch.randn(6, 24)
    results = []
    for module in (layer, twin):
        torch.manual_seed(0)
        xs = x.clone().requires_grad_()
        y = module(xs)
        y.pow(2).sum().backward()
        results.append((y, xs.grad, module.lora_A.grad, module.lora_B.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("copies", [False, True], ids=["single", "both"])
def test_a_pickle_with_a_weight_layout_is_read(copies):
    """It says how the weight was held, and may have a transposed copy, which is dropped."""
    layer = trained(make())
    state = layer.__getstate__()
    state["weight_layout"] = "both" if copies else "single"
    state["_buffers"] = {**layer._buffers, "weight_t": layer.stored.t() if copies else None}
    state["_non_persistent_buffers_set"] = {"weight_t"}
    old = LoRALinear.__new__(LoRALinear)
    old.__setstate__(copy.deepcopy(state))
    assert dict(old.named_buffers()).keys() == dict(layer.named_buffers()).keys()
    assert vars(old).keys() == vars(layer).keys() and not old._non_persistent_buffers_set
    x = torch.randn(6, 24)
    assert torch.equal(old.eval()(x), layer.eval()(x))
    twin = pickle.loads(pickle.dumps(old))
    assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize("name", ["scaling", "lora_dropout", "row0", "site"])
def test_a_pickle_older_than_chunks_follows_its_numbers(name):
    """It has no `chunks`. Its eager calls would keep the numbers that it was saved with."""
    layer = trained(make(lora_dropout=0.25))
    state = layer.__getstate__()
    state.pop("chunks", None)
    old = LoRALinear.__new__(LoRALinear)
    old.__setstate__(copy.deepcopy(state))
    assert old.chunks == ()
    x, found = torch.randn(6, 24), []
    for module, value in ((layer, None), (layer, 0.5), (old, 0.5)):
        if value is not None:
            setattr(module, name, value if name in ("scaling", "lora_dropout") else 64)
        torch.manual_seed(0)
        found.append(module(x))
    assert not torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


def test_state_dict_has_the_checkpoint_names_of_fp8_layers():
    state = make().state_dict()
    assert state["weight"].dtype == E4M3 and state["weight_scale_inv"].shape == (1,)
    assert state["fp8_scale"].shape == (2,) and state["fp8_amax_history"].shape == (1024, 2)


def test_loading_a_plain_checkpoint_quantizes_it():
    layer, linear = make(), nn.Linear(24, 10)
    result = layer.load_state_dict(linear.state_dict(), strict=False)
    assert sorted(result.missing_keys) == ["lora_A", "lora_B"] and not result.unexpected_keys
    assert torch.equal(layer.weight, FrozenFP8Linear.from_linear(linear).weight)


def test_loading_refuses_what_does_not_fit():
    layer = make()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    other = LoRALinear(24, 10, config=LoRAConfig(r=4, fp8=DelayedScaling(amax_history_len=8)))
    with pytest.raises(RuntimeError, match=r"shape \(8, 2\) does not fit .*amax_history_len is"):
        layer.load_state_dict(other.state_dict())
    short = make().state_dict()
    del short["fp8_scale"]
    with pytest.raises(RuntimeError, match="fp8_scale"):
        layer.load_state_dict(short)
    layer.load_state_dict(before)


def test_loading_another_recipes_scales_is_refused():
    layer = make()
    e4m3 = LoRALinear(24, 10, config=LoRAConfig(r=4, fp8=DelayedScaling(fp8_format="E4M3")))
    with pytest.raises(RuntimeError, match=r"maxima \[448.0, 448.0\]"):
        layer.load_state_dict(e4m3.state_dict())


def test_loading_fp8_into_a_plain_layer_dequantizes_it():
    fp8, plain = make(), make(fp8=False)
    plain.load_state_dict(fp8.state_dict())
    assert torch.equal(plain.weight, fp8.dequantized_weight())
    with pytest.raises(RuntimeError, match="need one weight_scale_inv"):
        plain.load_state_dict({"weight": fp8.weight.detach()}, strict=False)


def test_loading_a_weight_with_nan_names_the_layer_and_changes_nothing():
    model = nn.Sequential(make())
    before = raw(model[0].weight).clone()
    state = {"0.weight": torch.full((10, 24), float("nan"))}
    with pytest.raises(RuntimeError, match=r"0\.weight: weight must be finite"):
        model.load_state_dict(state, strict=False)
    assert torch.equal(raw(model[0].weight), before)


def test_distributed_checkpoint_api_both_ways():
    from torch.distributed.checkpoint import state_dict as api

    options = api.StateDictOptions(full_state_dict=True)
    source, target = nn.Sequential(trained(make())), nn.Sequential(make())
    api.set_model_state_dict(
        target, api.get_model_state_dict(source, options=options), options=options
    )
    for key, value in source.state_dict().items():
        assert torch.equal(raw(value), raw(target.state_dict()[key])), key


def test_a_merge_that_fails_half_way_is_undone(monkeypatch):
    layer = make()
    before = raw(layer.weight).clone()
    write, calls = layer._write_weight, []

    def failing(weight, scale_inv):
        write(weight, scale_inv)
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError

    monkeypatch.setattr(layer, "_write_weight", failing)
    with pytest.raises(MemoryError):
        layer.merge()
    assert not layer.merged and layer._base is None and torch.equal(raw(layer.weight), before)


def test_a_merge_beyond_the_dtypes_range_is_refused():
    layer = LoRALinear(24, 10, config=LoRAConfig(r=4, fp8=None), dtype=torch.float16)
    layer.lora_A.data.fill_(100)
    layer.lora_B.data.fill_(200)
    with pytest.raises(ValueError, match="not finite"):
        layer.merge()


def test_meta_then_to_empty_then_load():
    with torch.device("meta"):
        layer = LoRALinear(24, 10, config=LoRAConfig(r=4))
    assert layer.lora_A.is_meta and layer.fp8_state.forward.is_meta
    layer.to_empty(device="cpu")
    source = trained(make())
    layer.load_state_dict(source.state_dict())
    x = torch.randn(3, 24)
    assert torch.equal(layer.eval()(x), source.eval()(x))


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "plain"])
def test_merge_and_unmerge(fp8):
    layer = trained(make(fp8))
    x = torch.randn(64, 24)
    layer.eval()
    apart, state = layer(x), {k: v.clone() for k, v in layer.state_dict().items()}
    address = layer.weight.data_ptr()
    layer.merge()
    assert layer.merged and layer.weight.data_ptr() == address
    together = layer(x)
    # requantizing W + BA and reading x8 instead of x in the branch: each rounds by at most 2⁻⁴ of what it
    # touches, evenly spread, so by less than 2⁻⁴/√3 in norm
    error = (together - apart).norm() / apart.norm()
    assert error < (2**-4 if fp8 else 1e-5)
    assert set(layer.state_dict()) == set(state) - {"lora_A", "lora_B"}
    assert torch.equal(raw(layer.state_dict()["weight"]), raw(layer.weight))
    for key, value in training_state_dict(layer).items():
        assert torch.equal(raw(value), raw(state[key])), key
    with pytest.raises(RuntimeError, match="unmerge"):
        layer.load_state_dict(state)
    layer.unmerge()
    assert torch.equal(layer(x), apart)
    for key, value in layer.state_dict().items():
        assert torch.equal(raw(value), raw(state[key])), key


def test_merging_a_non_finite_adapter_is_refused():
    layer = make()
    before = raw(layer.weight).clone()
    layer.lora_B.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        layer.merge()
    assert not layer.merged and torch.equal(raw(layer.weight), before)


def test_eval_turns_dropout_off_and_changes_nothing_else():
    layer = trained(make(lora_dropout=0.5))
    x = torch.randn(6, 24)
    layer.eval()
    rng, state = torch.get_rng_state(), layer.fp8_state.forward.clone()
    y = layer(x)
    assert torch.equal(torch.get_rng_state(), rng) and torch.equal(layer.fp8_state.forward, state)
    no_dropout = copy.deepcopy(layer).train()
    no_dropout.lora_dropout = 0.0
    no_dropout.fp8_state.reset()  # x is then scaled by its own amax, as in eval
    assert torch.equal(no_dropout(x), y)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: LoRALinear(0, 4), ValueError, "in_features must be a positive integer, found 0"),
        (lambda: LoRALinear(4, 2.0), ValueError, "out_features must be a positive integer"),
        (lambda: LoRALinear(4, 4, adapter_dtype=torch.int8), TypeError, "found torch.int8"),
        (lambda: LoRALinear(4, 4, adapter_dtype=E4M3), TypeError, "found torch.float8_e4m3fn"),
        (lambda: FrozenFP8Linear.from_linear(nn.Linear(4, 4), nonsense=1), TypeError, "nonsense"),
    ],
    ids=["K", "N", "int8", "fp8 adapter", "option"],
)
def test_bad_arguments(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_non_finite_weight_is_refused():
    linear = nn.Linear(4, 4)
    linear.weight.data[1, 2] = float("inf")
    with pytest.raises(ValueError, match="finite"):
        LoRALinear.from_linear(linear, LoRAConfig())


def test_initialisations_are_pefts():
    torch.manual_seed(0)
    layers = {
        w: LoRALinear(4096, 8, config=LoRAConfig(r=64, init_lora_weights=w))
        for w in (True, False, "gaussian")
    }
    bound = (1 / 4096) ** 0.5  # kaiming_uniform with a = √5: U(±1/√fan_in)
    assert layers[True].lora_A.abs().max() <= bound and layers[True].lora_B.count_nonzero() == 0
    assert 0 < layers[False].lora_B.abs().max() <= (1 / 64) ** 0.5
    assert abs(layers["gaussian"].lora_A.std().item() - 1 / 64) < 5e-4
    assert layers["gaussian"].lora_B.count_nonzero() == 0


@pytest.mark.parametrize("kind", ["lora", "DoRA", "base"])
def test_a_base_that_is_to_train_is_refused(kind):
    """It would get no gradient. Without gradients it computes, and frozen again it trains its adapter."""
    config = LoRAConfig(r=2, fp8=None, use_dora=kind == "DoRA")
    if kind == "base":
        layer = FrozenFP8Linear(8, 6, fp8=None)
    else:
        layer = (DoRALinear if kind == "DoRA" else LoRALinear)(8, 6, config=config)
    x = torch.randn(3, 8, requires_grad=True)
    layer(x).sum().backward()
    layer.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"weight\.requires_grad must be False"):
        layer(x)
    with torch.no_grad():
        layer(x)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
