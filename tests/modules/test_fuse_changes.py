# SPDX-License-Identifier: Apache-2.0
"""What changes around a fused layer after `fuse`: refused, or right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lorakernels import DelayedScaling, fuse, group_projections, unfuse
from tests.modules.fused_models import ATTENTION, LINEARS, VOCABULARY, adapted, run, same_within

FP32 = 64 * 2.0**-24  # two orders of fp32 sums, as in test_fuse.py


def tokens(length: int = 12) -> Tensor:
    return torch.randint(VOCABULARY, (2, length))


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


def test_fsdp_s_memory_is_refused() -> None:
    model = adapted()
    fuse(model)
    member = layer_of(model).self_attn.q_proj
    member._is_fsdp_managed_module = True
    run(model, tokens())  # as long as nothing has moved, nothing is wrong
    member.weight.data = member.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"q_proj is managed by FSDP.*unfuse"):
        run(model, tokens())


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3"])
def test_packed_sequences_longer_than_the_sliding_window_are_refused(family: str) -> None:
    options = {} if family == "Mistral" else {"use_sliding_window": True, "max_window_layers": 0}
    model = adapted(family, model={"sliding_window": 4, **options})
    fuse(model)
    layer, rotary = layer_of(model), model.model.rotary_emb
    h = torch.randn(1, 8, 32)
    angles = rotary(h, torch.arange(8)[None])
    for ends, refused in (([0, 4, 8], False), ([0, 8, 8], True)):
        starts = torch.tensor(ends, dtype=torch.int32)
        longest = int(starts.diff().max())
        packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest}
        if refused:
            with pytest.raises(ValueError, match="up to 8 tokens need a sliding window of 4"):
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
def test_a_weight_written_before_backward_is_noticed(save: str, name: str) -> None:
    model = adapted()
    fuse(model, save=save)
    embedded = torch.randn(1, 6, 32, requires_grad=True)
    loss = model(inputs_embeds=embedded, use_cache=False).logits.sum()
    with torch.no_grad():
        layer_of(model).get_submodule(name)._parameters["weight"].mul_(2)
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


def test_a_fused_model_is_not_grouped_again() -> None:
    model = adapted()
    fuse(model)
    with pytest.raises(ValueError, match="is fused, and groups its projections by itself"):
        group_projections(model, [("q_proj", "k_proj", "v_proj")])
    unfuse(model)
    assert group_projections(model, [("q_proj", "k_proj", "v_proj")])


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
