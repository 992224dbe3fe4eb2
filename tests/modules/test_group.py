# SPDX-License-Identifier: Apache-2.0
"""LoRALinearGroup: when an input is shared and when not, as any program of calls sees it; what is kept of it."""

from __future__ import annotations

import copy
import gc
import weakref
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lorakernels import DelayedScaling, FrozenFP8Linear, group_projections, ops
from lorakernels.modules.linear.projections import share_state
from lorakernels.state.handles import numbers_of
from tests.modules.grouped_models import (
    BLOCKS,
    MODE_IDS,
    MODES,
    NAMES,
    Counted,
    model,
    one_group,
    quantizations,
)


@pytest.mark.parametrize(
    ("mode", "down"),
    [(MODES[0], 0), (MODES[1], 2), (MODES[2], 0)],
    ids=MODE_IDS,
)
@pytest.mark.parametrize("how", ["members", "group(x)"])
def test_how_often_each_op_runs(mode, down, how):
    """With masks apart the first member's pass over x quantizes too, and the others' only multiply."""
    layer, group = one_group(mode)
    x = torch.randn(5, 32)
    with Counted() as calls:
        ys = group(x) if how == "group(x)" else [getattr(layer, n)(x) for n in NAMES]
        sum(y.sum() for y in ys).backward()
    expected = {"quantize": 1, "fp8_linear_lora": 3, "quantize_grad": 3, "lora_grad_a": 3}
    assert calls == expected | ({"quantize_lora_down": down} if down else {})
    assert group._entry is None


@pytest.mark.parametrize("how", ["members", "group(x)"])
def test_blocks_are_quantized_once_for_all(how):
    """x once, in a pass of its own; its adapters' products are one where there is one mask. dy is with dB's sums."""
    layer, group = one_group(fp8=BLOCKS)
    x = torch.randn(5, 32, requires_grad=True)
    with Counted() as calls:
        ys = group(x) if how == "group(x)" else [getattr(layer, n)(x) for n in NAMES]
        sum(y.sum() for y in ys).backward()
    expected = {"quantize_lora_down": 1, "fp8_linear_lora": 3}
    assert calls == expected | {"quantize": 1, "quantize_grad": 3, "lora_grad_a": 3}
    assert group._entry is None


def test_only_the_same_tensor_in_the_same_mode_is_shared():
    layer, group = one_group()
    q, k, v = (getattr(layer, name) for name in NAMES)
    x = torch.randn(5, 32)

    def with_(context, call):
        with context:
            call()

    bf16 = torch.autocast("cpu", torch.bfloat16)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    between = {
        "nothing": (lambda: None, lambda: k(x), 1),
        "a view": (lambda: None, lambda: k(x[:]), 2),
        "a copy": (lambda: None, lambda: k(x.clone()), 2),
        "written to": (lambda: x.mul_(2), lambda: k(x), 2),
        "no_grad": (lambda: None, lambda: with_(torch.no_grad(), lambda: k(x)), 2),
        "autocast": (lambda: None, lambda: with_(bf16, lambda: k(x)), 2),
        "another checkpoint": (lambda: None, lambda: with_(hooks, lambda: k(x)), 2),
        "eval": (lambda: k.eval(), lambda: k(x), 2),
        "an optimizer step": (lambda: q.lora_A.data.add_(0), lambda: k(x), 1),  # .data: no version
        "an optimizer step, seen": (lambda: with_(torch.no_grad(), lambda: v.lora_A.add_(1)), lambda: k(x), 2),
        "new memory": (lambda: setattr(v.lora_A, "data", v.lora_A.data.clone()), lambda: k(x), 2),
        "the same member": (lambda: None, lambda: q(x), 2),
    }  # fmt: skip
    for name, (act, call, expected) in between.items():
        layer.train()
        group._entry = None
        assert quantizations(lambda: q(x), act, call) == expected, name


def test_a_dropout_that_changes_is_not_that_of_a_shared_mask():
    layer, group = one_group((0.3, True))
    q, k, _ = members = [getattr(layer.train(), name) for name in NAMES]
    x = torch.randn(5, 32)

    def change(p):
        for member in members:
            member.lora_dropout = p

    for p, expected in ((0.3, 1), (0.5, 2), (0.1, 2), (0.1, 1)):
        group._entry = None
        assert quantizations(lambda: q(x), lambda p=p: change(p), lambda: k(x)) == expected


@settings(max_examples=50, deadline=None)
@given(
    p=st.sampled_from([0.0, 0.3]),
    fp8=st.sampled_from([DelayedScaling(), BLOCKS, None]),
    seed=st.integers(0, 2**31),
    program=st.lists(
        st.sampled_from(
            ["q", "k", "v", "q", "k", "v", "all", "write", "other", "mode", "grad", "autocast", "step", "off", "back"]
        ),
        min_size=4,
        max_size=20,
    ),
)  # fmt: skip
def test_any_program_gives_what_layers_apart_give(p, fp8, seed, program):
    """Members called in any order on any of two tensors, which are written to, in any mode, adapters changed and
    switched off, and backwards in between: the outputs and all gradients are those of layers that are not grouped. Bit
    for bit with masks apart. A stacked product's sums may be ordered otherwise: that is 1e-5 of the largest value, or
    under autocast one more rounding of s and of the result to bf16, by 2⁻⁸ each."""
    torch.manual_seed(seed)
    apart, _ = model(p, fp8, layers=1)
    together = copy.deepcopy(apart)
    (group,) = group_projections(together, [NAMES])
    found = []
    for m in (apart, together):
        if m[0].q_proj.fp8_state is not None:
            m[0].q_proj.fp8_state.in_charge = "test"
        found.append(execute(m[0], program, seed, group if m is together else None))
    stacked = p == 0 or "mode" in program  # eval has no masks
    tolerance = 0.0 if not stacked else 2**-7 if "autocast" in program else 1e-5
    for ours, theirs in zip(*found, strict=True):
        if theirs is None or ours is None:
            assert theirs is ours
            continue
        scale = theirs.abs().max().item() if theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * scale)


def execute(layer, program, seed, group):
    torch.manual_seed(seed)
    pool = [torch.randn(3, 32).requires_grad_() for _ in range(2)]
    work, which = [t.clone() for t in pool], 0
    members = [getattr(layer, name) for name in NAMES]
    training = grad = True
    autocast, outputs, pending = False, [], []
    for action in program:
        if action in ("q", "k", "v", "all"):
            with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, autocast):
                if action == "all" and group is not None:
                    ys = group(work[which])
                else:
                    ys = [m(work[which]) for m in members if action in ("all", m.name[2])]
            outputs += [y.detach() for y in ys]
            pending += [y.float().sum() for y in ys if y.requires_grad]
        elif action == "other":
            which = 1 - which
        elif action == "mode":
            training = not training
            layer.train(training)
        elif action == "grad":
            grad = not grad
        elif action == "autocast":
            autocast = not autocast
        elif action == "off":
            members[1].disable_adapters = not members[1].disable_adapters
        else:  # "write", "step" or "back"
            if pending:
                sum(pending).backward()
            pending = []
            with torch.no_grad():
                for t in [work[which]] if action == "write" else []:
                    t.mul_(1.5)
                for m in members if action == "step" else []:
                    m.lora_A.mul_(1.25)
    if pending:
        sum(pending).backward()
    trained = [p for p in layer.parameters() if p.requires_grad]
    return outputs + [p.grad for p in (*trained, *pool)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_nothing_is_kept_of_an_input(mode):
    layer, group = one_group(mode)
    made = []

    def track(*args, _op=ops.quantize_lora_down):
        out = _op(*args)
        made.extend(weakref.ref(t) for t in out if t.numel())
        return out

    def alive():
        gc.collect()
        return [ref() for ref in made if ref() is not None]

    with mock.patch.object(ops, "quantize_lora_down", track):
        x = torch.randn(5, 32)
        with torch.no_grad():
            for name in NAMES:
                getattr(layer, name)(x)
        assert group._entry is None and not alive(), "every member has had its share"
        with torch.no_grad():
            layer.q_proj(x)
        assert group._entry is not None
        del x
        assert group._entry is None and not alive(), "x is gone"
        x = torch.randn(5, 32, requires_grad=True)
        y = layer.q_proj(x)
        made.clear()
        with torch.no_grad():
            layer.q_proj(other := torch.randn(5, 32))
        assert group._entry.x() is other
        del x, y, other
        assert not alive()


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_one_member_in_eval(mode):
    """It scales x by its own amax, whatever the others do; `group(x)` has no answer then."""
    layer, group = one_group(mode)
    layer.q_proj.fp8_state.in_charge = "test"
    layer.q_proj.fp8_state.forward[-1] = 1.0
    layer.k_proj.eval()
    alone = copy.deepcopy(layer).k_proj
    x = torch.randn(5, 32) * 1000
    layer.q_proj(x)
    torch.testing.assert_close(layer.k_proj(x), alone(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="all be in training, or all in eval"):
        group(x)


def test_x_has_one_column_whoever_comes_first():
    layer, group = one_group()
    state = layer.q_proj.fp8_state
    for order in (NAMES, NAMES[::-1]):
        state.reset()
        x = torch.randn(5, 32)
        sum(getattr(layer, name)(x).sum() for name in order).backward()
        assert state.forward[0].nonzero().flatten().tolist() == [state.column("0.q_proj")]
        assert {m.fp8_amax_history[0, 0].item() for m in group.members} == {x.abs().max().item()}
        dys = [state.column(f"0.{name}") for name in NAMES]
        assert state.backward[0].nonzero().flatten().tolist() == sorted(dys)


def test_a_group_that_moves_to_another_state_reads_x_where_the_first_member_is():
    """`attach` and `fuse` join states that were made one by one, in the order of the model's modules."""
    layer, _ = one_group()
    q, k, v = (getattr(layer, name) for name in NAMES)
    q(torch.randn(5, 32))
    before = q.fp8_scale.clone()
    share_state({"other": FrozenFP8Linear(32, 8), "v": v, "q": q, "k": k})
    assert [member.column for member in (q, k, v)] == [2, 3, 1]
    for member in (q, k, v):
        numbers = numbers_of(member.handle.tensor)
        assert (numbers.column_x, numbers.column_dy) == (2, member.column)
        assert numbers.state is q.fp8_state and numbers.name == member.name
    assert torch.equal(q.fp8_scale, before)


def test_states_that_ranks_share_are_joined_with_those_of_the_same_ranks_alone():
    """Scales would else be each rank's own after `attach`, though its weights are a part of all ranks'."""
    group, other = object(), object()
    for groups, joined in (((group, group), True), ((group, other), False)):
        layers = {str(i): FrozenFP8Linear(32, 8) for i in range(2)}
        for layer, own in zip(layers.values(), groups, strict=True):
            layer.fp8_state.shared_over = (own,)
        share_state(layers)
        first, second = (layer.fp8_state for layer in layers.values())
        assert (first is second) is joined
        assert [first.shared_over, second.shared_over] == [(each,) for each in groups]


def test_one_mask_is_one_mask():
    """Equal A and B of equal members give outputs that differ by the order of sums; with a mask each by more."""
    for shared_dropout in (True, False):
        layer, group = one_group((0.5, shared_dropout))
        first, *_, last = layer.k_proj, layer.v_proj
        last.lora_A, last.lora_B = nn.Parameter(first.lora_A.data), nn.Parameter(first.lora_B.data)
        last.scaling, last.bias = first.scaling, None
        last._write_weight(first.stored, first.weight_scale_inv)
        _, k, v = group(torch.randn(5, 32))
        assert torch.allclose(k, v, rtol=0, atol=2.0**-16) == shared_dropout


@pytest.mark.parametrize("place", [{"row0": 64}, {"chunks": (1, 2, 2)}], ids=["row0", "chunks"])
def test_one_mask_lies_in_one_place_whoever_reads_it(place):
    """Backward drops what forward did: the first member draws, and where others say that their rows lie is not read."""
    layer, group = one_group((0.5, True))
    x, found = torch.randn(12, 32), []
    for turn in range(2):
        if turn:
            for name, value in place.items():
                setattr(layer.v_proj, name, value)
        torch.manual_seed(3)
        *_, v = group(given := x.clone().requires_grad_())
        found.append([v, *torch.autograd.grad(v.square().sum(), [given, layer.v_proj.lora_A])])
    assert all(map(torch.equal, *found))


def test_a_group_whose_first_member_is_switched_off_still_draws():
    layer, _ = one_group((0.5, True))
    x = torch.randn(64, 32)
    layer.q_proj.disable_adapters = True
    layer.q_proj(x)
    dropped = layer.k_proj(x)
    with mock.patch.object(layer.k_proj, "lora_dropout", 0.0):
        for member in layer.q_proj.group.members:
            member.lora_dropout = 0.0
        assert not torch.equal(dropped, layer.k_proj(x))


@pytest.mark.gpu
def test_another_stream_makes_its_own():
    """What one stream computes may not be there yet for another."""
    layer, group = one_group()
    layer = layer.cuda()
    x = torch.randn(5, 32, device="cuda")
    layer.q_proj(x)
    entry, side = group._entry, torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer.k_proj(x)
    assert group._entry is not entry and group._entry.shared is not entry.shared
