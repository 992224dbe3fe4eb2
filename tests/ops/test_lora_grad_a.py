# SPDX-License-Identifier: Apache-2.0
"""csrc's one-pass lora_grad_a: its masks, shards, random shapes, workspace, the binding's refusals, the choice.

tests/ops/cases/lora_grad_a.py has the rest.
"""

from __future__ import annotations

import random
import sys

import pytest
import torch

from lorakernels import _C, ops
from lorakernels.device import multiprocessors_of
from lorakernels.numerics.dropout import dropout_keep, dropped_bits, dropped_words, keep_scale
from lorakernels.numerics.fp8 import E4M3
from lorakernels.ops.choice import implementations
from lorakernels.ops.hardware import LayerOnGPU
from lorakernels.values import Dropout, Scaled
from tests.kernels.bindings import call
from tests.ops.cases.lora_grad_a import bound, bytes_of
from tests.ops.contract import BF16, FP16, FP32, Call, Made, fault

gpu = pytest.mark.gpu
run = ops.lora_grad_a.run
MODULE = sys.modules["lorakernels.ops.lora_grad_a"]  # the package has the op under this name
SITE = 3


def inputs(m, k, r, dtype=BF16, fp8=True):
    """ds, x (e4m3 bytes if fp8), slot. All 256 bytes but the two NaNs occur, subnormals and −0 included."""
    ds = torch.randn(m, r, device="cuda").to(dtype)
    slot = torch.tensor([-5, 0x1_2345_6789], device="cuda")
    if not fp8:
        return ds, Scaled(torch.randn(m, k, device="cuda").to(dtype)), slot
    x8 = bytes_of(m, k, Made("cuda", m))
    return ds, Scaled(x8, torch.full((1,), 0.37, device="cuda")), slot


@gpu
def test_another_dtype_is_the_same_sums_rounded_once():
    ds, x, slot = inputs(777, 1040, 64)
    found = run(ds, x, Dropout(slot, 0.1, SITE), FP32)
    for out_dtype in (BF16, FP16):
        assert torch.equal(run(ds, x, Dropout(slot, 0.1, SITE), out_dtype), found.to(out_dtype))


@gpu
@pytest.mark.parametrize(
    "p", [2**-16, 0.25, 0x7BFF / 65536, 0x7C00 / 65536, 0.5, 0.5 + 2**-16, 0.9, 1 - 2**-16]
)  # 0x7C00: the first threshold that is no finite fp16
@pytest.mark.parametrize("fp8", [True, False], ids=["x8", "plain x"])
def test_the_mask_is_the_reference_s_bit_for_bit(fp8, p):
    """ds = 1 in one row of each slot of an MMA at a time and x = 1: dA is that row's mask, times one factor."""
    m, k = 64, 544
    ones = torch.ones(m, k, device="cuda")
    x8 = ones.to(E4M3).view(torch.uint8)
    x = Scaled(x8, torch.ones(1, device="cuda")) if fp8 else Scaled(ones.to(BF16))
    slot = torch.tensor([0x7EDC_BA98_7654_3210, -1], device="cuda")
    dropout = Dropout(slot, p, 7, 11, 24)
    keep = dropout_keep(dropout, m, k)
    for first in range(0, m, 16):
        ds = torch.zeros(m, 16, device="cuda", dtype=BF16)
        ds[first : first + 16] = torch.eye(16, device="cuda", dtype=BF16)
        dA = run(ds, x, dropout, FP32)
        assert torch.equal(dA, keep[first : first + 16] * keep_scale(p))


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("p", [0.1, 0.95])
@pytest.mark.parametrize("fp8", [True, False], ids=["x8", "plain x"])
@pytest.mark.parametrize(
    ("m", "k", "r"), [(1, 16, 1), (33, 272, 16), (1025, 4112, 33), (777, 1040, 128)]
)
def test_a_mask_that_is_given_is_read_instead_of_drawn(m, k, r, fp8, p, dtype):
    """Another slot is named beside it; the bits behind the last column are set."""
    ds, x, slot = inputs(m, k, r, dtype, fp8)
    dropout = Dropout(slot, p, SITE, 7, 40)
    keep = dropout_keep(dropout, m, k)
    columns = dropped_bits(torch.zeros_like(keep))  # bits that stand for a column
    bits, guards = between_guards((m, dropped_words(k)), torch.int32, "cuda", -1)
    bits.copy_(dropped_bits(keep) | ~columns)
    another = dropout._replace(slot=slot + 1)
    dA = run(ds, x, another._replace(dropped=bits), FP32)
    assert torch.equal(dA, run(ds, x, dropout, FP32))
    assert not torch.equal(dA, run(ds, x, another, FP32)) or m * k < 64
    assert all(bool((guard == -1).all()) for guard in guards)


@gpu
def test_p_below_what_16_bits_express_draws_nothing():
    ds, x, slot = inputs(40, 64, 4)
    found = run(ds, x, Dropout(slot, 1e-6, SITE), FP32)
    assert torch.equal(found, run(ds, x, None, FP32))


@gpu
@pytest.mark.parametrize("mask", ["none", "drawn", "given"])
@pytest.mark.parametrize("slices", [1, 2, 4, 6, 11])
@pytest.mark.parametrize("r", [16, 24, 64])
def test_slices_of_64_rows_are_added_first_to_last(r, slices, mask):
    """In a cluster or by a kernel, bit for bit. The factors are powers of two, so that they do not round."""
    m, k = 64 * slices - 7, 272
    ds, x, slot = inputs(m, k, r)
    x.scale_inv.fill_(0.5)
    dropout = None if mask == "none" else Dropout(slot, 0.5, SITE)
    if mask == "given":
        dropout = dropout._replace(dropped=dropped_bits(dropout_keep(dropout, m, k)))
    assert _C.lora_grad_a_partial(m, k, r, multiprocessors_of(0)) == slices * r * k
    expected = torch.zeros(r, k, device="cuda")
    for first in range(0, m, 64):
        rows = slice(first, first + 64)
        part = dropout
        if dropout is not None:
            bits = None if dropout.dropped is None else dropout.dropped[rows]
            part = dropout._replace(row0=first, dropped=bits)
        expected += run(ds[rows], Scaled(x.data[rows], x.scale_inv), part, FP32)
    assert torch.equal(run(ds, x, dropout, FP32), expected)


@gpu
@pytest.mark.parametrize("fp8", [True, False], ids=["x8", "plain x"])
def test_shards_draw_one_mask(fp8):
    ds, x, slot = inputs(200, 512, 16, fp8=fp8)
    data, scale_inv = x
    whole = run(ds, x, Dropout(slot, 0.3, SITE, 5, 16), FP32)
    columns = Scaled(data[:, 256:].contiguous(), scale_inv)
    right = run(ds, columns, Dropout(slot, 0.3, SITE, 5, 16 + 256), FP32)
    assert torch.equal(whole[:, 256:], right)
    halves = []
    for i in (0, 100):
        rows = slice(i, i + 100)
        dropout = Dropout(slot, 0.3, SITE, 5 + i, 16)
        halves.append(run(ds[rows], Scaled(data[rows], scale_inv), dropout, FP32))
    # Another order of the same fp32 sums, which reach 200 · 4 · 166 at most; a rounding there is 2^-24 of it, 0.008.
    torch.testing.assert_close(halves[0] + halves[1], whole, rtol=1e-4, atol=1e-2)


@gpu
@pytest.mark.parametrize("rank", [16, 40, 128, 192])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_what_is_not_finite_stays_in_its_row_and_column(value, rank):
    ds, x, slot = inputs(70, 96, rank)
    ds[5, 3] = value
    x.data[9, 20] = 0x7F
    dropout = Dropout(slot, 0.5, SITE)
    keep = dropout_keep(dropout, 70, 96)
    dA = run(ds, x, dropout, FP32)
    touched = torch.zeros_like(dA, dtype=torch.bool)
    touched[3] = True  # 0 · inf, and NaN times anything
    touched[:, 20] |= bool(keep[9, 20])
    assert torch.equal(dA.isfinite() | touched, torch.ones_like(touched))
    assert bool(keep[9, 20]) == bool(dA[:, 20].isnan().all()), "a dropped NaN is 0"


def between_guards(shape, dtype, device, fill):
    """A tensor with 4 KiB of `fill` in front of it and behind it, and both."""
    guard = 4096 // dtype.itemsize
    count = torch.Size(shape).numel()
    whole = torch.full((count + 2 * guard,), fill, dtype=dtype, device=device)
    return whole[guard : guard + count].view(shape), (whole[:guard], whole[guard + count :])


def sweep(count):
    """(id, m, k, r, dtype, fp8, p, out_dtype, row0, col0), the same on every machine."""
    draw = random.Random(4)
    for i in range(count):
        m = draw.choice([draw.randrange(1, 70), draw.randrange(1, 3000)])
        k = 16 * draw.choice([draw.randrange(1, 20), draw.randrange(1, 150)])
        r = draw.choice([draw.randrange(1, 257), 8, 16, 64])
        case = (
            draw.choice([BF16, FP16]),
            draw.random() < 0.6,
            draw.choice([0.0, 0.05, 0.1, 0.5, 0.8]),
            draw.choice([FP32, BF16, FP16]),
            draw.choice([0, draw.randrange(2**31)]),
            8 * draw.choice([0, draw.randrange(1000)]),
        )
        yield pytest.param(m, k, r, *case, id=f"{i}-{m}x{k}-r{r}")


@gpu
@pytest.mark.parametrize(
    ("m", "k", "r", "dtype", "fp8", "p", "out_dtype", "row0", "col0"), list(sweep(60))
)
def test_random_sweep(m, k, r, dtype, fp8, p, out_dtype, row0, col0):
    ds, x, slot = inputs(m, k, r, dtype, fp8)
    if fp8:
        x.scale_inv.mul_(0.01)  # fp16 results stay in range
    dropout = Dropout(slot, p, SITE, row0, col0) if p else None
    arguments = (ds, x, dropout, out_dtype)
    assert not fault(bound, Call(arguments, arguments, (run(*arguments),)))


@pytest.mark.parametrize(
    ("shape", "slices"),
    [((0, 16, 1), 0), ((1, 16, 1), 1), ((64, 8192, 16), 1), ((65, 16, 128), 2)],
)
def test_workspace_is_one_share_per_slice(shape, slices):
    assert _C.lora_grad_a_partial(*shape, 132) == slices * shape[1] * shape[2]


@pytest.mark.parametrize("r", [8, 16, 64, 128])
@pytest.mark.parametrize("k", [1024, 8192, 28672])
def test_workspace_stays_small_beside_x(k, r):
    """Shares, written and read, are the price of using every multiprocessor: 15 % of x8's bytes at R ≤ 16, K ≥ 8192."""
    floats = _C.lora_grad_a_partial(8192, k, r, 132)
    assert floats % (k * r) == 0 and 1 <= floats // (k * r) <= 32
    if r <= 16 and k >= 8192:
        assert 2 * 4 * floats <= 0.15 * 8192 * k


CALL = {
    "dA": 16,
    "partial": 16,
    "ds": 16,
    "x": 16,
    "scale_inv": 4,
    "in_blocks": False,
    "rows": 8,
    "cols": 16,
    "rank": 4,
    "ds_pitch": 8,
    "dtype": "bfloat16",
    "out_dtype": "float32",
    "slot": 8,
    "site": 0,
    "p": 0.1,
    "row0": 0,
    "col0": 0,
    "dropped": 0,
    "chunks": (),
    "stream": 0,
    "device": -1,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": -1}, "rows must not be negative, got -1"),
        ({"cols": 12}, "cols must be a multiple of 8"),
        ({"cols": 24}, "cols must be a multiple of 16 with scale_inv, got 24"),
        ({"rank": 0}, "rank 1 to 256"),
        ({"rank": 257}, "rank 257"),
        ({"rows": 2**31}, "got rows 2147483648"),
        ({"ds_pitch": 12}, "ds_pitch must be a multiple of 8, got 12"),
        ({"x": 24}, "16-byte aligned"),
        ({"dA": 4}, "16-byte aligned"),
        ({"col0": 4}, "col0 must be a multiple of 8, got 4"),
        ({"dtype": "float32"}, "got 'float32'"),
        ({"out_dtype": "float8"}, "got 'float8'"),
        ({"slot": 0}, "slot must be given"),
        ({"p": 1.0}, "p must be in"),
    ],
    ids=lambda v: "-".join(f"{k}={n}" for k, n in v.items()) if isinstance(v, dict) else "",
)
def test_the_binding_refuses(changed, message):
    with pytest.raises(ValueError, match=message):
        call("lora_grad_a", {**CALL, **changed})


def test_the_choice_names_what_it_needs(monkeypatch):
    monkeypatch.setattr(MODULE, "why_not_csrc", lambda _: None)

    def chosen(capability=(9, 0), **layer):
        return implementations("cuda", LayerOnGPU(capability, **layer))["lora_grad_a"]

    assert chosen()[0] == "csrc" and "K a multiple of 16" in chosen()[1]
    assert chosen(sizes=(64, 72)) == ("torch", "K = 72 must be a multiple of 16")
    assert chosen(sizes=(64, 72), fp8=False)[0] == "csrc"
    assert chosen((7, 5))[0] == "torch"
