# SPDX-License-Identifier: Apache-2.0
"""LoRALinearGroup in models: when an input is shared, when not, and what must not be seen from outside."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from lorakernels import (
    DelayedScaling,
    FP8State,
    LoRAConfig,
    LoRALinear,
    LoRALinearGroup,
    PhiloxState,
    apply_lora,
    disable_lora,
    group_projections,
    load_adapter,
    merge_lora,
    ops,
    save_adapter,
    unmerge_lora,
)
from lorakernels.modules import GroupedLoRALinear, lora_modules

NAMES = ("q_proj", "k_proj", "v_proj")
MODES = [(0.0, False), (0.3, False), (0.3, True)]
MODE_IDS = ["no dropout", "masks apart", "one mask"]


class Attention(nn.Module):
    """A layer as models write it; `how` is what goes around it or its projections."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 16, bias=False)
        self.v_proj, self.o_proj = nn.Linear(32, 16), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return x + self.o_proj(torch.tanh(q) * torch.cat((k, v), -1))


def model(p=0.0, fp8=DelayedScaling(), layers=2, rng_state=None):  # noqa: B008  (frozen)
    m = nn.Sequential(*(Attention() for _ in range(layers)))
    rank = {"k_proj": 3}
    targets = [*NAMES, "o_proj"]
    config = LoRAConfig(r=4, lora_dropout=p, target_modules=targets, rank_pattern=rank, fp8=fp8)
    report = apply_lora(m, config, rng_state=rng_state)
    for layer in lora_modules(m).values():
        nn.init.normal_(layer.lora_B, std=0.2)
    return m, report


def grouped(mode, **options):
    m, report = model(mode[0], **options)
    return m, group_projections(m, [NAMES], shared_dropout=mode[1]), report


def one_group(mode=(0.0, False), **options):
    m, (group,), _ = grouped(mode, layers=1, **options)
    return m[0], group


class Counted:
    """How often each op runs; reads of x that quantize it count apart."""

    def __init__(self):
        self.calls = {}
        self.stack = ExitStack()

    def __enter__(self):
        for name in ("quantize_lora_down", "fp8_linear_lora", "quantize_grad", "lora_grad_a"):
            op = getattr(ops, name)

            def run(*args, _op=op, _name=name):
                quantizes = _name == "quantize_lora_down" and args[2] is not None
                key = "quantize" if quantizes else _name
                self.calls[key] = self.calls.get(key, 0) + 1
                return _op(*args)

            self.stack.enter_context(mock.patch.object(ops, name, run))
        return self.calls

    def __exit__(self, *error):
        self.stack.close()


@pytest.mark.parametrize(
    ("mode", "down", "grad_a"),
    [(MODES[0], 0, 1), (MODES[1], 2, 3), (MODES[2], 0, 1)],
    ids=MODE_IDS,
)
@pytest.mark.parametrize("how", ["members", "group(x)"])
def test_how_often_each_op_runs(mode, down, grad_a, how):
    """With masks apart the first member's pass over x quantizes too, and the others' only multiply."""
    layer, group = one_group(mode)
    x = torch.randn(5, 32)
    with Counted() as calls:
        ys = group(x) if how == "group(x)" else [getattr(layer, n)(x) for n in NAMES]
        sum(y.sum() for y in ys).backward()
    expected = {"quantize": 1, "fp8_linear_lora": 3, "quantize_grad": 3, "lora_grad_a": grad_a}
    assert calls == expected | ({"quantize_lora_down": down} if down else {})
    assert group._entry is None


def quantizations(*calls):
    with Counted() as counted:
        for call in calls:
            call()
    return counted.get("quantize", 0)


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


@settings(max_examples=50, deadline=None)
@given(
    p=st.sampled_from([0.0, 0.3]),
    fp8=st.sampled_from([DelayedScaling(), None]),
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
        if fp8:
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


def gradients(m, x, steps=2):
    torch.manual_seed(5)
    m.zero_grad()
    x.grad = None
    for _ in range(steps):
        m(x).pow(2).sum().backward()
    found = {n: p.grad for n, p in m.named_parameters() if p.requires_grad} | {"x": x.grad}
    state = m[0].q_proj.fp8_state
    if state is not None:
        found |= {"forward": state.forward.clone(), "backward": state.backward.clone()}
    return found


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("rng", [None, 5], ids=["torch's generator", "PhiloxState"])
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_checkpointed_layers_give_the_same_bits(mode, rng, reentrant, device):
    state = None if rng is None else PhiloxState(rng, device)
    m, _, _ = grouped(mode, rng_state=state)
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


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_grouped_among_themselves(how):
    m, groups, _ = grouped((0.3, False))
    m[0].q_proj(x := torch.randn(4, 32))  # an entry that must not travel
    twin = copy.deepcopy(m) if how == "deepcopy" else pickle.loads(pickle.dumps(m))
    for layer in twin:
        group = layer.q_proj.group
        assert group not in groups and group._entry is None
        assert [m is getattr(layer, n) for m, n in zip(group.members, NAMES, strict=True)] == [
            True
        ] * 3
    results = []
    for net in (m, twin):
        torch.manual_seed(1)
        net.zero_grad()
        net(x).sum().backward()
        results.append([p.grad for p in net.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_replica_is_not_its_original():
    """nn.DataParallel's replicas share __dict__ entries, the group among them, but have other parameters."""
    layer, group = one_group()
    replica = layer.q_proj._replicate_for_data_parallel()
    replica._parameters = {
        n: p.detach() * 2 for n, p in layer.q_proj._parameters.items() if n != "weight"
    }
    replica._parameters["weight"] = layer.q_proj._parameters["weight"]
    x = torch.randn(4, 32)
    layer.k_proj(x)
    assert quantizations(lambda: replica(x)) == 1 and group._entry is not None
    assert not torch.equal(replica(x), layer.q_proj(x))


def test_state_dicts_know_nothing_of_groups():
    """A grouped model's state loads into one that is not, and the other way: both go on with the same bits."""
    m, _ = model(0.3)
    twin = copy.deepcopy(m)
    group_projections(twin, [NAMES])
    x = torch.randn(6, 32, requires_grad=True)
    for net in (m, twin):
        gradients(net, x)
    ours, theirs = twin.state_dict(), m.state_dict()
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        same = ours[key].view(torch.uint8), value.view(torch.uint8)
        assert torch.equal(*same), key
    plain, _ = model(0.3)
    plain.load_state_dict(ours)
    again, _ = model(0.3)
    group_projections(again, [NAMES])
    again.load_state_dict(theirs)
    expected, *others = (gradients(net, x) for net in (m, plain, again))
    for other in others:
        for name, value in expected.items():
            assert name in ("forward", "backward") or torch.equal(other[name], value), name


def test_adapters_are_pefts_and_round_trip(tmp_path):
    m, _, _ = grouped((0.0, False))
    plain, _ = model()
    base = {k: v for k, v in m.state_dict().items() if "lora_" not in k}
    plain.load_state_dict(base, strict=False)
    save_adapter(m, tmp_path)
    load_adapter(plain, tmp_path)
    x = torch.randn(6, 32)
    torch.testing.assert_close(m.eval()(x), plain.eval()(x), rtol=1e-5, atol=1e-5)
    other, _, _ = grouped((0.0, False))
    other.load_state_dict(base, strict=False)
    report = load_adapter(other, tmp_path)
    assert torch.equal(other.eval()(x), m(x)) and "x shared with 0.k_proj, 0.v_proj" in str(report)


def test_peft_reads_a_grouped_models_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    base = nn.Sequential(Attention(), Attention())
    m = copy.deepcopy(base)
    apply_lora(m, LoRAConfig(r=4, target_modules=[*NAMES], fp8=None))
    for layer in lora_modules(m).values():
        nn.init.normal_(layer.lora_B, std=0.2)
    group_projections(m, [NAMES])
    save_adapter(m, tmp_path)
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path))
    x = torch.randn(6, 32)
    torch.testing.assert_close(m.eval()(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)


def test_merge_and_disable():
    apart, _ = model()
    together = copy.deepcopy(apart)
    group_projections(together, [NAMES])
    x = torch.randn(6, 32)
    with torch.no_grad():
        for m in (apart, together):
            m.eval()
        tuned = together(x)
        for change in (merge_lora, unmerge_lora):
            for m in (apart, together):
                change(m)
            torch.testing.assert_close(together(x), apart(x), rtol=1e-5, atol=1e-5)
        with disable_lora(apart), disable_lora(together):
            assert torch.equal(together(x), apart(x)), "the base alone"
            assert quantizations(lambda: together[0](x)) == 2, "shared all the same: q, k, v; o"
        assert torch.equal(together(x), tuned)


def test_inference_mode_and_generation():
    """Inference tensors have no version to go by, so that nothing is shared; the result is the same."""
    m, _, _ = grouped((0.3, False))
    m.eval()
    x = torch.randn(6, 32)
    with torch.no_grad():
        expected = m(x)
    with torch.inference_mode():
        inside = torch.randn(6, 32)
        assert quantizations(lambda: m[0](inside)) == 4
        torch.testing.assert_close(m(x), expected, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_a_sharded_adapter_is_not_read_by_another_member(mode, monkeypatch):
    """FSDP2 around each projection gathers its own parameters only."""
    layer, group = one_group(mode)
    sharded = layer.k_proj.lora_A
    monkeypatch.setattr("lorakernels.modules.group.is_sharded", lambda p: p is sharded)
    if mode == (0.3, False):
        layer.q_proj(torch.randn(5, 32))
        return
    with pytest.raises(RuntimeError, match=r"0.k_proj.lora_A is sharded while 0.q_proj runs"):
        layer.q_proj(torch.randn(5, 32))
    assert group._entry is None


def test_one_mask_is_one_mask():
    """Equal A and B of equal members give equal outputs; with a mask each they differ."""
    for shared_dropout in (True, False):
        layer, group = one_group((0.5, shared_dropout))
        first, *_, last = layer.k_proj, layer.v_proj
        last.lora_A, last.lora_B = nn.Parameter(first.lora_A.data), nn.Parameter(first.lora_B.data)
        last.scaling, last.bias = first.scaling, None
        last._write_weight(first._stored, first.weight_scale_inv)
        _, k, v = group(torch.randn(5, 32))
        assert torch.equal(k, v) == shared_dropout


def test_the_mask_of_all_needs_one_probability_when_it_is_drawn():
    layer, group = one_group((0.5, True))
    layer.k_proj.lora_dropout = 0.25
    with pytest.raises(
        ValueError, match=r"one lora_dropout, found \{'0.q_proj': 0.5, '0.k_proj': 0.25"
    ):
        group(torch.randn(5, 32))
    layer.eval()
    group(torch.randn(5, 32))


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


def pair(**changes):
    """Two layers, of one FP8 state unless one of them has another recipe."""
    config = {"r": 4, "lora_dropout": 0.1}
    state = FP8State(["first", "second"], DelayedScaling())
    first = LoRALinear(32, 16, config=LoRAConfig(**config), name="first", fp8_state=state)
    second = LoRALinear(
        changes.pop("k", 32),
        16,
        config=LoRAConfig(**config | changes),
        name="second",
        fp8_state=None if "fp8" in changes else state,
    )
    return [first, second]


def apart():
    """As `pair`, each with a state of its own."""
    return [LoRALinear(32, 16, config=LoRAConfig(r=4), name=name) for name in ("first", "second")]


@pytest.mark.parametrize(
    ("members", "error", "match"),
    [
        (pair(k=48), ValueError, r"one in_features, found \{'first': 32, 'second': 48\}"),
        (
            pair(lora_dropout=0.2),
            ValueError,
            "one lora_dropout, found {'first': 0.1, 'second': 0.2",
        ),
        (pair(fp8=None), ValueError, "one recipe, found"),
        (pair(fp8=DelayedScaling(fp8_format="E4M3")), ValueError, "one recipe, found"),
        (apart(), ValueError, "must have one fp8_state, .* x's scale would be updated by"),
        (pair()[:1], ValueError, "two or more different members, found"),
        (pair()[:1] * 2, ValueError, "two or more different members, found"),
        ([*pair(), nn.Linear(32, 16)], TypeError, "must be a LoRALinear, found Linear"),
    ],
    ids=["K", "p", "plain and FP8", "formats", "states", "one", "twice the same", "not ours"],
)
def test_members_that_do_not_fit_are_refused_and_stay_as_they_are(members, error, match):
    with pytest.raises(error, match=match):
        LoRALinearGroup(members)
    assert not any(isinstance(member, GroupedLoRALinear) for member in members)


def test_one_mask_needs_one_source():
    members = pair()
    members[1].rng_state = PhiloxState(3)
    with pytest.raises(ValueError, match="one rng_state"):
        LoRALinearGroup(members, shared_dropout=True)
    LoRALinearGroup(members)


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([("q_proj", "k_prj")], r"\['q_proj'\] are LoRALinears, but not \{'k_prj': 'missing'\}"),
        ([("q_proj", "norm")], r"but not \{'norm': 'LayerNorm'\}"),
        ([("query", "key")], r"no module of Sequential has LoRALinears \['query', 'key'\]"),
        ([NAMES, ("v_proj", "o_proj")], "a projection is in two of the groups"),
        (["q_proj"], "found the string 'q_proj'"),
        ([NAMES, ("o_proj",)], "two or more different members"),
    ],
    ids=["near name", "not linear", "nowhere", "in two", "a string", "alone"],
)
def test_bad_groups_are_refused_and_nothing_is_grouped(groups, match):
    m, _ = model()
    m[0].norm = nn.LayerNorm(32)
    with pytest.raises(ValueError, match=match):
        group_projections(m, groups)
    assert not any(isinstance(layer, GroupedLoRALinear) for layer in m.modules())


def test_layers_without_adapters_are_left_alone_and_the_report_says_what_is_shared():
    m = nn.Sequential(Attention(), Attention())
    report = apply_lora(m, LoRAConfig(target_modules=[f"0.{name}" for name in NAMES]))
    (group,) = group_projections(m, [NAMES])
    assert group.names == tuple(f"0.{name}" for name in NAMES)
    assert type(m[1].q_proj) is nn.Linear
    rows = {row.name: row for row in report.modules}
    assert rows["0.k_proj"].shares_x == ("0.q_proj", "0.v_proj") and not rows["1.k_proj"].shares_x
    assert "0.k_proj: lora 32→16" in str(report) and "x shared with 0.q_proj, 0.v_proj" in str(
        report
    )
    with pytest.raises(ValueError, match="in a group already"):
        group_projections(m, [NAMES])


@pytest.mark.parametrize("fp8", [DelayedScaling(), None], ids=["fp8", "plain"])
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
        assert counts == [2 * 7, 2 * 4]
    assert all(group._entry is None for group in groups)


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


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[:2], ids=MODE_IDS[:2])
def test_compiles_without_a_graph_break(mode):
    """`group(x)` shares under torch.compile; members called one by one are traced apart, each quantizing x."""
    layer, group = one_group(mode)
    slot = torch.tensor([11, 12])
    x = torch.randn(5, 32)
    calls = {"group(x)": group, "members": lambda x: [getattr(layer, n)(x) for n in NAMES]}
    results = []
    with mock.patch("lorakernels.modules.group.draw_slot", lambda *_: slot.clone()):
        for call in (
            *calls.values(),
            *(torch.compile(c, fullgraph=True, backend="aot_eager") for c in calls.values()),
        ):
            layer.zero_grad()
            layer.q_proj.fp8_state.reset()
            xs = x.clone().requires_grad_()
            ys = call(xs)
            sum(y.sum() for y in ys).backward()
            results.append([*(y.detach() for y in ys), xs.grad, layer.q_proj.lora_A.grad.clone()])
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
