# SPDX-License-Identifier: Apache-2.0
"""quantize_grad in one pass: dy8 and amax bit for bit, ds and dB against float64, the same bits every time."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from lorakernels import kernels, ops, reference
from lorakernels.device import extension
from lorakernels.kernels import ladder

E5M2, E4M3 = torch.float8_e5m2, torch.float8_e4m3fn
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCALING, COLUMN = 0.7, 1
# module `quantize_grad`, which the function of that name hides
MODULE = sys.modules[kernels.quantize_grad.__module__]


@dataclass
class Case:
    rows: int
    cols: int
    rank: int
    dtype: torch.dtype = BF16
    b_dtype: torch.dtype = BF16
    fp8: torch.dtype = E5M2
    delayed: bool = True
    scale: float = 3.0

    def __str__(self) -> str:
        names = [str(t).removeprefix("torch.") for t in (self.dtype, self.b_dtype, self.fp8)]
        mode = f"scale {self.scale:g}" if self.delayed else "eval"
        return f"{self.rows}x{self.cols}-r{self.rank}-{'-'.join(names)}-{mode}"

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dy, B, s and a state whose other entries are NaN: none of them may be read."""
        shapes = (self.rows, self.cols), (self.cols, self.rank), (self.rows, self.rank)
        types = self.dtype, self.b_dtype, self.dtype
        dy, b, s = (
            torch.randn(shape, device="cuda").to(dtype)
            for shape, dtype in zip(shapes, types, strict=True)
        )
        state = torch.full((3, 4), torch.nan, device="cuda")
        state[0, COLUMN], state[-1, COLUMN] = 0.0, self.scale
        return dy, b, s, state

    def run(
        self, dy: Tensor, b: Tensor | None, s: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, ...]:
        assert ladder.why_not_one_pass(dy, b, s) is None
        with mock.patch.object(MODULE, "in_torch", side_effect=AssertionError("not in one pass")):
            return ops.quantize_grad(dy, b, s, state, COLUMN, self.delayed, SCALING, self.fp8)


def assert_same_bytes(found: Tensor, expected: Tensor, fp8: torch.dtype) -> None:
    """Bit for bit; of a NaN, which has a sign and may have several patterns, only that it is one."""
    nan = expected.view(fp8).float().isnan()
    assert torch.equal(found[~nan], expected[~nan])
    assert bool(found.view(fp8).float()[nan].isnan().all())


def assert_near(found: Tensor, exact: Tensor, size: Tensor, terms: int) -> None:
    """One rounding to found's dtype, and fp32 sums of `terms` products, each of which may lose an eps of its size."""
    info = torch.finfo(found.dtype)
    bound = exact.abs() * info.eps / 2 + size * torch.finfo(FP32).eps * (terms**0.5 + 4)
    assert found.shape == exact.shape
    assert bool(((found.double() - exact).abs() <= bound + info.smallest_normal * info.eps).all())


def check(case: Case, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    dy, b, s, state = inputs
    expected_state = state.clone()
    dy8, scale_inv = reference.quantize(dy, expected_state, COLUMN, case.delayed, case.fp8)
    found8, found_inv, ds, dB = case.run(dy, b, s, state)
    assert_same_bytes(found8, dy8, case.fp8)
    assert torch.equal(found_inv, scale_inv)
    assert torch.equal(state.nan_to_num(7.0), expected_state.nan_to_num(7.0))
    exact_dy, exact_b, exact_s = dy.double(), b.to(dy.dtype).double(), s.double()
    magnitude = exact_dy[exact_dy != 0].abs()
    if not bool(((magnitude > 1e-30) & (magnitude < 1e30)).all()):
        return  # the sums leave the range of normal numbers
    assert ds.dtype == dy.dtype and dB.dtype == b.dtype
    scaled, size = SCALING * exact_dy, SCALING * exact_dy.abs()
    assert_near(ds, scaled @ exact_b, size @ exact_b.abs(), case.cols)
    assert_near(dB, scaled.t() @ exact_s, size.t() @ exact_s.abs(), case.rows)


# Every rank that is padded or not, rows and columns on both sides of a tile (128), of a strip (512; 256 for rank 128)
# and of a run of panels; each dtype, format and source of the scale at least once with each kind of shape.
CASES = [
    *(Case(500, 1000, rank) for rank in (1, 7, 16, 33, 64, 128)),
    *(Case(rows, 1000, 16) for rows in (0, 1, 15, 16, 4100)),
    *(Case(500, cols, 16) for cols in (8, 16, 4096)),
    *(Case(4100, 4096, rank, b_dtype=FP32) for rank in (8, 24, 64, 128)),
    Case(0, 8, 128, delayed=False),
    Case(1, 8, 1, fp8=E4M3, scale=0.0),
    Case(16, 1000, 33, FP16, FP32, E4M3),
    Case(4100, 4096, 16, FP16, FP16, E4M3, delayed=False),
    Case(4100, 1000, 128, FP16, BF16, E5M2, scale=0.0),
    Case(500, 4096, 7, BF16, FP16, E4M3, delayed=False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference_and_float64(case: Case) -> None:
    check(case, case.inputs())


@pytest.mark.gpu
@pytest.mark.parametrize("delayed", [True, False], ids=["delayed", "eval"])
@pytest.mark.parametrize("fp8", [E5M2, E4M3], ids=["e5m2", "e4m3"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-0", "2e-40", "3e38"])
def test_special_values(value: str, fp8: torch.dtype, delayed: bool) -> None:
    """One in a tensor of random numbers, and a tensor of nothing else."""
    case = Case(130, 528, 16, fp8=fp8, delayed=delayed)
    inputs = case.inputs()
    inputs[0][129, 527] = float(value)
    check(case, inputs)
    inputs[0].fill_(float(value))
    inputs[3][0, COLUMN] = 0.0
    check(case, inputs)


@pytest.mark.gpu
def test_amax_only_rises_and_nan_stays() -> None:
    case = Case(128, 512, 16)
    dy, b, s, state = case.inputs()
    for recorded in (1e4, torch.inf, torch.nan):
        state[0, COLUMN] = recorded
        case.run(dy, b, s, state)
        torch.testing.assert_close(
            state[0, COLUMN].item(), recorded, rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 64, 128], ids="r{}".format)
def test_same_bits_every_time(rank: int) -> None:
    case = Case(1000, 2056, rank)
    inputs = case.inputs()
    first = case.run(*inputs)
    for _ in range(20):
        again = case.run(*inputs)
        assert all(map(torch.equal, first, again))


@pytest.mark.gpu
def test_what_is_not_asked_for_is_empty() -> None:
    case = Case(300, 1032, 16)
    dy, b, s, state = case.inputs()
    whole = case.run(dy, b, s, state)
    without_b = case.run(dy, None, s, state)
    without_s = case.run(dy, b, None, state)
    without_state = case.run(dy, b, s, None)
    for found, kept in ((without_b, 2), (without_s, 3)):
        assert all(map(torch.equal, found[:kept], whole[:kept]))
        assert all(t.numel() == 0 for t in found[kept:])
    assert all(t.numel() == 0 for t in without_state[:2])
    assert all(map(torch.equal, without_state[2:], whole[2:]))
    assert all(t.numel() == 0 for t in case.run(dy, None, None, None))


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 33], ids="r{}".format)
def test_nothing_is_written_beside_the_results(rank: int) -> None:
    """Every result lies between guards; scratch is exactly what quantize_grad_workspace asks for."""
    case, guards, sizes = Case(300, 1032, rank, b_dtype=FP32), [], []
    dy, b, s, state = case.inputs()
    empty = torch.empty

    def guarded(*size: object, **options: object) -> Tensor:
        shape = size[0] if isinstance(size[0], tuple) else size
        dtype = options.get("dtype", FP32)
        count = torch.Size(shape).numel() * dtype.itemsize
        room = empty(count + 512, dtype=torch.uint8, device="cuda").fill_(0xA5)
        guards.append(room)
        sizes.append(count)
        return room[256 : 256 + count].view(dtype).view(shape)

    with (
        mock.patch.object(MODULE.torch, "empty", guarded),
        mock.patch.object(MODULE.torch, "empty_like", lambda t: guarded(*t.shape, dtype=t.dtype)),
    ):
        MODULE.in_one_pass(dy, b, s, state, COLUMN, True, SCALING, E5M2)
    assert len(guards) == 5  # dy8, scale_inv, ds, dB, scratch
    for room, count in zip(guards, sizes, strict=True):
        edges = torch.cat((room[:256], room[256 + count :]))
        assert bool((edges == 0xA5).all())


@pytest.mark.gpu
def test_captured_it_reads_the_scale_of_the_replay() -> None:
    case = Case(256, 1024, 16)
    dy, b, s, state = case.inputs()
    case.run(dy, b, s, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.run(dy, b, s, state)
    for scale in (0.0, 5.0):
        dy.normal_()
        state[0, COLUMN], state[-1, COLUMN] = 0.0, scale
        graph.replay()
        expected = case.run(dy, b, s, state)
        assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda dy, b, s: (dy.float(), b, s.float()), "float32"),
        (lambda dy, b, s: (dy[:, :-1].contiguous(), b[:-1], s), "N = 1031"),
        (lambda dy, b, s: (dy.t().contiguous().t(), b, s), "strides"),
        (lambda dy, b, s: (dy, b.repeat(1, 9), s.repeat(1, 9)), "rank 144"),
    ],
    ids=["fp32", "odd N", "strides", "rank"],
)
def test_what_it_does_not_take_goes_through_torch(change, reason: str) -> None:
    dy, b, s, state = Case(300, 1032, 16).inputs()
    dy, b, s = change(dy, b, s)
    assert reason in ladder.why_not_one_pass(dy, b, s)
    expected = reference.quantize_grad(dy, b, s, state.clone(), COLUMN, True, SCALING, E5M2)
    found = ops.quantize_grad(dy, b, s, state, COLUMN, True, SCALING, E5M2)
    assert_same_bytes(found[0], expected[0], E5M2)
    for a, e in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-1)  # two roundings to bf16


def test_workspace_and_refusals() -> None:
    ext = extension()
    assert ext.quantize_grad_workspace(1000, 64, 0, True) == 0
    panels = 132  # as many as blocks: then strips are 512 columns wide, of 16 ranks
    with_dB, without = (
        ext.quantize_grad_workspace(128 * panels, 512, 16, has) for has in (True, False)
    )
    assert without == panels * 128 * 16 and with_dB == without + panels * 512 * 16
    # fewer rows: 4 strips of 128 columns, a share of ds and a block to each; segments = blocks + strips - 1
    with_dB, without = (ext.quantize_grad_workspace(128, 512, 16, has) for has in (True, False))
    assert without == 4 * 128 * 16 and with_dB == without + 7 * 128 * 16
    for sizes, message in (
        ((1, 12, 16), "cols must be a multiple of 8"),
        ((1, 8, 129), "rank at most 128"),
        ((-1, 8, 1), "rows must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            ext.quantize_grad_workspace(*sizes, True)
