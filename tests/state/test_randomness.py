# SPDX-License-Identifier: Apache-2.0
"""What dropout promises: one mask per call, recomputed, reproduced, restored, sharded and replayed."""

from __future__ import annotations

import copy
import io
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lorakernels import (
    LoRAConfig,
    LoRALinear,
    PhiloxState,
    PhiloxStates,
    apply_lora,
    model_parallel_states,
)
from lorakernels.numerics.dropout import drawn_mask, dropout_keep
from lorakernels.values import Dropout

# One call, one mask

K = 16  # inputs 2⁰ … 2¹⁵, so that the sum of those kept spells the mask out, exactly


def unit_layer(rng_state=None, site=0, device="cpu"):
    """y = D(x) · 1, p = 1/2: a kept x counts twice."""
    config = LoRAConfig(r=1, lora_alpha=1, lora_dropout=0.5, fp8=None)
    layer = LoRALinear(K, 1, False, config, device=device)
    with torch.no_grad():
        layer.weight.zero_()
        layer.lora_A.fill_(1)
        layer.lora_B.fill_(1)
    layer.rng_state, layer.site = rng_state, site
    return layer


def powers(device="cpu", rows=8):
    x = 2.0 ** torch.arange(K, device=device)
    return x.expand(rows, K).clone().requires_grad_()


def spelled(y):
    """bool [rows, K]: the mask of y = D(powers) · 1."""
    return (y.detach() / 2).long() >> torch.arange(K, device=y.device) & 1 == 1


def forward_mask(layer, device="cpu"):
    return spelled(layer(powers(device)))


def forked(states):
    return states.fork() if isinstance(states, PhiloxStates) else nullcontext()


def no_state(device):
    return None


def one_state(device):
    return PhiloxState(3, device)


def named_states(device):
    return model_parallel_states(3, tensor_parallel_rank=1, device=device)


STATES = pytest.mark.parametrize(
    "make_state",
    [no_state, one_state, named_states],
    ids=["torch's generator", "PhiloxState", "PhiloxStates"],
)


@STATES
def test_backward_sees_the_forwards_mask_with_microbatches_in_flight(make_state, device):
    state = make_state(device)
    layer = unit_layer(state, device=device)
    xs = [powers(device) for _ in range(3)]
    ys = []
    for x in xs:
        with forked(state):
            ys.append(layer(x))
    if isinstance(state, PhiloxState):
        state.advance()  # what is in flight keeps its slot
    masks = [spelled(y) for y in ys]
    for x, y, mask in reversed(list(zip(xs, ys, masks, strict=True))):
        layer.lora_A.grad = None
        y.sum().backward()
        assert torch.equal(x.grad, 2.0 * mask)
        assert torch.equal(layer.lora_A.grad, 2.0 * (mask * x.detach()).sum(0, keepdim=True))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(masks, 2))


class Blocks(nn.Module):
    """Three adapted blocks; each forks, where there is something to fork, inside of what is recomputed."""

    def __init__(self, state):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        config = LoRAConfig(r=4, lora_dropout=0.3, target_modules=r"layers\.\d")
        apply_lora(self, config, rng_state=state)
        for layer in self.layers:
            nn.init.normal_(layer.lora_B, std=0.2)
        self.state = state

    def forward(self, x, how):
        for layer in self.layers:

            def block(x, layer=layer):
                with forked(layer.rng_state):
                    return torch.tanh(layer(x))

            x = block(x) if how is None else checkpoint(block, x, **how)
        return x


def advance(state):
    for one in state.get_states().values() if isinstance(state, PhiloxStates) else [state]:
        one.advance()


def gradients(net, how, device):
    """Of the third step, each of two microbatches in flight and one advance."""
    net = copy.deepcopy(net)
    torch.manual_seed(7)
    for _ in range(3):
        net.zero_grad()
        xs = [torch.randn(6, 32, device=device, requires_grad=True) for _ in range(2)]
        for loss in [net(x, how).pow(2).sum() for x in xs]:
            loss.backward()
        advance(net.state)
    trained = (parameter for parameter in net.parameters() if parameter.requires_grad)
    return torch.cat([t.grad.flatten() for t in (*trained, *xs)])


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize(
    "make_state", [one_state, named_states], ids=["PhiloxState", "PhiloxStates"]
)
def test_recomputation_sees_the_same_masks(make_state, reentrant, device):
    net = Blocks(make_state(device)).to(device)
    plain = gradients(net, None, device)
    assert torch.equal(gradients(net, {"use_reentrant": reentrant}, device), plain)
    unlike = {"use_reentrant": reentrant, "preserve_rng_state": False}
    assert not torch.equal(gradients(net, unlike, device), plain)


# Reproduced, saved, restored


@STATES
def test_manual_seed_reproduces_a_run(make_state, device):
    def run(seed):
        torch.manual_seed(seed)
        state = make_state(device)
        layer, found = unit_layer(state, device=device), []
        for _ in range(2):
            with forked(state):
                found.append(forward_mask(layer, device))
        return torch.stack(found)

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


def test_seed_offset_and_site_each_matter():
    def draw(seed=1, steps=0, site=0):
        state = PhiloxState(seed)
        state.advance(steps)
        torch.manual_seed(0)
        return forward_mask(unit_layer(state, site))

    assert torch.equal(draw(), draw())
    for other in (draw(seed=2), draw(steps=1), draw(site=1)):
        assert not torch.equal(draw(), other)


def steps(state, n, device):
    layer, found = unit_layer(state, device=device), []
    for _ in range(n):
        with forked(state):
            found.append(forward_mask(layer, device))
        if state is not None:
            advance(state)
    return found


@STATES
def test_a_restored_run_draws_what_an_uninterrupted_one_does(make_state, device):
    state, file = make_state(device), io.BytesIO()
    steps(state, 2, device)
    saved = {"states": state.state_dict() if state else None, "cpu": torch.get_rng_state()}
    if device.type == "cuda":
        saved["cuda"] = torch.cuda.get_rng_state()
    torch.save(saved, file)
    expected = steps(state, 3, device)

    file.seek(0)
    found = torch.load(file)
    torch.manual_seed(123)
    restored = make_state(device)
    if restored:
        restored.load_state_dict(found["states"])
    torch.set_rng_state(found["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"])
    for ours, theirs in zip(steps(restored, 3, device), expected, strict=True):
        assert torch.equal(ours, theirs)


# Sharded tensors

DRAWS = [dropout_keep, drawn_mask]
SHARES = (13, 8, 30, 1)  # rows or columns of each rank: most boundaries are inside a group of 8


@pytest.mark.parametrize("draw", DRAWS, ids=["torch", "csrc"])
@pytest.mark.parametrize("dim", [0, 1], ids=["row-sharded", "column-sharded"])
def test_shards_drawn_by_their_ranks_are_the_full_mask(draw, dim, device):
    size = [21, 21]
    size[dim] = sum(SHARES)
    shards = []
    for rank, share in enumerate(SHARES):
        states = model_parallel_states(9, tensor_parallel_rank=rank, device=device).get_states()
        torch.manual_seed(0)  # the ranks' CPU generators agree
        slot = states["data-parallel-rng"].slot()
        shape, origin = list(size), [0, 0]
        shape[dim], origin[dim] = share, sum(SHARES[:rank])
        shards.append(draw(Dropout(slot, 0.4, 3, *origin), *shape))
    assert torch.equal(torch.cat(shards, dim), dropout_keep(Dropout(slot, 0.4, 3), *size))


# Graphs


@pytest.mark.gpu
@pytest.mark.parametrize("draw", DRAWS, ids=["torch", "csrc"])
def test_each_replay_draws_what_eager_would_from_the_same_state(draw):
    state = PhiloxState(5, "cuda")
    address = state.tensor.data_ptr()

    def region():
        """Two microbatches of one site, then the end of the iteration."""
        masks = [draw(Dropout(state.slot(), 0.5, 2), 33, 70) for _ in range(2)]
        state.advance()
        return torch.stack(masks)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        region()
    torch.cuda.synchronize()
    start = state.state_dict()
    torch.manual_seed(3)  # the nonces that the graph freezes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = region()

    def replays():
        found = []
        for _ in range(4):
            graph.replay()
            found.append(captured.clone())
        return torch.cat(found)

    replayed = replays()
    assert state.tensor.tolist() == [5, 1 + 4] and state.tensor.data_ptr() == address
    state.load_state_dict(start)
    eager = []
    for _ in range(4):
        torch.manual_seed(3)
        eager.append(region())
    assert torch.equal(replayed, torch.cat(eager))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(replayed, 2))
    state.load_state_dict(start)  # restored in place: the graph goes on from there
    assert torch.equal(replays(), replayed) and state.tensor.data_ptr() == address


@pytest.mark.gpu
def test_slots_and_steps_never_wait_for_the_device():
    state = PhiloxState(5, "cuda")
    state.slot()
    torch.cuda.set_sync_debug_mode("error")
    try:
        slot = state.slot()
        state.advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert slot[1] == 0 and state.tensor.tolist() == [5, 1]
