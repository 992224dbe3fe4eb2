# SPDX-License-Identifier: Apache-2.0
"""The three nodes of a fused decoder layer: what they run, what they compute, what they keep and for whom."""

from __future__ import annotations

import sys
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lorakernels import DelayedScaling, LoRAConfig, LoRALinear, fuse, ops
from lorakernels.autograd.linear import linear
from lorakernels.fusion.group import FusedGroup
from tests.fusion.fused_models import ATTENTION, LINEARS, PACKINGS, adapted, fp8_state

# No kernel: memory, views, bookkeeping; attention's own
FREE = {
    *("empty", "new_empty", "empty_like", "empty_strided", "view", "_unsafe_view", "detach"),
    *("split", "split_with_sizes", "transpose", "expand", "alias", "as_strided", "t", "slice"),
    *("unsqueeze", "select", "permute", "reshape", "lift_fresh", "unbind", "_reshape_alias"),
}


class Launches(TorchDispatchMode):
    """How often each op ran; those that lorakernels' ops are made of on a CPU do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.inside = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if not self.inside and name not in FREE:
            self.counts[name] += 1
        self.inside += 1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.inside -= 1


def layer_and_input(save="recompute", **options):
    model = adapted(fp8=DelayedScaling(), dtype=torch.bfloat16, **options)
    report = fuse(model, save=save)
    layer = model.model.layers[0]
    h = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    angles = model.model.rotary_emb(h, torch.arange(16)[None])
    layer(h, position_embeddings=angles)  # joins
    fp8_state(layer).reduce_and_update()
    return report, layer, h, angles


@pytest.mark.parametrize("family", PACKINGS)
def test_a_layer_runs_these_ops_and_no_others(family: str) -> None:
    """LoRA on q, k, v, o without dropout. At 1024 tokens each launch is half a percent of the layer's time.

    A packed projection's B is one matrix already.
    """
    _, layer, h, angles = layer_and_input(family=family)
    packed = family == "Phi3"
    with Launches() as forward:
        out = layer(h, position_embeddings=angles)
    with Launches() as backward:
        torch.autograd.grad(out, [h, *(p for p in layer.parameters() if p.requires_grad)], out)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert forward.counts == {
        "rms_norm_quantize": 2,
        "quantize_lora_down": 2,  # s of q, k, v; x8 and s of o
        **({} if packed else {"block_diagonal": 1}),
        "fp8_linear_lora": 4,
        "rope_qkv_": 1,
        attention: 1,
        "swiglu_quantize": 1,
    }
    assert backward.counts == {
        "quantize_grad": 3,
        "fp8_grad_input": 4,
        "swiglu_quantize_grad": 1,
        "rms_norm_backward": 2,
        "lora_grad_a": 2,
        "rms_norm_quantize": 1,  # again, for dA of q, k, v
        **({} if packed else {"block_diagonal_parts": 1}),
        "rope_qkv_backward": 1,
        f"{attention}_backward": 1,
    }


def test_a_recomputed_layer_does_not_run_down_again() -> None:
    """Without adapters on down nothing reads what it would return."""
    _, layer, h, angles = layer_and_input(save="checkpoint")
    out = layer(h, position_embeddings=angles)
    with Launches() as backward:
        out.backward(out)
    assert backward.counts["fp8_linear_lora"] == 3 and not backward.counts["swiglu_quantize"]


def saved_names(layer, h, angles) -> list[set[str]]:
    """Of each node, the names of what it keeps, but for weights, which are kept by reference."""
    out = layer(h, position_embeddings=angles)
    names, todo, seen = [], [out.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "kept_names"):
            kept = zip(node.kept_names, node.saved_tensors, strict=True)
            names.append({n for n, t in kept if t is not None and "W" not in n})
        todo += [following for following, _ in node.next_functions]
    return names


def test_frozen_projections_keep_nothing() -> None:
    _, layer, h, angles = layer_and_input()
    mlp, output, qkv = saved_names(layer, h, angles)
    assert mlp == {"h", "norm", "rstd", "gate_up"}
    assert output == {"out", "s", "A0", "B0"}
    assert qkv == {"h", "norm", "rstd", "s", "B", *(f"{x}{i}" for x in "AB" for i in range(3))}


def test_only_what_is_asked_for_is_kept_and_computed() -> None:
    """Frozen adapters and an input without gradient: nothing. Frozen A: no x. Frozen B: no s."""
    _, layer, h, angles = layer_and_input(targets=LINEARS)
    frozen = h.detach()
    layer.requires_grad_(False)
    assert not layer(frozen, position_embeddings=angles).requires_grad
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    first = saved_names(layer, frozen, angles)[-1]
    assert first >= {"s", "A0"} and not first & {"h", "rstd", "x8"}
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("lora_A" in name)
    first = saved_names(layer, frozen, angles)[-1]
    assert first >= {"h", "B0"} and not first & {"s", "rstd"}
    trained = [p for p in layer.parameters() if p.requires_grad]
    out = layer(frozen, position_embeddings=angles)
    assert all(g is not None for g in torch.autograd.grad(out, trained, out))


def test_one_scale_serves_projections_of_very_different_weights() -> None:
    """Each keeps its own bytes and scale; dy's parts are multiplied so that one scale_inv is right for all."""
    base = [nn.Linear(32, n, bias=False) for n in (16, 8, 8)]
    config = LoRAConfig(r=2, lora_alpha=4)
    for one, size in zip(base, (1.0, 1e-3, 30.0), strict=True):
        nn.init.normal_(one.weight, std=size)
    members = [LoRALinear.from_linear(one, config, name=str(i)) for i, one in enumerate(base)]
    group = FusedGroup(members, True, len(members))
    call, _ = group.call()
    scales = torch.cat([m.weight_scale_inv for m in members])
    assert call.grad_scale_inv == scales.max()
    torch.testing.assert_close(call.multiplier * call.grad_scale_inv, scales)
    assert call.scale_inv is not None
    whole = call.weight.view(torch.float8_e4m3fn).float() * call.scale_inv[:, None]
    expected = torch.cat([m.dequantized_weight() for m in members])
    assert torch.equal(whole, expected)
    dy = torch.randn(4, 32)
    scaled = dy * call.multiplier.repeat_interleave(torch.tensor([16, 8, 8]))
    plain = call.weight.view(torch.float8_e4m3fn).float() * call.grad_scale_inv
    torch.testing.assert_close(scaled @ plain, dy @ expected)


@pytest.mark.parametrize("save", ["full", "recompute"])
def test_amaxes_are_of_one_pass(save: str) -> None:
    """A recomputation leaves x's amax alone, and a group's are in its first member's columns."""
    model = adapted(targets=LINEARS, fp8=DelayedScaling(amax_history_len=4), dtype=torch.bfloat16)
    fuse(model, save=save)
    layer = model.model.layers[0]
    state = layer.self_attn.q_proj.fp8_state
    h = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    angles = model.model.rotary_emb(h, torch.arange(16)[None])
    out = layer(h, position_embeddings=angles)
    before = state.forward.clone()
    out.backward(out)
    assert torch.equal(state.forward, before)
    owners = {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"}
    written = [name for name, amax in zip(state.names, state.backward[0], strict=True) if amax > 0]
    assert written == [f"model.layers.0.{name}" for name in ATTENTION_ORDER if name in owners]


ATTENTION_ORDER = [f"self_attn.{n}" for n in ATTENTION] + [f"mlp.{n}" for n in LINEARS[4:]]


@pytest.mark.parametrize("targets", [ATTENTION, ["q_proj", "v_proj"]], ids=["q k v o", "q v"])
def test_one_mask_and_a_compact_B_as_on_hopper(targets, monkeypatch) -> None:
    """There projections stand side by side in `quantize_grad`, whose mask the kernels behind it read. Sums run over
    fewer zeros: fp32's rounding apart, the gradients are those of the block diagonal."""

    def gradients(hopper: bool) -> tuple[Counter[str], int, list[torch.Tensor]]:
        torch.manual_seed(0)
        monkeypatch.setattr(
            sys.modules["lorakernels.ops.quantize_grad"],
            "PROJECTION_MULTIPLE",
            1 if hopper else 128,
        )
        monkeypatch.setattr(linear, "hands_mask_over", lambda *_: hopper)
        _, layer, h, angles = layer_and_input(targets=targets, lora_dropout=0.3)
        for name, parameter in layer.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
        torch.manual_seed(1)
        out = layer(h, position_embeddings=angles)
        trained = [h, *(p for p in layer.parameters() if p.requires_grad)]
        with (
            Launches() as backward,
            mock.patch.object(ops, "fp8_grad_input", wraps=ops.fp8_grad_input) as dx,
            mock.patch.object(ops, "quantize_grad", wraps=ops.quantize_grad) as dy8,
        ):
            found = torch.autograd.grad(out, trained, torch.ones_like(out))
        masks = [call.args[5] for call in dx.call_args_list]
        given = [mask is not None and mask.dropped is not None for mask in masks]
        adapted_inputs = 2 if "o_proj" in targets else 1
        assert sum(given) == (adapted_inputs if hopper else 0)
        drawn = sum(call.args[6] is not None for call in dy8.call_args_list)
        return backward.counts, drawn, list(found)

    plain, none_drawn, expected = gradients(False)
    counts, drawn, found = gradients(True)
    assert drawn == plain["lora_grad_a"] > 0 == none_drawn
    assert counts["quantize_grad"] == plain["quantize_grad"]
    # a sum that differs in fp32 may round ds to the next bf16, 2⁻⁸ off, and what is made of it once more
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7 * float(other.abs().max()))
