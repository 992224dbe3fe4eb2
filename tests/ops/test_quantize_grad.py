# SPDX-License-Identifier: Apache-2.0
"""quantize_grad of projections side by side, of what is not asked for, its workspace and the binding's refusals.

tests/ops/cases/quantize_grad.py has the rest.
"""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.device import extension
from lorakernels.numerics.fp8 import quantize
from lorakernels.ops.quantize_grad import Grad, by_csrc, by_torch, why_not_csrc_operands
from lorakernels.values import Scaling, SideBySide, Up
from tests.ops.cases.quantize_grad import SCALING, made, side_of, windows
from tests.ops.contract import BF16, E5M2, FP16, FP32, Made

MODULE = sys.modules["lorakernels.ops.quantize_grad"]  # the package has the op under this name


def run(*arguments: object) -> tuple[Tensor, ...]:
    assert ops.quantize_grad.takes(*arguments).run is by_csrc
    return ops.quantize_grad(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3000, 132 * 128])
def test_side_by_side_equals_one_after_the_other(rows: int) -> None:
    """dy8 and amax as bits; ds too where strips are as wide alone, which needs many rows."""
    dy, up, scaling, fp8, side, _ = made((2048, -512, 512), 16, Made("cuda", rows))
    alone = scaling._replace(state=scaling.state.clone())
    whole8, whole_inv, ds, dB, _ = run(dy, up, scaling, fp8, side)
    for cols, window in windows(side):
        d = dy[:, cols].contiguous()
        own = None if window is None else Up(up.lora_B[cols], up.s[:, window].contiguous(), SCALING)
        dy8, inv, own_ds, own_dB, _ = run(d, own, alone, fp8)
        assert torch.equal(whole8[:, cols], dy8) and torch.equal(whole_inv, inv)
        if own is None:
            continue
        assert rows < 132 * 128 or torch.equal(ds[:, window], own_ds)
        size = SCALING * d.double().abs()
        weights = size @ own.lora_B.double().abs(), size.t() @ own.s.double().abs()
        pairs = (ds[:, window], own_ds, d.shape[1]), (dB[cols], own_dB, rows)
        for weight, (found, other, terms) in zip(weights, pairs, strict=True):
            # each is within half of this of the exact sum, whose size is that of `other` but for a rounding
            bound = other.double().abs() * torch.finfo(BF16).eps * (1 + 2**-7)
            bound += 2 * weight * torch.finfo(FP32).eps * (terms**0.5 + 4)
            assert bool(((found.double() - other.double()).abs() <= bound).all())
    assert torch.equal(scaling.state, alone.state)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 16, 64, 128])
@pytest.mark.parametrize("n", [1032, 4096])
def test_a_captured_scale_may_be_set_later(n: int, rank: int) -> None:
    """The launches are the same. Without a scale dy8 is made after the amax, and ds and dB have the same bits."""
    arguments = made(n, rank, Made("cuda", 300), kind="unset")
    dy, _, (state, column, _), fp8, *_ = arguments
    run(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dy8, scale_inv, ds, dB, _ = run(*arguments)
    known = []
    for scale in (0.0, 96.0, torch.nan, -1.0, 0.5):
        state[-1, column], state[0, column] = scale, 0.25
        expected = state.clone()
        graph.replay()
        known.append((ds.clone(), dB.clone()))
        bytes_, inverse = quantize(dy, Scaling(expected, column, True), fp8)
        assert torch.equal(dy8, bytes_) and torch.equal(scale_inv, inverse), scale
        assert torch.equal(state.nan_to_num(-2.0), expected.nan_to_num(-2.0))
    assert all(all(map(torch.equal, each, known[0])) for each in known)


@pytest.mark.gpu
def test_what_is_not_finite_stays_in_its_projection() -> None:
    dy, up, scaling, *others = made((512, -128, 512), 16, Made("cuda", 300))
    clean = run(dy, up, scaling._replace(state=scaling.state.clone()), *others)
    dy[5, 600], dy[7, 700] = torch.inf, torch.nan  # in the second, the third
    _, _, ds, dB, _ = run(dy, up, scaling, *others)
    assert bool(ds[7, 16:].isnan().all()) and bool(dB[700].isnan().all())
    ds[7, 16:], dB[700] = clean[2][7, 16:], clean[3][700]
    assert torch.equal(ds, clean[2]) and torch.equal(dB, clean[3])


@pytest.mark.gpu
@pytest.mark.parametrize("each", [1032, (512, -256, 264)], ids=str)
def test_what_is_not_asked_for_is_empty(each: int | tuple[int, ...]) -> None:
    dy, up, *others = made(each, 16, Made("cuda", 300))
    whole = run(dy, up, *others)
    without_b, without_s = run(dy, None, *others), run(dy, up._replace(s=None), *others)
    without_state = run(dy, up, None, *others[1:])
    for found, kept in ((without_b, 2), (without_s, 3)):
        assert all(map(torch.equal, found[:kept], whole[:kept]))
        assert all(t.numel() == 0 for t in found[kept:])
    assert all(t.numel() == 0 for t in without_state[:2])
    assert all(map(torch.equal, without_state[2:], whole[2:]))
    assert all(t.numel() == 0 for t in run(dy, None, None, *others[1:]))


def test_why_side_by_side_goes_through_torch() -> None:
    dy, up = torch.zeros(2, 648, dtype=BF16), Up(torch.zeros(648, 8), None, 1.0)
    with (
        mock.patch.object(MODULE, "capability_of", return_value=(9, 0)),
        mock.patch.object(MODULE, "why_not_wgmma", return_value=None),
    ):
        assert why_not_csrc_operands(dy, up) is None
        for rows in ([648], [128, 520], [0, 128, 384, 136], [384, 264], [640, 0, 8]):
            assert why_not_csrc_operands(dy, up, SideBySide(rows, [8] * len(rows))) is None
        for rows, reason in (
            ([64, 584], "rows [64, 584] before the last must be multiples of 128"),
            ([128] * 4 + [136], "5 projections are more than 4"),
        ):
            side = SideBySide(rows, [8] * len(rows))
            assert why_not_csrc_operands(dy, up, side) == reason
            assert why_not_csrc_operands(dy, None, side) is None


@pytest.mark.parametrize(
    ("rows", "ranks", "is_taken"),
    [
        ([128, 8], [16, 16], True),
        ([128, 384, 128, 8], [0, 16, 0, 16], True),
        ([64, 128], [16, 16], False),
        ([128] * 5, [16] * 5, False),
        ([128, 128], [16, 8], False),
        ([128, 128], [0, 0], False),
    ],
    ids=str,
)
def test_what_stands_side_by_side(rows: list[int], ranks: list[int], is_taken: bool) -> None:
    assert MODULE.side_by_side(SideBySide(rows, ranks)) == is_taken


FORMS = {
    "reference": ops.quantize_grad.by_reference,
    "torch": lambda *arguments: by_torch(Grad(*arguments)),
    "op": ops.quantize_grad,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("each", [(3, 2), (4, -3, 2), (-1, 5, 0, 2, -2)], ids=str)
def test_side_by_side_equals_the_block_diagonal(
    each: tuple[int, ...], dtype: torch.dtype, form: str
) -> None:
    """Small integers: every sum and product is exact, in any order and any of the types."""
    side, n = side_of(each, 3), sum(map(abs, each))
    dy, b = (torch.randint(-3, 4, shape).float() for shape in ((6, n), (n, 3)))
    s = torch.randint(-3, 4, (6, sum(side.ranks))).to(dtype)
    whole = torch.zeros(n, s.shape[1])
    for cols, window in windows(side):
        if window is not None:
            whole[cols, window] = b[cols]
        else:
            b[cols] = torch.nan
    scaling = (Scaling(torch.ones(2, 2), 0, True), E5M2)
    dy = dy.to(dtype)
    expected = ops.quantize_grad.by_reference(dy, Up(whole, s, 2.0), *scaling)
    dy8, _, ds, dB, _ = FORMS[form](dy, Up(b, s, 2.0), *scaling, side)
    assert torch.equal(dy8, expected[0]) and torch.equal(ds, expected[2])
    assert ds.dtype == dtype and dB.dtype == FP32 and dB.shape == b.shape
    for cols, window in windows(side):
        assert torch.equal(
            dB[cols], torch.zeros_like(b[cols]) if window is None else expected[3][cols, window]
        )
    without_s = FORMS[form](dy, Up(b, None, 2.0), *scaling, side)
    assert torch.equal(without_s[2], ds) and without_s[3].numel() == 0


def test_workspace_and_refusals() -> None:
    ext = extension()
    assert ext.quantize_grad_workspace(1000, 64, 0, True, 132) == 0
    panels = 132  # as many as multiprocessors: then strips are 512 columns wide, of 16 ranks
    with_dB, without = (
        ext.quantize_grad_workspace(128 * panels, 512, 16, has, 132) for has in (True, False)
    )
    assert without == panels * 128 * 16 and with_dB == without + panels * 512 * 16
    # fewer rows: 4 strips of 128 columns, a share of ds and a block to each; segments = blocks + strips - 1
    with_dB, without = (
        ext.quantize_grad_workspace(128, 512, 16, has, 132) for has in (True, False)
    )
    assert without == 4 * 128 * 16 and with_dB == without + 7 * 128 * 16
    # more multiprocessors than panels: narrow strips once more
    assert ext.quantize_grad_workspace(128 * panels, 512, 16, False, 133) == 4 * panels * 128 * 16
    with pytest.raises(ValueError, match="multiprocessors must be at least 1, got 0"):
        ext.quantize_grad_workspace(128, 512, 16, True, 0)
    for sizes, message in (
        ((1, 12, 16), "cols must be a multiple of 8"),
        ((1, 8, 129), "rank at most 128"),
        ((-1, 8, 1), "rows must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            ext.quantize_grad_workspace(*sizes, True, 132)
    # side by side: wide strips where each begins one, else narrow ones, of one adapter's ranks each way
    tall = 128 * panels, 1024, 16, False, 132
    assert ext.quantize_grad_workspace(*tall, [(512, 16), (512, 0)]) == 2 * panels * 128 * 16
    assert ext.quantize_grad_workspace(*tall, [(640, 16), (384, 0)]) == 8 * panels * 128 * 16
    for projections, message in (
        ([(128, 16)] * 5, "at most 4, got 5"),
        ([(64, 16), (448, 16)], "begin at multiples of 128"),
        ([(128, 16), (128, 16)], "512 columns together"),
        ([(512, 16), (128, 16)], "512 columns together"),
        ([(-128, 16), (640, 16)], "512 columns together"),
        ([(128, 16), (384, 8)], "rank 0 or 16"),
    ):
        with pytest.raises(ValueError, match=message):
            ext.quantize_grad_workspace(128, 512, 16, True, 132, projections)
