# SPDX-License-Identifier: Apache-2.0
"""y, dx, dA, dB, dbias of projections that share their input, against float64 and against LoRALinears apart."""

from __future__ import annotations

import copy
from random import Random
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from lorakernels import (
    BlockScaling,
    DelayedScaling,
    FP8State,
    LoRAConfig,
    LoRALinear,
    LoRALinearGroup,
    ops,
)
from lorakernels.modules.linear import lora as lora_module
from lorakernels.numerics.dropout import dropout_keep
from lorakernels.values import Dropout
from tests.exact import EPS, error_in_eps, exact_lora

HYBRID = DelayedScaling()
BLOCKS = BlockScaling()
SIZES = {"q": (48, 8), "k": (16, 3), "v": (33, 8)}  # N, R


def make(k=32, p=0.0, fp8=HYBRID, dtype=torch.float32, device="cpu", bias=True, sizes=None):
    """LoRALinears that are not grouped yet, between others' columns of one FP8 state, with sites of their own."""
    sizes = SIZES if sizes is None else sizes
    delayed = isinstance(fp8, DelayedScaling)
    state = FP8State(["before", *sizes, "after"], fp8, device) if delayed else None
    layers = []
    for site, (name, (n, r)) in enumerate(sizes.items(), start=3):
        config = LoRAConfig(r=r, lora_alpha=2 * r, lora_dropout=p, fp8=fp8, bias="lora_only")
        options = {"adapter_dtype": torch.float32, "fp8_state": state, "name": name}
        layer = LoRALinear(k, n, bias, config, device, dtype, **options)
        nn.init.normal_(layer.lora_B, std=0.1)
        layer.site = site
        layers.append(layer)
    return layers


class Slots:
    """Known slots instead of random ones, and the order they were drawn in."""

    def __init__(self):
        self.drawn = []

    def __call__(self, state, device):
        self.drawn.append(torch.tensor([0x1234_5678_9ABC_DEF, len(self.drawn)], device=device))
        return self.drawn[-1]


def check(members, x, dys, p, shared_dropout, how, order, extra=0.0):
    """Every result against float64. Bounds: as in test_lora_linear.py; dx is a sum of n terms, each rounded once and
    added in x's dtype, so up to (1 + n)/2 eps."""
    slots = Slots()
    group = LoRALinearGroup(members, shared_dropout=shared_dropout)
    with mock.patch.object(lora_module, "draw_slot", slots):
        if how == "group(x)":
            ys = group(x)
        else:
            found = {i: members[i](x) for i in order}
            ys = [found[i] for i in range(len(members))]
    assert group._entry is None
    drawn = 0 if p == 0 else 1 if shared_dropout else len(members)
    assert len(slots.drawn) == drawn
    torch.autograd.backward(ys, dys)
    eps, total, size, errors = EPS[x.dtype] + 1e-5 + extra, 0.0, 0.0, {}
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    place = list(range(len(members))) if how == "group(x)" else order
    for i, (member, y, dy) in enumerate(zip(members, ys, dys, strict=True)):
        keep = None
        if p:
            slot = slots.drawn[0 if shared_dropout else place.index(i)]
            site = members[0].site if shared_dropout else member.site
            keep = dropout_keep(Dropout(slot, p, site), rows, cols)
        exact = exact_lora(member, x, dy, keep, p)
        results = {"y": y.flatten(0, -2), "dA": member.lora_A.grad, "dB": member.lora_B.grad}
        if member.bias is not None:
            results["dbias"] = member.bias.grad
        for name, value in results.items():
            errors[f"{member.name}.{name}"] = error_in_eps(value, *exact[name], eps)
        total, size = total + exact["dx"][0], size + exact["dx"][1]
        assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], member.out_features)
        assert member.lora_A.grad.dtype == member.lora_A.dtype
    dx_eps = eps * (1 + len(members)) / 2
    errors["dx"] = error_in_eps(x.grad.flatten(0, -2), total, size, dx_eps)
    assert all(e <= 1.0 for e in errors.values()), errors


MODES = [(0.0, False), (0.1, False), (0.1, True)]
MODE_IDS = ["no dropout", "masks apart", "one mask"]


@settings(max_examples=60, deadline=None)
@given(
    m=st.sampled_from([0, 1, 7, 128]),
    k=st.sampled_from([16, 33, 130]),
    sizes=st.lists(
        st.tuples(st.sampled_from([1, 16, 57]), st.sampled_from([1, 3, 8, 64])),
        min_size=2,
        max_size=4,
    ),
    mode=st.sampled_from(MODES),
    how=st.sampled_from(["group(x)", "members"]),
    order=st.randoms(use_true_random=False),
    bias=st.booleans(),
    fp8=st.sampled_from(
        [
            DelayedScaling(),
            DelayedScaling(fp8_format="E4M3"),
            BLOCKS,
            BlockScaling("HYBRID", power_2_scale=True),
            None,
        ]
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
    scales=st.sampled_from([(0.0, 0.0), (100.0, 3.0), (448.0, 60000.0), (0.5, 0.25)]),
)
# ds = dy B, which nearly cancels
@example(
    m=1, k=130, sizes=[(57, 1)] * 4, mode=(0.0, False), how="group(x)", order=Random(0), bias=False,
    fp8=DelayedScaling(), dtype=torch.float32, seed=2, scales=(0.0, 0.0),
)  # fmt: skip
def test_matches_float64(m, k, sizes, mode, how, order, bias, fp8, dtype, seed, scales):
    """Ranks of 64 three times do not fit one down-projection. The scale of x is the first member's column; in blocks,
    each block's."""
    torch.manual_seed(seed)
    p, shared_dropout = mode
    names = {f"m{i}": size for i, size in enumerate(sizes)}
    members = make(k, p, fp8, dtype, bias=bias, sizes=names)
    if (state := members[0].fp8_state) is not None:
        state.in_charge = "test"
        state.forward[-1], state.backward[-1] = scales
    x = torch.randn(m, k, dtype=dtype, requires_grad=True)
    dys = [torch.randn(m, n, dtype=dtype) for n, _ in sizes]
    calls = list(range(len(sizes)))
    order.shuffle(calls)
    check(members, x, dys, p, shared_dropout, how, calls)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize(
    ("m", "k", "ranks"),
    [(256, 512, (16, 16, 16)), (200, 512, (64, 64, 64)), (7, 130, (8, 3, 1)), (0, 64, (8, 8, 8))],
    ids=str,
)
def test_matches_float64_on_the_gpu(m, k, ranks, mode, dtype):
    """Bound: as in test_lora_linear.py's test of the same name."""
    sizes = dict(zip("qkv", zip((384, 128, 128), ranks, strict=True), strict=True))
    members = make(k, mode[0], dtype=dtype, device="cuda", sizes=sizes)
    x = torch.randn(m, k, dtype=dtype, device="cuda", requires_grad=True)
    dys = [torch.randn(m, n, dtype=dtype, device="cuda") for n, _ in sizes.values()]
    check(members, x, dys, *mode, "members", [1, 0, 2], 2e-3 + EPS[dtype])


def steps(members, device, dtype=torch.float32, how="members", autocast=False, rows=6):
    """Three training steps with scales that follow; everything that may differ, as one dict."""
    torch.manual_seed(11)
    found = {}
    for step in range(3):
        shape = (2, rows, members[0].in_features)
        x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            ys = members[0].group(x) if how == "group(x)" else [member(x) for member in members]
        torch.autograd.backward(ys, [torch.randn_like(y) for y in ys])
        found |= {f"dx{step}": x.grad} | {f"y{i}{step}": y.detach() for i, y in enumerate(ys)}
    for member in members:
        for name, parameter in member.named_parameters():
            if parameter.requires_grad:
                found[f"{member.name}.{name}"] = parameter.grad
        if member.fp8_state is not None:
            found[f"{member.name}.scales"] = member.fp8_scale
            found[f"{member.name}.amaxes"] = member.fp8_amax_history
    return found


@pytest.mark.parametrize("how", ["members", "group(x)"])
@pytest.mark.parametrize("fp8", [HYBRID, BLOCKS, None], ids=["fp8", "blocks", "plain"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_masks_apart_give_the_bits_of_layers_apart(fp8, how, autocast, device):
    """The same random draws in the same order, the same sums: no bit of y, dx, dA, dB or the scales changes."""
    dtype = torch.float32 if autocast else torch.bfloat16
    apart = make(p=0.3, fp8=fp8, device=device, dtype=dtype)
    together = copy.deepcopy(apart)
    LoRALinearGroup(together)
    expected = steps(apart, device, dtype, autocast=autocast)
    found = steps(together, device, dtype, how, autocast)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["members", "group(x)"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_blocks_that_csrc_takes_give_the_bits_of_layers_apart(dtype, how):
    """Layers apart run by plans, a group by the ops: whole blocks and parts of them, masks drawn once a backward."""
    sizes = {"q": (384, 16), "k": (128, 16), "v": (208, 8)}
    apart = make(528, p=0.3, fp8=BLOCKS, device="cuda", dtype=dtype, sizes=sizes)
    together = copy.deepcopy(apart)
    LoRALinearGroup(together)
    expected = steps(apart, torch.device("cuda"), dtype, rows=130)
    found = steps(together, torch.device("cuda"), dtype, how, rows=130)
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("how", ["members", "group(x)"])
@pytest.mark.parametrize("fp8", [HYBRID, BLOCKS], ids=["delayed", "blocks"])
def test_stacked_projections_differ_by_rounding_only(fp8, how, device):
    """Without dropout all s come from one product, whose sums a BLAS may order otherwise: a few of fp32's roundings
    (2⁻²⁴) of what is added. The scales agree to the bit."""
    apart = make(fp8=fp8, device=device)
    together = copy.deepcopy(apart)
    LoRALinearGroup(together)
    expected, found = steps(apart, device), steps(together, device, how=how)
    for name, value in expected.items():
        tolerance = 0.0 if "." in name and "lora" not in name else 1e-5
        atol = tolerance * value.abs().max().item()
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_takes_adapters_of_any_dtype(adapter, kind, device):
    """Bound: as above, and A is rounded alike; outputs are rounded to `kind`."""
    apart = make(device=device)
    for layer in apart:
        layer.lora_A.data, layer.lora_B.data = layer.lora_A.to(adapter), layer.lora_B.to(adapter)
    together = copy.deepcopy(apart)
    LoRALinearGroup(together)
    x = torch.randn(6, 32, device=device)
    with torch.autocast(device.type, kind):
        for one, other in zip(apart, together, strict=True):
            expected, found = one(x), other(x)
            atol = EPS[kind] * expected.abs().max().item()
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)
            found.float().sum().backward(retain_graph=True)
            assert other.lora_A.grad.dtype == adapter


def saved_bytes(members, x, call):
    """Bytes that autograd keeps, parameters and buffers excepted."""
    tensors = [t for m in members for t in (*m.parameters(), *m.buffers())]
    own = {t.untyped_storage().data_ptr() for t in tensors}
    sizes = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ys = call(x)
    return sum(sizes.values()), ys


@pytest.mark.parametrize("how", ["members", "group(x)"])
@pytest.mark.parametrize(
    ("fp8", "mode", "expected"),
    [
        (HYBRID, (0.0, False), 64 * 256 + 4),
        (HYBRID, (0.1, False), 64 * 256 + 4 + 3 * 16),
        (HYBRID, (0.1, True), 64 * 256 + 4 + 16),
        (BLOCKS, (0.1, False), 64 * 256 + 4 * 64 * 2 + 3 * 16),
        (None, (0.1, True), 2 * 64 * 256 + 16),
    ],
    ids=[
        "x8 and its scale once",
        "and a slot each",
        "and one slot",
        "x8 and a scale for each 128",
        "bf16 base: x once",
    ],
)
def test_saved_for_backward(fp8, mode, expected, how):
    members = make(256, mode[0], fp8, torch.bfloat16)
    group = LoRALinearGroup(members, shared_dropout=mode[1])
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    call = group if how == "group(x)" else lambda x: [member(x) for member in members]
    found, _ys = saved_bytes(members, x, call)
    assert found == expected + sum(2 * 64 * r for _, r in SIZES.values())


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_saved_for_backward_with_frozen_adapters(mode):
    members = make(256, mode[0])
    group = LoRALinearGroup(members, shared_dropout=mode[1])
    for member in members:
        member.requires_grad_(False)
    assert saved_bytes(members, torch.randn(64, 256), group)[0] == 0
    slots = 0 if mode[0] == 0 else 16 if mode[1] else 3 * 16
    assert saved_bytes(members, torch.randn(64, 256, requires_grad=True), group)[0] == slots


@pytest.mark.parametrize("ranks", [(128, 124, 4), (128, 124, 5)], ids=["256", "257"])
def test_one_down_projection_serves_all_while_their_ranks_fit(ranks):
    """`quantize_lora_down` takes 256 = MAX_RANK. Beyond, each adapter has its own, and the first quantizes x."""
    members = make(sizes=dict(zip("qkv", zip((48, 16, 16), ranks, strict=True), strict=True)))
    group = LoRALinearGroup(members)
    found = []

    def down(x, lora_A, scaling, mask, _op=ops.quantize_lora_down):
        found.append((lora_A.shape[0], scaling is not None))
        return _op(x, lora_A, scaling, mask)

    with mock.patch.object(ops, "quantize_lora_down", down):
        group(torch.randn(6, 32))
    apart = [(rank, i == 0) for i, rank in enumerate(ranks)]
    assert found == ([(256, True)] if sum(ranks) == 256 else apart)


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize("used", [0, 2])
def test_the_gradient_of_one_member_alone(used, mode):
    """The others get no gradient at all, as when they were not called."""
    members = make(p=mode[0])
    twin = copy.deepcopy(members[used])
    group = LoRALinearGroup(members, shared_dropout=mode[1])
    x = torch.randn(6, 32, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    slot = lambda *_: torch.tensor([5, 6])  # noqa: E731
    dy = torch.randn(6, members[used].out_features)
    with mock.patch.object(lora_module, "draw_slot", slot):
        group(x)[used].backward(dy)
    twin.site = members[0].site if mode[1] else twin.site
    with mock.patch.object(lora_module, "draw_slot", slot):
        twin(x2).backward(dy)
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-5, atol=1e-5)
    for i, member in enumerate(members):
        for name in ("lora_A", "lora_B", "bias"):
            if i != used:
                assert getattr(member, name).grad is None, (member.name, name)
            else:
                found, exact = getattr(member, name).grad, getattr(twin, name).grad
                torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_only_the_gradients_asked_for(mode):
    members = make(p=mode[0])
    group = LoRALinearGroup(members, shared_dropout=mode[1])
    members[1].requires_grad_(False)
    members[2].lora_A.requires_grad_(False)
    x = torch.randn(6, 32)
    sum(y.sum() for y in group(x)).backward()
    has = {f"{m.name}.{n}" for m in members for n, p in m.named_parameters() if p.grad is not None}
    assert has == {"q.lora_A", "q.lora_B", "q.bias", "v.lora_B", "v.bias"}


def test_gradients_have_memory_of_their_own():
    members = make()
    group = LoRALinearGroup(members)
    sum(y.sum() for y in group(torch.randn(6, 32))).backward()
    storages = [m.lora_A.grad.untyped_storage().data_ptr() for m in members]
    assert len(set(storages)) == 3


def test_an_optimizer_step_between_forward_and_backward_is_refused():
    members = make()
    group = LoRALinearGroup(members)
    for name in ("lora_A", "lora_B"):
        y = group(torch.randn(2, 32, requires_grad=True))[1].sum()
        with torch.no_grad():
            getattr(members[1], name).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_backwards_of_members_are_separate(mode):
    """None goes through another's, before or after it: the gradients are those of one backward for all."""
    members = make(p=mode[0])
    together = copy.deepcopy(members)
    LoRALinearGroup(members, shared_dropout=mode[1])
    LoRALinearGroup(together, shared_dropout=mode[1])
    x = torch.randn(6, 32, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    slot = lambda *_: torch.tensor([5, 6])  # noqa: E731
    with mock.patch.object(lora_module, "draw_slot", slot):
        q, k = members[0](x), members[1](x)
        k.sum().backward()
        q.sum().backward()
        members[2](x).sum().backward()
        sum(member(x2).sum() for member in together).backward()
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-5, atol=1e-5)
    for one, other in zip(members, together, strict=True):
        assert torch.equal(one.lora_A.grad, other.lora_A.grad)
        assert torch.equal(one.lora_B.grad, other.lora_B.grad)
