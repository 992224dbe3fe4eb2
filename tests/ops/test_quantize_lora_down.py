# SPDX-License-Identifier: Apache-2.0
"""csrc's one-read quantize_lora_down against its reference: x8 and amax bit for bit, s against float64."""

from __future__ import annotations

import pytest
import torch

from lorakernels.numerics.dropout import dropout_keep, keep_scale
from lorakernels.numerics.fp8 import E4M3, quantize
from lorakernels.ops import Dropout, Scaling, quantize_lora_down
from tests.exact import EPS

gpu = pytest.mark.gpu
run = quantize_lora_down.run


def inputs(m, k, r, dtype, a_dtype=torch.float32):
    x = (3 * torch.randn(m, k, device="cuda")).to(dtype)
    lora_A = None if r == 0 else (torch.randn(r, k, device="cuda") / k**0.5).to(a_dtype)
    state = torch.zeros(4, 3, device="cuda")
    state[-1] = torch.tensor([7.0, 31.7, 5.0])
    return x, lora_A, state, torch.tensor([-5, 0x1_2345_6789], device="cuda")


def exact_s(x, lora_A, dropout):
    """(value, size) in float64, size being the sum of the magnitudes."""
    keep = dropout_keep(dropout, *x.shape)
    xd = torch.where(keep, x.double(), 0.0) * keep_scale(dropout.p)
    a = lora_A.to(x.dtype).double()
    return xd @ a.t(), xd.abs() @ a.abs().t()


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("m", "k", "r"),
    [
        (1, 8, 1),  # K % 16 == 8: without TMA
        (16, 1032, 16),
        (77, 1000, 17),
        (4100, 520, 64),
        (300, 648, 128),
        (40, 24, 0),
        (15, 64, 7),  # by boxes, the last three with more steps a block than its ring has places
        (16, 1040, 16),
        (5000, 1040, 0),
        (20000, 144, 16),
        (20000, 144, 20),
        (300, 640, 128),  # by panels, the last three as before
        (500, 2064, 33),
        (4100, 528, 64),
        (26000, 400, 100),
        (20000, 432, 20),
    ],
)
def test_equals_the_reference(m, k, r, p, dtype):
    x, lora_A, state, slot = inputs(m, k, r, dtype)
    arguments = (x, lora_A, Scaling(state, 1, True), Dropout(slot, p, 3))
    assert quantize_lora_down.takes(*arguments).name == "csrc"
    before = state.clone()
    x8, scale_inv, s = run(*arguments)
    expected = before.clone()
    want8, want_inv = quantize(x, Scaling(expected, 1, True), E4M3)
    assert torch.equal(x8, want8) and torch.equal(scale_inv, want_inv)
    assert torch.equal(state, expected), "amax in row 0 of its column, nothing else"
    if r == 0:
        assert s.numel() == 0
        return
    value, size = exact_s(x, lora_A, Dropout(slot, p, 3))
    # one rounding at the store; fp32 sums of k products: k · 2⁻²⁴ of the magnitudes at worst
    bound = 0.5 * EPS[dtype] * value.abs() + k * 2.0**-24 * size + 1e-30
    assert s.shape == (m, r) and bool(((s.double() - value).abs() <= bound).all())
    again = run(*arguments)
    assert torch.equal(s, again[2]) and torch.equal(x8, again[0]), "the same bits every run"


@gpu
@pytest.mark.parametrize("r", [0, 16, 64])
@pytest.mark.parametrize("delayed", [True, False], ids=["no scale yet", "eval"])
@pytest.mark.parametrize("case", ["normal", "zeros", "inf", "nan", "tiny"])
def test_its_own_amax(case, delayed, r):
    x, lora_A, state, slot = inputs(130, 256, r, torch.bfloat16)
    if delayed:
        state[-1, 1] = 0.0
    fill = {"inf": float("-inf"), "nan": float("nan")}
    if case in fill:
        x[77, 130] = fill[case]
    x = {"zeros": x * 0, "tiny": x * 1e-38}.get(case, x)
    before = state.clone()
    x8, scale_inv, _ = run(x, lora_A, Scaling(state, 1, delayed), Dropout(slot, 0.0, 3))
    want8, want_inv = quantize(x, Scaling(before, 1, delayed), E4M3)
    found, want = x8.view(E4M3).float(), want8.view(E4M3).float()  # NaN has two patterns
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(scale_inv, want_inv)
    torch.testing.assert_close(state, before, rtol=0, atol=0, equal_nan=True)


@gpu
def test_a_dropped_nan_stays_out_of_s():
    x, lora_A, state, slot = inputs(64, 128, 16, torch.bfloat16)
    keep = dropout_keep(Dropout(slot, 0.5, 3), *x.shape)
    x = torch.where(keep, x, torch.nan)
    _, _, s = run(x, lora_A, Scaling(state, 1, True), Dropout(slot, 0.5, 3))
    assert s.isfinite().all() and state[0, 1].isnan()


@gpu
def test_amax_rises_and_never_falls():
    x, lora_A, state, slot = inputs(64, 64, 8, torch.bfloat16)
    state[0, 1] = 1e6
    run(x, lora_A, Scaling(state, 1, True), Dropout(slot, 0.0, 3))
    assert state[0].tolist() == [0.0, 1e6, 0.0]
    x[3, 5] = float("nan")
    run(x, lora_A, Scaling(state, 1, True), Dropout(slot, 0.0, 3))
    assert state[0, 1].isnan()


@gpu
def test_a_plain_base_takes_only_s_and_shards_draw_one_mask():
    x, lora_A, _, slot = inputs(96, 512, 16, torch.bfloat16, torch.bfloat16)
    x8, scale_inv, s = run(x, lora_A, None, Dropout(slot, 0.3, 5, 7, 16))
    assert x8.numel() == scale_inv.numel() == 0
    value, size = exact_s(x, lora_A, Dropout(slot, 0.3, 5, 7, 16))
    assert bool(((s.double() - value).abs() <= 2.0**-8 * value.abs() + 512 * 2.0**-24 * size).all())


@gpu
@pytest.mark.parametrize(
    "case", ["fp32 x", "K % 8", "rank 129", "col0 % 8", "transposed x", "misaligned x"]
)
def test_what_it_does_not_take_goes_through_pytorch(case):
    x, lora_A, state, slot = inputs(
        32, 60 if case == "K % 8" else 64, 129 if "129" in case else 4, torch.bfloat16
    )
    col0 = 4 if case == "col0 % 8" else 0
    if case == "fp32 x":
        x = x.float()
    if case == "transposed x":
        x = x.t().contiguous().t()
    if case == "misaligned x":
        x = torch.cat((x.flatten()[:1], x.flatten()))[1:].view(32, 64)
    arguments = (x, lora_A, Scaling(state, 1, True), Dropout(slot, 0.1, 3, 0, col0))
    assert quantize_lora_down.takes(*arguments).name == "torch"
    _, _, s = run(*arguments)
    value, size = exact_s(x, lora_A, Dropout(slot, 0.1, 3, 0, col0))
    assert bool(((s.double() - value).abs() <= 2.0**-7 * size).all())


@gpu
def test_no_rows():
    x, lora_A, state, slot = inputs(0, 64, 4, torch.bfloat16)
    x8, scale_inv, s = run(x, lora_A, Scaling(state, 1, True), Dropout(slot, 0.1, 3))
    assert x8.shape == (0, 64) and s.shape == (0, 4)
    assert torch.equal(scale_inv, 1.0 / state[-1, 1:2]) and not state[0].any()


@gpu
@pytest.mark.parametrize(("k", "r"), [(1048, 24), (1040, 24), (1040, 48)])
def test_every_element_is_written(k, r):
    """New memory is poisoned: an element that the kernel skips is NaN."""
    x, lora_A, state, slot = inputs(4099, k, r, torch.bfloat16)
    x8, scale_inv, s = run(x, lora_A, Scaling(state, 1, True), Dropout(slot, 0.2, 0))
    assert x8.view(E4M3).float().isfinite().all() and s.isfinite().all() and scale_inv.isfinite()


@gpu
@pytest.mark.parametrize("r", [16, 128])
def test_runs_under_capture(r):
    x, lora_A, state, slot = inputs(64, 128, r, torch.bfloat16)
    expected = run(x, lora_A, Scaling(state.clone(), 1, True), Dropout(slot, 0.1, 3))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = run(x, lora_A, Scaling(state, 1, True), Dropout(slot, 0.1, 3))
    for _ in range(2):
        for each in found:
            each.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
