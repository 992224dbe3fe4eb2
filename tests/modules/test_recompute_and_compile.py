# SPDX-License-Identifier: Apache-2.0
"""torch.utils.checkpoint and torch.compile around LoRALinear."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lorakernels import (
    BlockScaling,
    DelayedScaling,
    LoRAConfig,
    PhiloxState,
    PhiloxStates,
    apply_lora,
)
from lorakernels.modules.linear import calls as calls_module


class Net(nn.Module):
    def __init__(self, p=0.1, fp8=DelayedScaling(), rng_state=None):  # noqa: B008  (frozen)
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        config = LoRAConfig(r=4, lora_dropout=p, target_modules=r"layers\.\d", fp8=fp8)
        self.report = apply_lora(self, config, rng_state=rng_state)
        for layer in self.layers:
            nn.init.normal_(layer.lora_B, std=0.2)
        self.how, self.recomputed = None, range(3)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            block = lambda t, layer=layer: torch.tanh(layer(t))  # noqa: E731
            plain = self.how is None or i not in self.recomputed
            x = block(x) if plain else checkpoint(block, x, **self.how)
        return x


def gradients(net, how, device, steps=3):
    """Two microbatches in flight per step; every gradient of the last step, and the FP8 state."""
    net = copy.deepcopy(net)
    net.how = how
    torch.manual_seed(7)
    for _ in range(steps):
        net.zero_grad()
        xs = [torch.randn(6, 32, device=device, requires_grad=True) for _ in range(2)]
        losses = [net(x).pow(2).sum() for x in xs]
        for loss in losses:
            loss.backward()
    found = {n: p.grad for n, p in net.named_parameters() if p.requires_grad}
    found |= {f"x{i}": x.grad for i, x in enumerate(xs)}
    state = net.layers[0].fp8_state
    if state is not None:
        found |= {"forward": state.forward, "backward": state.backward}
    return found


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("rng", [None, 5], ids=["torch's generator", "PhiloxState"])
@pytest.mark.parametrize(
    "fp8", [DelayedScaling(), BlockScaling(), None], ids=["fp8", "blocks", "plain"]
)
def test_checkpointing_gives_the_same_bits(reentrant, rng, fp8, device):
    state = None if rng is None else PhiloxState(rng, device)
    net = Net(fp8=fp8, rng_state=state).to(device)
    plain = gradients(net, None, device)
    recomputed = gradients(net, {"use_reentrant": reentrant}, device)
    assert plain.keys() == recomputed.keys()
    for name, value in plain.items():
        assert torch.equal(value, recomputed[name]), name


def test_the_test_above_would_see_another_mask(device):
    net = Net().to(device)
    plain = gradients(net, None, device)
    other = gradients(net, {"use_reentrant": False, "preserve_rng_state": False}, device)
    assert not torch.equal(plain["layers.0.lora_A"], other["layers.0.lora_A"])


def test_forking_outside_of_a_checkpoint_is_refused_not_wrong():
    states = PhiloxStates()
    states.add("tp", 1)
    net = Net(rng_state=states)
    x = torch.randn(6, 32, requires_grad=True)
    with states.fork("tp"):
        y = checkpoint(net.layers[0], x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="fork inside the checkpointed function"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_recomputed_layer_does_not_take_the_lead(reentrant, device):
    """The update stays at the first layer's forward: made later, it would leave that layer a stale scale."""
    net = Net(0.0).to(device)
    expected = gradients(net, None, device)
    net.recomputed = [1]
    found = gradients(net, {"use_reentrant": reentrant}, device)
    for name in ("forward", "backward"):
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.slow
def test_recomputing_a_compiled_layer_updates_no_scales():
    net = Net(0.0)
    torch._dynamo.reset()
    compiled = [torch.compile(layer, fullgraph=True) for layer in net.layers]
    plain, state = copy.deepcopy(net), net.layers[0].fp8_state
    for _ in range(3):
        x = torch.randn(6, 32, requires_grad=True)
        y, z = x, x.detach().requires_grad_()
        for layer in compiled:
            y = torch.tanh(checkpoint(layer, y, use_reentrant=True))
        y.sum().backward()
        plain(z).sum().backward()
    # one roll per step, as in the eager run without checkpointing; the values differ by how the sums are compiled
    other = plain.layers[0].fp8_state
    for found, expected in ((state.forward, other.forward), (state.backward, other.backward)):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("fp8", [DelayedScaling(), None], ids=["fp8", "plain"])
def test_compiles_without_a_graph_break(p, fp8):
    """fullgraph, forward and backward. The values are eager's, with the mask given: the ops stay whole in the graph."""
    net = Net(p, fp8)
    slot = torch.tensor([11, 12])
    torch._dynamo.reset()
    results = []
    drawn = {name: lambda *_: slot.clone() for name in ("draw_slot", "traced_slot")}
    with mock.patch.multiple(calls_module, **drawn):
        for run in (net, torch.compile(copy.deepcopy(net), fullgraph=True)):
            torch.manual_seed(3)
            for _ in range(3):
                x = torch.randn(6, 32, requires_grad=True)
                run.zero_grad()
                y = run(x)
                y.sum().backward()
            results.append((y, x.grad, run.layers[0].lora_A.grad, run.layers[2].lora_B.grad))
            state = run.layers[0].fp8_state
            if state is not None:
                assert (state.forward[-1] > 0).all() and (state.backward[-1] > 0).all()
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_compiled_layer_draws_new_masks():
    layer = Net(0.5, None).layers[0]
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(6, 32)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
