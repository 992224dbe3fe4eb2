# SPDX-License-Identifier: Apache-2.0
"""unfuse, FP8 states, adapter files, merging and memory that moved: what a fused model holds outlives fuse."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from lorakernels import (
    DelayedScaling,
    FrozenFP8Linear,
    disable_lora,
    fuse,
    load_adapter,
    merge_and_unload,
    merge_lora,
    save_adapter,
    unfuse,
    unmerge_lora,
)
from tests.fusion.fused_models import (
    FP32,
    LINEARS,
    PACKINGS,
    adapted,
    difference,
    exact,
    fp8_state,
    fused_copy,
    named,
    run,
    same_within,
    tokens,
)


@pytest.mark.parametrize("fp8", [DelayedScaling(amax_history_len=4), None], ids=["fp8", "plain"])
@pytest.mark.parametrize("family", PACKINGS)
def test_unfuse_restores_every_bit(family: str, fp8) -> None:
    model = adapted(family, LINEARS, fp8=fp8, dtype=torch.bfloat16)
    x = tokens()
    if fp8 is not None:
        run(model, x)
        fp8_state(model).reduce_and_update()
    model.config.use_cache = True
    twin, _ = fused_copy(model)
    assert twin.config.use_cache is False
    unfuse(twin)
    assert twin.config.use_cache is True
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
    states = model.state_dict(), twin.state_dict()
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        assert torch.equal(value.float(), states[1][name].float()), name
    pointers = [p.untyped_storage().data_ptr() for p in twin.model.layers.parameters()]
    assert len(set(pointers)) == len(pointers), "memory is still shared"
    expected, found = run(model, x), run(twin, x)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    with pytest.raises(ValueError, match="not fused"):
        unfuse(twin)


def test_unfuse_after_training_leaves_usable_scales() -> None:
    model = adapted(targets=LINEARS, fp8=DelayedScaling(amax_history_len=4), dtype=torch.bfloat16)
    fuse(model)
    state = model.model.layers[0].self_attn.q_proj.fp8_state
    x = tokens()
    for _ in range(2):
        run(model, x)
        state.reduce_and_update()
    assert state.joint
    unfuse(model)
    assert not state.joint
    attention = model.model.layers[0].self_attn
    scales = [m.fp8_scale for m in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert torch.equal(scales[0], scales[1]) and torch.equal(scales[0], scales[2])
    assert scales[0][0] > 0 and scales[0][1] == 0
    truth = run(exact(model), x)
    assert difference(run(model, x)["logits"], truth["logits"]) < 0.25


def test_unfused_layers_have_whole_memory_of_their_own() -> None:
    model = adapted("Qwen2", LINEARS, fp8=DelayedScaling())
    fuse(model)
    unfuse(model)
    attention = model.model.layers[0].self_attn
    for name in ("stored", "lora_A", "bias"):
        tensors = [getattr(m, name) for m in (attention.q_proj, attention.k_proj)]
        assert all(t.is_contiguous() for t in tensors), name
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == 2, name


@pytest.mark.parametrize("family", PACKINGS)
def test_plain_linears_become_fp8_on_the_adapters_state_and_may_come_back(family: str) -> None:
    model = adapted(family, fp8=DelayedScaling(), dtype=torch.bfloat16)
    linear = model.model.layers[1].mlp.down_proj
    report = fuse(model, keep_linears=True)
    down = model.model.layers[1].mlp.down_proj
    assert type(down) is FrozenFP8Linear and down.weight.element_size() == 1
    assert down.fp8_state is fp8_state(model)
    assert down.fp8_state.names[down.column] == "model.layers.1.mlp.down_proj"
    assert report.layers[0].frozen == named(("gate_proj", "up_proj", "down_proj"), family)
    unfuse(model)
    assert model.model.layers[1].mlp.down_proj is linear


@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "fp8"])
def test_kept_linears_follow_the_model(fp8: DelayedScaling | None) -> None:
    """`.to`, `eval` and a bias that was loaded reach the model; the kept modules are outside of it meanwhile."""
    model = adapted("Qwen2", ("gate_proj",), fp8=fp8)
    fuse(model, keep_linears=True)
    model.to(torch.bfloat16).eval()
    biases = {k: torch.full_like(v, 0.5) for k, v in model.state_dict().items() if "k_proj.b" in k}
    model.load_state_dict(biases, strict=False, assign=True)
    unfuse(model)
    linear = model.model.layers[1].self_attn.k_proj
    assert type(linear) is nn.Linear and linear.weight.dtype == torch.bfloat16
    assert not linear.training and linear.bias.unique().item() == 0.5
    model(tokens(), use_cache=False)


@pytest.mark.parametrize("how", ["copy", "assign"])
@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "fp8"])
def test_kept_linears_of_another_weight_stay_out(fp8: DelayedScaling | None, how: str) -> None:
    models = [adapted(fp8=fp8) for _ in range(2)]
    for model in models:
        fuse(model, keep_linears=True)
    models[0].load_state_dict(models[1].state_dict(), assign=how == "assign")
    x = tokens()
    expected = run(models[1], x)
    with pytest.warns(
        RuntimeWarning, match=r"layers\.\{0-1\}\.mlp\.\{gate,up.*\}_proj stay Frozen"
    ):
        unfuse(models[0])
    unfused = exact(models[0])
    assert type(models[0].model.layers[0].mlp.gate_proj) is FrozenFP8Linear
    bound = FP32 if fp8 is None else 0.1  # two roundings to 2^-4 in each of some thirty
    assert difference(run(unfused, x)["logits"], expected["logits"]) < bound


def test_kept_linears_of_one_changed_layer_alone_stay_out() -> None:
    model = adapted(fp8=DelayedScaling())
    fuse(model, keep_linears=True)
    frozen = model.model.layers[1].mlp.up_proj
    with torch.no_grad():
        frozen.weight_scale_inv.mul_(2)
    with pytest.warns(RuntimeWarning, match=r"^model\.layers\.1\.mlp\.up_proj stay"):
        unfuse(model)
    assert model.model.layers[1].mlp.up_proj is frozen
    assert type(model.model.layers[1].mlp.gate_proj) is nn.Linear


def test_a_base_that_is_fp8_already_comes_to_the_adapters_state() -> None:
    """With its histories: who updates the adapters' scales updates them all."""
    recipe = DelayedScaling(amax_history_len=4)
    model = adapted(fp8=recipe, dtype=torch.bfloat16)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            frozen = FrozenFP8Linear.from_linear(getattr(layer.mlp, name), recipe, name=name)
            setattr(layer.mlp, name, frozen)
    x = tokens()
    run(model, x)
    down = model.model.layers[1].mlp.down_proj
    down.fp8_state.reduce_and_update()
    scale = down.fp8_scale.clone()
    assert scale.min() > 0
    fuse(model)
    state = model.model.layers[0].self_attn.q_proj.fp8_state
    assert {id(m.fp8_state) for m in model.modules() if isinstance(m, FrozenFP8Linear)} == {
        id(state)
    }
    assert torch.equal(down.fp8_scale, scale)
    run(model, x)
    state.reduce_and_update()
    assert down.fp8_amax_history[-1].min() > 0


@pytest.mark.parametrize("family", PACKINGS)
def test_adapters_round_trip(family: str, tmp_path) -> None:
    model = adapted(family, LINEARS)
    twin, _ = fused_copy(model)
    x = tokens()
    optimizer = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        run(twin, x)
        optimizer.step()
    save_adapter(twin, tmp_path)
    load_adapter(model, tmp_path)
    trained = run(twin, x)
    same_within(run(model, x), trained, FP32)
    other, _ = fused_copy(adapted(family, LINEARS))
    other.load_state_dict(twin.state_dict())
    same_within(run(other, x), trained, FP32)
    load_adapter(other, tmp_path)
    same_within(run(other, x), trained, FP32)


@pytest.mark.parametrize("fp8", [DelayedScaling(), None], ids=["fp8", "plain"])
@pytest.mark.parametrize("family", PACKINGS)
def test_merge_and_disable(family: str, fp8) -> None:
    model = adapted(family, LINEARS, fp8=fp8).eval()
    twin, _ = fused_copy(model)
    x = tokens()
    bound = (
        FP32 if fp8 is None else 2.0**-3
    )  # e4m3 rounds the merged weight, by 2^-4 at most, in two layers

    def logits(m: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return m(x, use_cache=False).logits

    adapters = logits(twin)
    merge_lora(twin), merge_lora(model)
    assert difference(logits(twin), logits(model)) <= FP32
    assert difference(logits(twin), adapters) <= bound
    unmerge_lora(twin), unmerge_lora(model)
    assert torch.equal(logits(twin), adapters)
    with disable_lora(twin), disable_lora(model):
        assert difference(logits(twin), logits(model)) <= FP32
        assert difference(logits(twin), adapters) > 1e-2
    (name,) = named(("k_proj",), family)  # one of a group, or all of it
    for each in (twin, model):
        each.model.layers[0].self_attn.get_submodule(name).disable_adapters = True
    assert difference(logits(twin), logits(model)) <= FP32
    twin.train(), model.train()
    if fp8 is None:
        same_within(run(twin, x), run(model, x), FP32)


@pytest.mark.parametrize("fp8", [DelayedScaling(), None], ids=["fp8", "plain"])
@pytest.mark.parametrize("family", PACKINGS)
def test_unloading_a_fused_model_leaves_plain_layers(family: str, fp8) -> None:
    model = adapted(family, LINEARS, fp8=fp8).eval()
    twin, _ = fused_copy(model)
    x = tokens()
    for each in (model, twin):
        merge_and_unload(each)
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
    assert not any(isinstance(m, FrozenFP8Linear) for m in twin.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value), name
    with torch.no_grad():
        assert torch.equal(twin(x).logits, model(x).logits)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "to", "assign"])
@pytest.mark.parametrize("family", PACKINGS)
def test_memory_that_moved_is_joined_again(family: str, how: str) -> None:
    model = adapted(family, LINEARS, fp8=DelayedScaling())
    fuse(model)
    x = tokens()
    expected = run(model, x)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = model
        values = {name: value.clone() for name, value in model.state_dict().items()}
        if how == "to":
            twin.double().float()
        twin.load_state_dict(values, assign=how == "assign")
    for _ in range(2):
        found = run(twin, x)
    if how != "assign":  # a parameter that was assigned is frozen or not as the value was
        assert found.keys() == expected.keys()
    assert torch.equal(found["logits"], expected["logits"])
    attention = twin.model.layers[0].self_attn
    names = named(("q_proj", "k_proj", "v_proj"), family)
    group = twin.model.layers[0].lorakernels.fused.qkv
    assert list(group.members) == [attention.get_submodule(name) for name in names]
    assert group.call()[0].weight.shape == (64, 32)
    if family == "Llama":
        assert group.members[1].lora_A.data_ptr() > group.members[0].lora_A.data_ptr()
        assert group.joined.is_joined()
