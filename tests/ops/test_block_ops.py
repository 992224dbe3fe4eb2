# SPDX-License-Identifier: Apache-2.0
"""Beyond the contract of products in blocks: PyTorch's way of a GPU on the CPU, and what scales are for."""

from __future__ import annotations

import random

import pytest
import torch

from lorakernels import ops
from lorakernels.device import capability
from lorakernels.kernels import tune
from lorakernels.numerics.blocks import dequantize_rows, quantize_rows
from lorakernels.numerics.dropout import drawn_mask, dropped_bits
from lorakernels.ops import Scaled
from lorakernels.ops.register import OPS
from tests.dry_cuda import dry_cuda
from tests.ops.cases import CONTRACTS
from tests.ops.cases.fp8_grad_input import in_blocks as grad
from tests.ops.cases.fp8_linear_lora import in_blocks as linear
from tests.ops.contract import BF16, E4M3, E5M2, FP16, FP32, Call, Case, cloned, tensors

LAUNCHES = {"fp8_linear_lora": "fp8_block_linear", "fp8_grad_input": "fp8_block_grad_input"}
NAMES = tuple(LAUNCHES)
CASES = [(name, case) for name in NAMES for case in CONTRACTS[name].cases if "in blocks" in case]
ROUNDINGS = 4  # both operands, the product, and the terms after it


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_pytorch_s_way_is_within_the_bound(name, case):
    """On a GPU without a kernel of ours. On a CPU the reference runs instead, in fp32."""
    contract = CONTRACTS[name]
    arguments = contract.cases[case].arguments("cpu", rows=40)
    before = cloned(arguments)
    by_torch = next(i for i in contract.op.implementations if i.name == "dequantized")
    results = by_torch.run(contract.op.arguments(*arguments))
    done = Call(before, arguments, tuple(tensors(results)), ROUNDINGS)
    assert all(each.is_right() for each in contract.bound(done))
    assert all(map(torch.equal, tensors(arguments), tensors(before))), "operands are left alone"


@pytest.mark.parametrize("seed", range(200))
def test_products_of_random_sizes_are_within_the_bound(seed, device, monkeypatch):
    """Both products in turns, in tiles of any shape, with all that they may add. A CPU takes the first few."""
    if device.type == "cpu" and seed >= 12:
        pytest.skip("the kernels of a GPU are what so many sizes are for")
    draw = random.Random(seed)
    rows = draw.choice([draw.randint(1, 40), draw.randint(41, 700), 128 * draw.randint(1, 9)])
    n, k = (16 * draw.randint(1, 130 if device.type == "cuda" else 20) for _ in range(2))
    ranks = draw.randint(1, 16), draw.randint(17, 64), draw.randint(65, 300)  # above 64 in steps
    rank = draw.choice([0, *ranks])
    dtype, factor = draw.choice([BF16, FP16]), draw.choice([BF16, FP32])
    name = NAMES[seed % 2]
    tile = draw.choice(list(tune.CSRC_TILES["blocks"]))
    monkeypatch.setattr(tune, "csrc_tile", lambda *_: (tile, 1.0))
    if name == "fp8_linear_lora":
        bias = draw.choice([None, FP32, dtype])
        make = linear(n, k, rank, bias, factor, dtype, residual=draw.random() < 0.5)
    else:
        p, fp8 = draw.choice([0.0, 0.1, 0.7]), draw.choice([E4M3, E5M2])
        make = grad(k, n, rank, p if rank else 0.0, dtype, factor, fp8)
    arguments = Case(make, rows).arguments(device)
    op, before = CONTRACTS[name].op, cloned(arguments)
    if device.type == "cuda" and capability(0) == (9, 0):
        assert op.takes(*arguments) is op.implementations[0]
    done = Call(before, arguments, tuple(tensors(op(*arguments))), 1)
    for each in CONTRACTS[name].bound(done):
        assert each.is_right(), (make, rows)


@pytest.mark.parametrize("handed", [False, True], ids=["drawn", "handed over"])
@pytest.mark.parametrize("rank", [16, 17, 70, 192], ids="r{}".format)
@pytest.mark.parametrize("origin", [(0, 0), (1001, 4104)], ids=["whole", "shard"])
@pytest.mark.parametrize("tile", [*tune.CSRC_TILES["blocks"]], ids="{0[0]}x{0[1]}".format)
def test_the_mask_in_blocks_is_the_reference_s_bit_for_bit(
    tile, origin, rank, handed, device, monkeypatch
):
    """dy = 0, ds and A of ones: dx is 0 where the branch is dropped, and elsewhere rank / (1 − p), exact in bf16.

    The tiles hang over the last row and the last column. Ranks above 64 come in steps. The mask is drawn, or read.
    """
    monkeypatch.setattr(tune, "csrc_tile", lambda *_: (tile, 1.0))
    rows, k = 3 * 128 + 77, 2 * 256 + 80
    made = Case(grad(k, 144, rank, p=0.5), rows).arguments(device)
    dy, fp8, weight, ds, lora_A, dropout, dtype, _ = made
    for x, value in ((dy.data, 0), (ds, 1), (lora_A, 1)):
        x.fill_(value)
    dropout = dropout._replace(row0=origin[0], col0=origin[1])
    keep = drawn_mask(dropout, rows, k)
    if handed:
        dropout = dropout._replace(dropped=dropped_bits(keep))
    dx = ops.fp8_grad_input(dy, fp8, weight, ds, lora_A, dropout, dtype)
    assert torch.equal(dx, (keep * (2.0 * rank)).to(BF16))


@pytest.mark.parametrize("name", NAMES)
def test_csrc_s_kernels_get_no_factors_of_several_adapters(name):
    """They have none for each segment of rows, and would take the first adapter's for all."""
    arguments = CONTRACTS[name].cases["in blocks, several"].arguments("cpu", rows=256)
    with dry_cuda() as recorded:
        OPS[name](*arguments)
    (launch,) = (call.arguments for call in recorded.calls if call.name == LAUNCHES[name])
    factors = ("B", "s") if name == "fp8_linear_lora" else ("A", "ds")
    assert [launch[f] for f in (*factors, "rank", "segment_rows")] == [None, None, 0, 0]


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_a_block_s_largest_magnitude_is_the_format_s(fp8):
    x = torch.randn(5, 300) * 10.0 ** torch.randint(-6, 6, (5, 1))
    data, scale_inv = ops.quantize_blocks(x, fp8)
    for j, block in enumerate(data.view(fp8).float().split(128, 1)):
        assert (block.abs().amax(1) == torch.finfo(fp8).max).all()
        amax = x.split(128, 1)[j].abs().amax(1)
        # fp8_max / amax and its inverse are rounded once each
        torch.testing.assert_close(scale_inv[j], amax / torch.finfo(fp8).max, rtol=2**-22, atol=0.0)


def test_an_outlier_costs_its_own_block_alone():
    """With one scale for the tensor, it would push the others below e4m3's least step."""
    x = torch.randn(3, 256) * 1e-4
    x[1, 7] = 1e4
    found = dequantize_rows(quantize_rows(x, E4M3))
    # 2⁻⁴ of the value, or half of e4m3's least step 2⁻⁹ where the block's amax is 448
    least = 2.0**-10 * x.abs().amax() / 448
    wrong = (found - x).abs() > 2.0**-4 * x.abs() + 2.0**-10 * 1e-3 / 448
    assert not wrong[[0, 2]].any() and not wrong[1, 128:].any()
    assert ((found - x).abs()[1] <= 2.0**-4 * x[1].abs() + least).all() and wrong[1, :128].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dequantized_to_16_bits_each_value_is_rounded_once(dtype):
    x = quantize_rows(torch.randn(7, 200), E4M3)
    assert torch.equal(dequantize_rows(x, dtype=dtype), dequantize_rows(x).to(dtype))


def test_scales_of_rows_lie_side_by_side():
    x8, scale_inv = ops.quantize_blocks(torch.randn(40, 300), E4M3)
    assert scale_inv.shape == (3, 40) and scale_inv.is_contiguous() and x8.is_contiguous()
    exact = dequantize_rows(Scaled(x8[9:10].contiguous(), scale_inv[:, 9:10].contiguous()))
    assert torch.equal(dequantize_rows(Scaled(x8, scale_inv))[9:10], exact)
