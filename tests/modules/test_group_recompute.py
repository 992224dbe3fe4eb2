# SPDX-License-Identifier: Apache-2.0
"""LoRALinearGroup under checkpoints, in transformers' Llama and under torch.compile."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lorakernels import DelayedScaling, LoRAConfig, PhiloxState, apply_lora, group_projections
from lorakernels.modules import lora_modules
from tests.modules.grouped_models import (
    BLOCKS,
    MODE_IDS,
    MODES,
    NAMES,
    gradients,
    grouped,
    one_group,
    quantizations,
)


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("rng", [None, 5], ids=["torch's generator", "PhiloxState"])
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize("fp8", [DelayedScaling(), BLOCKS], ids=["delayed", "blocks"])
def test_checkpointed_layers_give_the_same_bits(fp8, mode, rng, reentrant, device):
    state = None if rng is None else PhiloxState(rng, device)
    m, _, _ = grouped(mode, rng_state=state, fp8=fp8)
    m = m.to(device)
    again = copy.deepcopy(m)
    x = torch.randn(6, 32, device=device, requires_grad=True)
    expected = gradients(m, x)
    recomputed = nn.Sequential(*(Checkpointed(layer, reentrant) for layer in again))
    torch.manual_seed(5)
    x.grad = None
    for _ in range(2):
        recomputed(x).pow(2).sum().backward()
    found = {n: p.grad for n, p in again.named_parameters() if p.requires_grad} | {"x": x.grad}
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    assert all(layer.q_proj.group._entry is None for layer in again)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_projections_checkpointed_one_by_one(mode, reentrant):
    """Equal to the same without checkpoints; or refused, as one function cannot draw again what another drew."""
    m, _, _ = grouped(mode, layers=1)
    again = copy.deepcopy(m)
    x = torch.randn(6, 32, requires_grad=True)
    for name in NAMES:
        setattr(again[0], name, Checkpointed(getattr(again[0], name), reentrant))
    if mode == (0.3, True):
        if reentrant:
            with pytest.raises(
                RuntimeError, match="would draw the group's mask in a recomputation"
            ):
                again(x).sum().backward()
        else:  # then each draws its own
            again(x).sum().backward()
        return
    torch.manual_seed(5)
    again(x).pow(2).sum().backward()
    dx = x.grad.clone()
    expected = gradients(m, x, 1)
    # without dropout the down-projections are stacked alike; only the order in which autograd adds may differ
    torch.testing.assert_close(dx, expected["x"], rtol=1e-5, atol=1e-5)
    for name in NAMES:
        inner = getattr(again[0], name).inner
        for key in ("lora_A", "lora_B"):
            exact = expected[f"0.{name}.{key}"]
            torch.testing.assert_close(getattr(inner, key).grad, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fp8", [DelayedScaling(), BLOCKS, None], ids=["fp8", "blocks", "plain"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "gradient checkpointing"])
def test_a_llama_as_transformers_writes_it(fp8, recompute, device):
    """Two groups per layer, one quantization each; with masks apart loss and gradients are those without groups."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(device)
    config = LoRAConfig(r=4, lora_dropout=0.1, target_modules="all-linear", fp8=fp8)
    apply_lora(llama, config)
    for layer in lora_modules(llama).values():
        nn.init.normal_(layer.lora_B, std=0.05)
    llama.train()
    if recompute:
        llama.gradient_checkpointing_enable({"use_reentrant": False})
    twin = copy.deepcopy(llama)
    groups = group_projections(twin, [NAMES, ("gate_proj", "up_proj")])
    assert len(groups) == 4
    ids = torch.randint(0, 64, (2, 12), device=device)
    results = []
    for m in (llama, twin):
        torch.manual_seed(2)
        for _ in range(2):
            loss = m(input_ids=ids, labels=ids).loss
            loss.backward()
        results.append({n: p.grad for n, p in m.named_parameters() if p.requires_grad} | {"": loss})
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
    if fp8 and not recompute:
        counts = [quantizations(lambda m=m: m(input_ids=ids)) for m in (llama, twin)]
        # a layer that is in no group finds the scales of blocks in quantize_lora_down
        assert counts == ([0, 2 * 2] if fp8 is BLOCKS else [2 * 7, 2 * 4])
    assert all(group._entry is None for group in groups)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[:2], ids=MODE_IDS[:2])
@pytest.mark.parametrize("fp8", [DelayedScaling(), BLOCKS], ids=["delayed", "blocks"])
def test_compiles_without_a_graph_break(fp8, mode):
    """`group(x)` shares under torch.compile; members called one by one are traced apart, each quantizing x."""
    layer, group = one_group(mode, fp8=fp8)
    slot = torch.tensor([11, 12])
    x = torch.randn(5, 32)
    calls = {"group(x)": group, "members": lambda x: [getattr(layer, n)(x) for n in NAMES]}
    results = []
    given = {name: lambda *_: slot.clone() for name in ("draw_slot", "traced_slot")}
    with (
        mock.patch("lorakernels.modules.group.layer.traced_slot", given["traced_slot"]),
        mock.patch.multiple("lorakernels.modules.linear.lora", **given),
    ):
        for call in (
            *calls.values(),
            *(torch.compile(c, fullgraph=True, backend="aot_eager") for c in calls.values()),
        ):
            layer.zero_grad()
            if layer.q_proj.fp8_state is not None:
                layer.q_proj.fp8_state.reset()
            xs = x.clone().requires_grad_()
            ys = call(xs)
            sum(y.sum() for y in ys).backward()
            results.append([*(y.detach() for y in ys), xs.grad, layer.q_proj.lora_A.grad.clone()])
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
