# SPDX-License-Identifier: Apache-2.0
"""y, dx, dA, dB, dbias of LoRALinear against float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakernels import (
    BlockScaling,
    DelayedScaling,
    FP8State,
    LoRAConfig,
    LoRALinear,
    MMParams,
    ops,
)
from lorakernels.autograd.linear import linear
from lorakernels.autograd.linear.values import LoRASpec
from lorakernels.modules.linear import calls as calls_module
from lorakernels.numerics.dropout import dropout_keep, dropped_bits
from lorakernels.recorded.routing import without_recordings
from lorakernels.values import Dropout
from tests.exact import EPS, error_in_eps, exact_lora

HYBRID = DelayedScaling()
# module `lora_linear`, which the function of that name hides
SLOT = (0x1234_5678_9ABC_DEF, 7)


def make_layer(k, n, r, *, p=0.0, bias=True, fp8=HYBRID, dtype=torch.float32, device="cpu"):
    """The middle one of three tensors in its FP8 state, dropout site 3: a column or site mixed up would show."""
    config = LoRAConfig(r=r, lora_alpha=2 * r, lora_dropout=p, fp8=fp8, bias="lora_only")
    delayed = isinstance(fp8, DelayedScaling)
    state = FP8State(["before", "it", "after"], fp8, device) if delayed else None
    layer = LoRALinear(
        k, n, bias, config, device, dtype, adapter_dtype=torch.float32, fp8_state=state, name="it"
    )
    torch.nn.init.normal_(layer.lora_B, std=0.1)
    layer.site = 3
    return layer


def run(layer, x, dy, p):
    """One forward and backward with a known slot; returns y, the gradients and the mask."""
    slot = torch.tensor(SLOT, dtype=torch.int64, device=x.device)
    with mock.patch.object(calls_module, "draw_slot", return_value=slot):
        y = layer(x)
    y.backward(dy)
    rows = x.numel() // x.shape[-1]
    keep = dropout_keep(Dropout(slot, p, layer.site), rows, x.shape[-1]) if p else None
    return y, keep


def check(layer, x, dy, p, dtype, extra=0.0):
    """Bound: s, ds and the stored result are rounded once each, by at most eps/2 of what they add; fp32 sums of ≤ 1000
    terms and the two roundings of a dequantized product stay below 1e-5 of it."""
    y, keep = run(layer, x, dy, p)
    exact = exact_lora(layer, x, dy, keep, p)
    found = {"y": y, "dx": x.grad, "dA": layer.lora_A.grad, "dB": layer.lora_B.grad}
    if layer.bias is not None:
        found["dbias"] = layer.bias.grad
    found["y"], found["dx"] = (found[k].flatten(0, -2) for k in ("y", "dx"))
    eps = EPS[dtype] + 1e-5 + extra
    errors = {name: error_in_eps(value, *exact[name], eps) for name, value in found.items()}
    assert all(e <= 1.0 for e in errors.values()), errors
    assert y.dtype == x.dtype and x.grad.dtype == x.dtype
    assert layer.lora_A.grad.dtype == layer.lora_A.dtype


@settings(max_examples=40, deadline=None)
@given(
    m=st.sampled_from([0, 1, 7, 128]),
    k=st.sampled_from([16, 33, 130]),
    n=st.sampled_from([1, 48, 57]),
    r=st.sampled_from([1, 3, 8, 16, 64]),
    p=st.sampled_from([0.0, 0.1]),
    bias=st.booleans(),
    fp8=st.sampled_from(
        [
            DelayedScaling(),
            DelayedScaling(fp8_format="E4M3"),
            BlockScaling(),
            BlockScaling("HYBRID", power_2_scale=True),
            None,
        ]
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
    scales=st.sampled_from([(0.0, 0.0), (100.0, 3.0), (448.0, 60000.0), (0.5, 0.25)]),
)
def test_matches_float64(m, k, n, r, p, bias, fp8, dtype, seed, scales):
    """Scales as delayed scaling leaves them: none yet, fitting, saturating, much too small."""
    torch.manual_seed(seed)
    layer = make_layer(k, n, r, p=p, bias=bias, fp8=fp8, dtype=dtype)
    if layer.fp8_state is not None:
        layer.fp8_state.in_charge = "test"
        layer.fp8_state.forward[-1] = torch.tensor([7.0, scales[0], 9.0])
        layer.fp8_state.backward[-1] = torch.tensor([7.0, scales[1], 9.0])
    x = torch.randn(m, k, dtype=dtype, requires_grad=True)
    check(layer, x, torch.randn(m, n, dtype=dtype), p, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(256, 512, 384), (7, 130, 57), (0, 64, 32), (1, 1024, 48)]
)
def test_matches_float64_on_the_gpu(m, k, n, dtype):
    """cuBLASLt shapes and those it does not take. Fast accumulation keeps ~14 bits of each FP8 product's sum
    (DeepGEMM issue #50), and y and dx are rounded once more on the way, hence the wider bound."""
    config = LoRAConfig(r=16, lora_alpha=32, lora_dropout=0.1, bias="lora_only")
    layer = LoRALinear(k, n, True, config, "cuda", dtype, adapter_dtype=torch.float32)
    torch.nn.init.normal_(layer.lora_B, std=0.1)
    x = torch.randn(m, k, dtype=dtype, device="cuda", requires_grad=True)
    check(layer, x, torch.randn(m, n, dtype=dtype, device="cuda"), 0.1, dtype, 2e-3 + EPS[dtype])


@pytest.mark.parametrize(
    "shape", [(24,), (5, 24), (2, 3, 24), (2, 1, 3, 24), (0, 24), (3, 0, 24)], ids=str
)
def test_any_leading_dimensions(shape):
    layer = make_layer(24, 10, 4)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], 10)
    y.sum().backward()
    assert x.grad.shape == shape and x.grad.isfinite().all()


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_strides_do_not_matter(p):
    layer = make_layer(24, 10, 4, p=p)
    base = torch.randn(48, 6)
    dy = torch.randn(6, 10)
    results = []
    for x in (base.t()[:, ::2], base.t()[:, ::2].contiguous()):
        x = x.detach().requires_grad_()
        layer.zero_grad()
        y, _ = run(layer, x, dy, p)
        results.append((y, x.grad, layer.lora_A.grad, layer.lora_B.grad))
    assert not base.t()[:, ::2].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_expanded_and_strided_output_gradients():
    layer = make_layer(24, 10, 4)
    x = torch.randn(6, 24, requires_grad=True)
    layer(x).sum().backward()
    ones = x.grad.clone()
    x.grad = None
    layer(x).backward(torch.ones(10, 6).t())
    assert torch.equal(ones, x.grad)


def test_zero_b_and_zero_rows():
    layer = make_layer(32, 16, 8)
    torch.nn.init.zeros_(layer.lora_B)
    x = torch.randn(4, 32)
    x[1] = 0
    x.requires_grad_()
    y = layer(x)
    layer.disable_adapters = True
    assert torch.equal(y, layer(x)), "B = 0: the output is the base's, bit for bit"
    y.sum().backward()
    assert layer.lora_A.grad.abs().max() == 0 and x.grad.isfinite().all()


def test_a_zero_amax_step_keeps_the_scales():
    layer = make_layer(32, 16, 8)
    x = torch.randn(4, 32, requires_grad=True)
    for _ in range(2):
        layer(x).pow(2).sum().backward()
    before = layer.fp8_state.forward[-1, 1].clone(), layer.fp8_state.backward[-1, 1].clone()
    assert before[0] > 0 and before[1] > 0
    y = layer(torch.zeros(4, 32, requires_grad=True))
    (y * 0).sum().backward()
    layer.fp8_state.reduce_and_update()
    layer.fp8_state.reduce_and_update()
    y = layer(x)
    assert y.isfinite().all()
    assert layer.fp8_state.forward[-1, 1] == before[0]
    assert layer.fp8_state.backward[-1, 1] == before[1]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("where", ["x", "dy"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_inf_and_nan_stay_where_they_are(bad, where, p):
    """A NaN in the result only where float64 has NaN or inf, and the scales survive."""
    layer = make_layer(32, 16, 8, p=p)
    for _ in range(2):
        layer(torch.randn(6, 32)).sum().backward()
    x, dy = torch.randn(6, 32), torch.randn(6, 16)
    (x if where == "x" else dy)[2, 3] = bad
    x.requires_grad_()
    layer.zero_grad()
    _, keep = run(layer, x, dy, p)
    y, _ = run(layer, x.detach().requires_grad_(), dy, p)
    exact = exact_lora(layer, x, dy, keep, p)
    for name, found, truth in (
        ("y", y, exact["y"][0]),
        ("dx", x.grad, exact["dx"][0]),
    ):
        touched = ~truth.isfinite()
        assert not (found.isnan() & ~touched).any(), name
        rows = torch.ones(6, dtype=torch.bool)
        rows[2] = False
        assert found[rows].isfinite().all(), name
    layer.fp8_state.reduce_and_update()
    for state in (layer.fp8_state.forward, layer.fp8_state.backward):
        assert 0 < state[-1, 1] < float("inf")


def saved_bytes(layer, x):
    """Bytes autograd keeps for `layer(x)`, parameters and buffers excepted (they are saved by reference)."""
    own = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *layer.buffers())}
    sizes = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    return sum(sizes.values()), y


@pytest.mark.parametrize(
    ("fp8", "p", "expected"),
    [
        (DelayedScaling(), 0.1, 64 * 256 + 2 * 64 * 8 + 16 + 4),
        (DelayedScaling(), 0.0, 64 * 256 + 2 * 64 * 8 + 4),
        (None, 0.1, 2 * 64 * 256 + 2 * 64 * 8 + 16),
    ],
    ids=["x8 + s + slot + scale_inv", "no dropout: no slot", "bf16 base: x instead of x8"],
)
def test_saved_for_backward(fp8, p, expected):
    layer = make_layer(256, 128, 8, p=p, fp8=fp8, dtype=torch.bfloat16)
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    assert saved_bytes(layer, x)[0] == expected


def test_saved_for_backward_with_frozen_adapters():
    layer = make_layer(256, 128, 8).requires_grad_(False)
    assert saved_bytes(layer, torch.randn(64, 256))[0] == 0
    assert saved_bytes(layer, torch.randn(64, 256, requires_grad=True))[0] == 0


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("fp8", [DelayedScaling(), None], ids=["fp8", "plain"])
def test_inputs_and_saved_tensors_are_not_written(p, fp8):
    layer = make_layer(32, 16, 8, p=p, fp8=fp8)
    x, dy = torch.randn(6, 32, requires_grad=True), torch.randn(6, 16)
    kept = []

    def pack(t):
        kept.append((t, t.clone()))
        return t

    before = x.detach().clone(), dy.clone()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    y.backward(dy)
    assert torch.equal(x, before[0]) and torch.equal(dy, before[1])
    assert kept and all(
        torch.equal(now.view(torch.uint8), then.view(torch.uint8)) for now, then in kept
    )


def test_an_optimizer_step_between_forward_and_backward_is_refused():
    layer = make_layer(32, 16, 8)
    y = layer(torch.randn(2, 32, requires_grad=True)).sum()
    with torch.no_grad():
        layer.lora_B.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8", [DelayedScaling(), None], ids=["fp8", "plain"])
def test_autocast(adapter, fp8, device):
    layer = make_layer(32, 16, 8, p=0.1, fp8=fp8, device=device)
    layer.lora_A.data, layer.lora_B.data = (t.to(adapter) for t in (layer.lora_A, layer.lora_B))
    x = torch.randn(6, 32, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert layer.lora_A.grad.dtype == layer.lora_B.grad.dtype == adapter
    x2 = x.detach().bfloat16().requires_grad_()
    with torch.no_grad():
        plain = layer.eval()(x2)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert torch.equal(layer(x.detach()), plain)


@pytest.mark.parametrize(
    ("x", "error", "match"),
    [
        (torch.zeros(2, 31), ValueError, r"x must have shape \[\.\.\., 32\], found \(2, 31\)"),
        (torch.tensor(1.0), ValueError, "x must have shape"),
        (torch.zeros(2, 32, dtype=torch.float64), TypeError, "found torch.float64"),
        (torch.zeros(2, 32, dtype=torch.int64), TypeError, "found torch.int64"),
        (torch.zeros(2, 32, device="meta"), ValueError, "x is on meta, the weight on cpu"),
    ],
    ids=["width", "scalar", "float64", "int64", "device"],
)
def test_bad_x_is_refused_before_anything_changes(x, error, match):
    layer = make_layer(32, 16, 8, p=0.1)
    rng, state = torch.get_rng_state(), layer.fp8_state.forward.clone()
    with pytest.raises(error, match=match):
        layer(x)
    assert torch.equal(torch.get_rng_state(), rng), "no random number was drawn"
    assert torch.equal(layer.fp8_state.forward, state)


@pytest.mark.parametrize("fprop", [False, True], ids=["fast", "split"])
def test_the_recipe_says_how_the_gemms_add_up(fprop: bool) -> None:
    recipe = DelayedScaling(fp8_gemm_fprop=MMParams(fprop), fp8_gemm_dgrad=MMParams(not fprop))
    layer = make_layer(32, 16, 4, fp8=recipe)
    x = torch.randn(8, 32, requires_grad=True)
    with (
        mock.patch.object(ops, "fp8_linear_lora", wraps=ops.fp8_linear_lora) as forward,
        mock.patch.object(ops, "fp8_grad_input", wraps=ops.fp8_grad_input) as backward,
    ):
        layer(x).sum().backward()
    assert forward.call_args.args[5] is fprop
    assert backward.call_args.args[-1] is (not fprop)


@pytest.mark.parametrize("power", [False, True], ids=["any scale", "powers of two"])
@pytest.mark.parametrize(
    ("name", "dy"), [("E4M3", torch.float8_e4m3fn), ("HYBRID", torch.float8_e5m2)]
)
def test_a_spec_has_what_ops_are_asked_for_by_a_recipe_of_blocks(name, dy, power):
    spec = LoRASpec(2.0).following(BlockScaling(name, power), 0, True)
    assert (spec.backward_dtype, spec.power_of_two) == (dy, power)
    assert spec.numbers.spec == spec and LoRASpec(2.0).power_of_two is None


@pytest.mark.parametrize("draws", [False, True], ids=["drawn twice", "drawn once"])
@pytest.mark.parametrize("fp8", [HYBRID, BlockScaling()], ids=["delayed", "blocks"])
def test_dA_and_dx_get_the_mask_that_quantize_grad_drew(fp8, draws, monkeypatch):
    """What a GPU's backward does, with the reference's ops."""
    monkeypatch.setattr(linear, "hands_mask_over", lambda *_: draws)
    layer = make_layer(40, 16, 4, p=0.3, fp8=fp8)
    x, slot = torch.randn(8, 40, requires_grad=True), torch.tensor([5, 6])
    with (
        mock.patch.object(calls_module, "draw_slot", lambda *_: slot),
        mock.patch.object(ops, "fp8_grad_input", wraps=ops.fp8_grad_input) as grad_x,
        mock.patch.object(ops, "lora_grad_a", wraps=ops.lora_grad_a) as grad_a,
    ):
        layer(x).sum().backward()
    keep = dropout_keep(Dropout(slot, 0.3, layer.site), 8, 40)
    for dropout in (grad_x.call_args.args[5], grad_a.call_args.args[2]):
        dropped = dropout.dropped
        assert torch.equal(dropped, dropped_bits(keep)) if draws else dropped is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_blocks_with_a_mask_drawn_once_have_the_bits_of_one_drawn_twice(dtype, monkeypatch):
    """The products in blocks read its bits, of whole blocks and of parts of them."""
    layer = make_layer(528, 208, 16, p=0.3, fp8=BlockScaling(), dtype=dtype, device="cuda")
    x = torch.randn(130, 528, dtype=dtype, device="cuda")
    dy, slot = torch.randn(130, 208, dtype=dtype, device="cuda"), torch.tensor(SLOT, device="cuda")
    found = []
    for draws in (False, True):
        monkeypatch.setattr(linear, "hands_mask_over", lambda *_, draws=draws: draws)
        layer.zero_grad()
        given = x.clone().requires_grad_()
        with without_recordings(), mock.patch.object(calls_module, "draw_slot", return_value=slot):
            layer(given).backward(dy)
        found.append([given.grad, layer.lora_A.grad, layer.lora_B.grad])
    assert all(map(torch.equal, *found))
