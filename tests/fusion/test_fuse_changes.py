# SPDX-License-Identifier: Apache-2.0
"""What changes around a fused layer after `fuse`: refused, or right."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from lorakernels import BlockScaling, DelayedScaling, disable_lora, fuse, unfuse
from lorakernels.recipes import Recipe
from tests.autograd.test_decoder_layer import Launches
from tests.fusion.fused_models import (
    ATTENTION,
    FP32,
    LINEARS,
    PACKINGS,
    adapted,
    difference,
    named,
    run,
    same_within,
    tokens,
)


def layer_of(model: nn.Module) -> nn.Module:
    return model.model.layers[0]


def test_biases_of_projections_without_adapters_are_still_trained() -> None:
    plain = adapted("Qwen2", ("o_proj",), bias="all")
    fused, x = copy.deepcopy(plain), tokens()
    before = {n: p for n, p in fused.named_parameters() if p.requires_grad}
    assert any("q_proj.bias" in name for name in before)
    fuse(fused)
    after = {n: p for n, p in fused.named_parameters() if p.requires_grad}
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)  # an optimizer may have them
    same_within(run(fused, x), run(plain, x), FP32)


@pytest.mark.parametrize(
    "fp8", [None, DelayedScaling(), BlockScaling()], ids=["plain", "FP8", "blocks"]
)
@pytest.mark.parametrize("target", ["q_proj", "o_proj", "up_proj", "down_proj"])
def test_every_bias_is_trained_wherever_an_adapter_is(target: str, fp8: Recipe | None) -> None:
    """Of projections beside it, before and behind it. Sums over tokens nearly cancel for q and k, whose bound has to be
    wider; FP8 rounds dy to 2^-3 of itself, so that there all biases are compared together."""
    sizes = {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 256,
    }
    biases = {"attention_bias": True, "mlp_bias": True, **(sizes if fp8 else {})}
    plain, x = adapted(targets=[target], model=biases, bias="all", fp8=fp8), tokens()
    fused = copy.deepcopy(plain)
    fuse(fused)
    expected, found = run(plain, x), run(fused, x)
    names = [name for name in expected if name.endswith(".bias")]
    assert len(names) == 2 * len(LINEARS) and found.keys() == expected.keys()
    if fp8 is None:
        same_within(found, expected, 16 * FP32)
        return
    together = [torch.cat([each[name] for name in names]) for each in (found, expected)]
    assert difference(*together) < 2.0**-2
    assert all(bool(found[name].any()) for name in names)


@pytest.mark.parametrize("keep", [False, True], ids=["dropped", "kept"])
def test_trained_biases_of_projections_without_adapters_show_their_first_values(keep: bool) -> None:
    """Inside disable_lora: fused, unfused while it is open, and fused once more."""
    model, x = adapted("Qwen2", ("o_proj",), bias="all"), tokens()
    names = [name for name, _ in model.named_parameters() if name.endswith("q_proj.bias")]
    first = {name: model.get_parameter(name).detach().clone() for name in names}
    fuse(model, keep_linears=keep)
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).add_(1.0)
        trained = model(x).logits
        with disable_lora(model):
            assert all(torch.equal(model.get_parameter(n), first[n]) for n in names)
            assert not torch.equal(model(x).logits, trained)
            unfuse(model)
            assert all(torch.equal(model.get_parameter(n), first[n]) for n in names)
        assert all(torch.equal(model.get_parameter(n), first[n] + 1.0) for n in names)
        fuse(model)
        assert torch.equal(model(x).logits, trained)
        with disable_lora(model):
            assert all(torch.equal(model.get_parameter(n), first[n]) for n in names)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_biases_written_through_data_are_seen(trained: bool) -> None:
    """They are one vector's parts, which no version counts; unfused each has memory of its own again."""
    plain = adapted("Qwen2", bias="all" if trained else "none")
    fused, x = copy.deepcopy(plain), tokens()
    fuse(fused)
    run(fused, x)
    for model in (plain, fused):
        for name, parameter in model.named_parameters():
            if name.endswith("k_proj.bias"):
                assert parameter.requires_grad == trained
                parameter.data.copy_(torch.arange(len(parameter)) / 4.0)
    same_within(run(fused, x), run(plain, x), FP32)
    unfuse(fused)
    attention = layer_of(fused).self_attn
    storages = {p.bias.untyped_storage().data_ptr() for p in (attention.q_proj, attention.k_proj)}
    assert len(storages) == 2
    same_within(run(fused, x), run(plain, x), FP32)


@pytest.mark.parametrize(
    "removed", [("q_proj",), ("q_proj", "k_proj", "v_proj")], ids=["one", "all"]
)
def test_a_bias_taken_away_adds_nothing(removed: tuple[str, ...]) -> None:
    plain = adapted("Qwen2")
    fused, x = copy.deepcopy(plain), tokens()
    fuse(fused)
    run(fused, x)
    for model in (plain, fused):
        for name in removed:
            getattr(layer_of(model).self_attn, name).bias = None
    same_within(run(fused, x), run(plain, x), FP32)


@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "fp8"])
def test_a_narrower_input_is_widened_as_the_norms_do(fp8: DelayedScaling | None) -> None:
    """bf16 into an fp32 model: transformers' norm multiplies by an fp32 weight, and all after it is fp32."""
    plain = adapted(fp8=fp8)
    fused = copy.deepcopy(plain)
    fuse(fused)
    h = torch.randn(2, 8, 32).bfloat16()
    angles = plain.model.rotary_emb(h.float(), torch.arange(8)[None])
    found, expected = (
        layer_of(m)(h, position_embeddings=angles, attention_mask=None) for m in (fused, plain)
    )
    assert found.dtype == expected.dtype == torch.float32
    # the plain layer's norm rounds x / rms to bf16 on its way, to 2^-9 of itself; FP8 to 2^-4 instead
    assert (found - expected).norm() < (2.0**-8 if fp8 is None else 2.0**-4) * (expected - h).norm()


@pytest.mark.parametrize("wide", ["input_layernorm", "post_attention_layernorm"])
def test_one_wide_norm_widens_what_leaves_the_layer(wide: str) -> None:
    plain = adapted(targets=LINEARS, fp8=DelayedScaling(), dtype=torch.bfloat16)
    layer_of(plain).get_submodule(wide).float()
    fused = copy.deepcopy(plain)
    fuse(fused)
    h = torch.randn(2, 8, 32).bfloat16()
    angles = plain.model.rotary_emb(h, torch.arange(8)[None])
    found, expected = (
        layer_of(m)(h, position_embeddings=angles, attention_mask=None) for m in (fused, plain)
    )
    assert found.dtype == expected.dtype == torch.float32
    assert (found - expected).norm() < 2.0**-3 * (expected - h).norm()  # FP8, as above, and bf16


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("family", PACKINGS)
def test_the_last_norm_is_one_kernel_each_way(family: str, trained: bool) -> None:
    plain = adapted(family, modules_to_save=["model.norm"] if trained else [])
    plain.model.norm.weight.data.uniform_(0.5, 2.0)
    fused, x = copy.deepcopy(plain), tokens()
    kind = type(plain.model.norm)
    fuse(fused)
    copied = pickle.loads(pickle.dumps(fused))  # and deepcopy
    for each in (fused, copied, copy.deepcopy(fused)):
        assert type(each.model.norm).__name__ == f"Fused{kind.__name__}"
        expected = run(plain, x)
        assert ("model.norm.weight" in expected) == trained
        same_within(run(each, x), expected, FP32)
    h = torch.randn(2, 3, 32, requires_grad=True)
    with Launches() as forward:
        y = fused.model.norm(h)
    wanted = [h, *(p for p in fused.model.norm.parameters() if p.requires_grad)]
    with Launches() as backward:
        torch.autograd.grad(y, wanted, y.detach())
    assert forward.counts == {"rms_norm_quantize": 1} and backward.counts == {
        "rms_norm_backward": 1
    }
    mixed = h.detach().bfloat16()
    assert torch.equal(fused.model.norm(mixed), plain.model.norm(mixed))
    unfuse(fused)
    assert type(fused.model.norm) is kind
    same_within(run(fused, x), run(plain, x), FP32)


def test_memory_that_fsdp_manages_is_refused_for_weights_and_copied_for_adapters() -> None:
    model, x = adapted(), tokens()
    fuse(model)
    expected = run(model, x)
    member = layer_of(model).self_attn.q_proj
    member._is_fsdp_managed_module = True
    member.weight.data = member.weight.data.clone()  # FSDP ignores it: it is the member's own
    same_within(run(model, x), expected, 0.0)
    for _ in range(2):  # as FSDP puts another in the place of a shard
        member._parameters["lora_A"] = nn.Parameter(member.lora_A.detach().clone())
        same_within(run(model, x), expected, 0.0)
    member._parameters["weight"] = nn.Parameter(member.weight.detach().clone(), False)
    with pytest.raises(RuntimeError, match=r"weight or bias of .*q_proj is managed by FSDP"):
        run(model, x)


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3", "Phi3", "SmolLM3"])
def test_packed_sequences_longer_than_the_sliding_window_are_refused(family: str) -> None:
    qwen = {"use_sliding_window": True, "max_window_layers": 0}
    smol = {"use_sliding_window": True, "no_rope_layers": [0, 1]}
    options = {"Qwen2": qwen, "Qwen3": qwen, "SmolLM3": smol}.get(family, {})
    model = adapted(family, model={"sliding_window": 4, **options})
    fuse(model)
    layer, rotary = layer_of(model), model.model.rotary_emb
    h = torch.randn(1, 8, 32)
    angles = rotary(h, torch.arange(8)[None])
    for ends, refused in (([0, 4, 8], False), ([0, 5, 8], True)):
        starts = torch.tensor(ends, dtype=torch.int32)
        longest = int(starts.diff().max())
        packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest}
        if refused:
            with pytest.raises(ValueError, match="up to 5 tokens need a sliding window of 4"):
                layer(h, position_embeddings=angles, **packed)
        else:
            layer(h, position_embeddings=angles, **packed)


def test_angles_of_other_positions_are_refused() -> None:
    model = adapted()
    fuse(model)
    h = torch.randn(4, 8, 32)
    for shape in ((1, 4), (2, 8)):
        angles = (torch.ones(*shape, 8), torch.ones(*shape, 8))
        with pytest.raises(
            ValueError, match=r"cos of position_embeddings must be \[1 or 4, 8, D\]"
        ):
            layer_of(model)(h, position_embeddings=angles)


@pytest.mark.parametrize("save", ["full", "recompute", "fp8"])
@pytest.mark.parametrize("name", ["self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"])
@pytest.mark.parametrize("family", PACKINGS)
def test_a_weight_written_before_backward_is_noticed(family: str, save: str, name: str) -> None:
    model = adapted(family)
    fuse(model, save=save)
    embedded = torch.randn(1, 6, 32, requires_grad=True)
    loss = model(inputs_embeds=embedded, use_cache=False).logits.sum()
    with torch.no_grad():
        owner, _, leaf = name.rpartition(".")
        path = f"{owner}.{named((leaf,), family)[0]}"
        layer_of(model).get_submodule(path)._parameters["weight"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_adapters_that_no_longer_fit_one_mask_are_refused() -> None:
    model = adapted(lora_dropout=0.1)
    fuse(model)
    layer_of(model).self_attn.k_proj.lora_dropout = 0.0
    with pytest.raises(ValueError, match=r"must have one lora_dropout, found \{.*k_proj': 0.0"):
        run(model, tokens())
    layer_of(model).self_attn.k_proj.lora_dropout = 0.1
    layer_of(model).self_attn.v_proj.eval()
    with pytest.raises(RuntimeError, match=r"must be in one mode, found \{.*v_proj': 'eval'"):
        run(model, tokens())


@pytest.mark.parametrize("off", [("q_proj",), ("v_proj",), ATTENTION], ids=len)
def test_a_scaling_of_zero(off: tuple[str, ...]) -> None:
    plain = adapted()
    for layer in plain.model.layers:
        for name in off:
            getattr(layer.self_attn, name).scaling = 0.0
    fused, x = copy.deepcopy(plain), tokens()
    fuse(fused)
    same_within(run(fused, x), run(plain, x), FP32)


@pytest.mark.parametrize("changed", [("o_proj",), ("k_proj",), LINEARS], ids=len)
@pytest.mark.parametrize("family", PACKINGS)
def test_a_scaling_changed_after_a_forward_is_that_of_the_next(
    family: str, changed: tuple[str, ...]
) -> None:
    """Again and again, to and from zero; of a projection alone, of one in a group, and of all."""
    plain, x = adapted(family, LINEARS), tokens()
    fused = copy.deepcopy(plain)
    fuse(fused)
    for scaling in (None, 3.0, 0.0, 0.5):
        for model in (plain, fused) if scaling is not None else ():
            for path, module in model.named_modules():
                if path.endswith(named(changed, family)):
                    module.scaling = scaling
        same_within(run(fused, x), run(plain, x), FP32)


@pytest.mark.parametrize("how", ["FP8State", "state_dict"])
def test_the_history_of_an_unfused_model_s_dy_is_not_a_fused_one_s(how: str) -> None:
    """q's dy is 1000 times smaller than v's: by its scale alone, v's gradient would saturate."""
    plain = adapted("Llama", LINEARS, fp8=DelayedScaling(amax_history_len=4))
    x = tokens()
    for layer in plain.model.layers:
        layer.self_attn.q_proj._parameters[
            "weight"
        ].zero_()  # no scores, so no gradient for q and k
        layer.self_attn.q_proj.lora_B.data.mul_(1e-3)
    state = layer_of(plain).self_attn.q_proj.fp8_state
    for _ in range(2):
        run(plain, x)
        state.reduce_and_update()
    fused = copy.deepcopy(plain)
    fuse(fused)
    mine = layer_of(fused).self_attn.q_proj.fp8_state
    if how == "FP8State":
        mine.load_state_dict(state.state_dict())
    else:
        fused.load_state_dict(plain.state_dict())
    expected, found = run(plain, x), run(fused, x)
    # both round dy to e5m2: 2^-3 of each gradient at most
    same_within(found, expected, 2.0**-3)
    again = copy.deepcopy(fused)
    layer_of(again).self_attn.q_proj.fp8_state.load_state_dict(mine.state_dict())
    assert torch.equal(layer_of(again).self_attn.q_proj.fp8_state.backward, mine.backward)


def test_what_is_derived_stays_where_a_captured_graph_reads_it() -> None:
    """Writing scales back, as a capture does, makes the next forward derive anew: into the same memory."""
    model, x = adapted(fp8=DelayedScaling()), tokens()
    twin = copy.deepcopy(model)
    for one in (model, twin):
        fuse(one)
        run(one, x)
    groups = layer_of(model).lorakernels.fused.groups

    def derived() -> list[Tensor]:
        found = [t for g in groups for t in g.joined.derived if t is not None]
        return found + [factors for g in groups for factors in g.joined.factors.values()]

    before = derived()
    assert len(before) > 8
    for factor in (1.0, 2.0):
        for one in (model, twin):
            for name, buffer in one.named_buffers():
                if name.endswith("k_proj.weight_scale_inv"):
                    buffer.mul_(factor)
        with torch.no_grad():
            model.eval()(x)
        model.train()
        assert {id(t) for t in before} <= {id(t) for t in derived()}
    for group in layer_of(twin).lorakernels.fused.groups:
        group.forget()  # what it would derive for the first time
    found, expected = run(model, x), run(twin, x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
