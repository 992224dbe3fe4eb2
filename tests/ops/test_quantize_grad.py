# SPDX-License-Identifier: Apache-2.0
"""quantize_grad in one pass: dy8 and amax bit for bit, ds and dB against float64, the same bits every time.

With one projection, and with several side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.device import extension
from lorakernels.numerics.fp8 import quantize
from lorakernels.ops.quantize_grad import by_csrc, by_torch, why_not_csrc_kernel
from lorakernels.values import Scaling, SideBySide, Up

E5M2, E4M3 = torch.float8_e5m2, torch.float8_e4m3fn
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCALING, COLUMN = 0.7, 1
MODULE = sys.modules["lorakernels.ops.quantize_grad"]  # the package has the op under this name


@dataclass
class Case:
    """`each`: columns of projections side by side, negative without an adapter; none: one projection."""

    rows: int
    cols: int
    rank: int
    dtype: torch.dtype = BF16
    b_dtype: torch.dtype = BF16
    fp8: torch.dtype = E5M2
    delayed: bool = True
    scale: float = 3.0
    each: tuple[int, ...] = ()

    def __str__(self) -> str:
        names = [str(t).removeprefix("torch.") for t in (self.dtype, self.b_dtype, self.fp8)]
        mode = f"scale {self.scale:g}" if self.delayed else "eval"
        cols = "+".join(map(str, self.each)) or self.cols
        return f"{self.rows}x{cols}-r{self.rank}-{'-'.join(names)}-{mode}"

    @property
    def side(self) -> SideBySide | None:
        if not self.each:
            return None
        return SideBySide([*map(abs, self.each)], [self.rank if n > 0 else 0 for n in self.each])

    def windows(self) -> Iterator[tuple[slice, slice | None]]:
        """Of each projection: its columns of dy, and of s and ds if it has an adapter."""
        col = column = 0
        for n in self.each or (self.cols,):
            has = n > 0
            yield (
                slice(col, col + abs(n)),
                slice(column, column + self.rank) if has else None,
            )
            col, column = col + abs(n), column + has * self.rank

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dy, B, s and a state whose other entries are NaN: none of them may be read."""
        columns = sum(self.side.ranks) if self.side else self.rank
        shapes = (self.rows, self.cols), (self.cols, self.rank), (self.rows, columns)
        types = self.dtype, self.b_dtype, self.dtype
        dy, b, s = (
            torch.randn(shape, device="cuda").to(dtype)
            for shape, dtype in zip(shapes, types, strict=True)
        )
        state = torch.full((3, 4), torch.nan, device="cuda")
        state[0, COLUMN], state[-1, COLUMN] = 0.0, self.scale
        for cols, window in self.windows():
            if window is None:
                b[cols] = torch.nan
        return dy, b, s, state

    def arguments(
        self, dy: Tensor, b: Tensor | None, s: Tensor | None, state: Tensor | None
    ) -> tuple[object, ...]:
        """The op's."""
        up = None if b is None else Up(b, s, SCALING)
        scaling = None if state is None else Scaling(state, COLUMN, self.delayed)
        return dy, up, scaling, self.fp8, self.side

    def run(self, *operands: Tensor | None) -> tuple[Tensor, ...]:
        arguments = self.arguments(*operands)
        assert ops.quantize_grad.takes(*arguments).run is by_csrc
        return ops.quantize_grad(*arguments)


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
    scaling = Scaling(expected_state, COLUMN, case.delayed)
    dy8, scale_inv = quantize(dy, scaling, case.fp8)
    found8, found_inv, ds, dB = case.run(dy, b, s, state)
    assert_same_bytes(found8, dy8, case.fp8)
    assert torch.equal(found_inv, scale_inv)
    assert torch.equal(state.nan_to_num(7.0), expected_state.nan_to_num(7.0))
    exact_dy, exact_b, exact_s = dy.double(), b.to(dy.dtype).double(), s.double()
    magnitude = exact_dy[exact_dy != 0].abs()
    if not bool(((magnitude > 1e-30) & (magnitude < 1e30)).all()):
        return  # the sums leave the range of normal numbers
    assert ds.dtype == dy.dtype and dB.dtype == b.dtype
    assert ds.shape == s.shape and dB.shape == b.shape
    for cols, window in case.windows():
        if window is None:
            assert not bool(dB[cols].any())
            continue
        d, f, t = exact_dy[:, cols], exact_b[cols], exact_s[:, window]
        size = SCALING * d.abs()
        assert_near(ds[:, window], SCALING * d @ f, size @ f.abs(), d.shape[1])
        assert_near(dB[cols], SCALING * d.t() @ t, size.t() @ t.abs(), case.rows)


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


def side_by_side(rows: int, rank: int, *each: int, **options: object) -> Case:
    return Case(rows, sum(map(abs, each)), rank, each=each, **options)


# Strips of 128 columns (few rows, or a border inside of a wide strip) and wide ones; adapters everywhere, or lacking at
# the start, in the middle, at the end; as many projections as it takes, an empty one; a ragged last one; blocks of the
# grid that begin and end inside of each projection.
SIDE_BY_SIDE = [
    *(side_by_side(500, rank, 384, 128, 128) for rank in (7, 8, 16, 33, 64, 128)),
    *(side_by_side(2100, rank, 4096, 1024, 1024) for rank in (8, 16, 64, 128)),
    *(side_by_side(2100, 16, *each) for each in ((4096, -1024, 1024), (4224, 896, 1024))),
    *(side_by_side(rows, 16, 512, -256, 136) for rows in (0, 1, 200)),
    side_by_side(300, 8, -128, 256, 0, 1000, b_dtype=FP32),
    side_by_side(300, 64, 1024, 512, -8, dtype=FP16, b_dtype=FP32, fp8=E4M3),
    side_by_side(4100, 16, -2048, 2048, dtype=FP16, b_dtype=FP16, delayed=False),
    side_by_side(130, 16, 1000),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES + SIDE_BY_SIDE, ids=str)
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
@pytest.mark.parametrize("rows", [3000, 132 * 128])
def test_side_by_side_equals_one_after_the_other(rows: int) -> None:
    """dy8 and amax as bits; ds too where strips are as wide alone, which needs many rows."""
    case = side_by_side(rows, 16, 2048, -512, 512)
    dy, b, s, state = case.inputs()
    alone = state.clone()
    whole8, whole_inv, ds, dB = case.run(dy, b, s, state)
    for cols, window in case.windows():
        d, own = dy[:, cols].contiguous(), Case(rows, cols.stop - cols.start, 16)
        operands = (None, None) if window is None else (b[cols], s[:, window].contiguous())
        dy8, inv, own_ds, own_dB = own.run(d, *operands, alone)
        assert torch.equal(whole8[:, cols], dy8) and torch.equal(whole_inv, inv)
        if window is None:
            continue
        assert rows < 132 * 128 or torch.equal(ds[:, window], own_ds)
        size = SCALING * d.double().abs()
        weights = size @ b[cols].double().abs(), size.t() @ s[:, window].double().abs()
        pairs = (ds[:, window], own_ds, d.shape[1]), (dB[cols], own_dB, rows)
        for weight, (found, other, terms) in zip(weights, pairs, strict=True):
            # each is within half of this of the exact sum, whose size is that of `other` but for a rounding
            bound = other.double().abs() * torch.finfo(BF16).eps * (1 + 2**-7)
            bound += 2 * weight * torch.finfo(FP32).eps * (terms**0.5 + 4)
            assert bool(((found.double() - other.double()).abs() <= bound).all())
    assert torch.equal(state.nan_to_num(7.0), alone.nan_to_num(7.0))


@pytest.mark.gpu
def test_what_is_not_finite_stays_in_its_projection() -> None:
    case = side_by_side(300, 16, 512, -128, 512)
    dy, b, s, state = case.inputs()
    clean = case.run(dy, b, s, state.clone())
    dy[5, 600], dy[7, 700] = torch.inf, torch.nan  # in the second, the third
    _, _, ds, dB = case.run(dy, b, s, state)
    assert bool(ds[7, 16:].isnan().all()) and bool(dB[700].isnan().all())
    ds[7, 16:], dB[700] = clean[2][7, 16:], clean[3][700]
    assert torch.equal(ds, clean[2]) and torch.equal(dB, clean[3])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        *(Case(1000, 2056, rank) for rank in (16, 64, 128)),
        side_by_side(2100, 16, 4096, -1024, 1024),
        side_by_side(1000, 16, 384, 128, 136),
    ],
    ids=str,
)
def test_same_bits_every_time(case: Case) -> None:
    inputs = case.inputs()
    first = case.run(*inputs)
    for _ in range(20):
        again = case.run(*inputs)
        assert all(map(torch.equal, first, again))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [Case(300, 1032, 16), side_by_side(300, 16, 512, -256, 264)], ids=str
)
def test_what_is_not_asked_for_is_empty(case: Case) -> None:
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
@pytest.mark.parametrize(
    "case",
    [
        *(Case(300, 1032, rank, b_dtype=FP32) for rank in (16, 33)),
        side_by_side(300, 16, 512, -256, 264, b_dtype=FP32),
        side_by_side(2100, 16, -1024, 4096, 1032, b_dtype=FP32),
    ],
    ids=str,
)
def test_nothing_is_written_beside_the_results(case: Case) -> None:
    """Every result lies between guards; scratch is exactly what quantize_grad_workspace asks for, its old bytes not
    read."""
    guards, sizes = [], []
    dy, b, s, state = case.inputs()
    expected = case.run(dy, b, s, state)
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
        found = by_csrc(*case.arguments(dy, b, s, state))
    assert all(map(torch.equal, found, expected))
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
    case = Case(300, 1032, 16)
    dy, b, s, state = case.inputs()
    dy, b, s = change(dy, b, s)
    assert reason in why_not_csrc_kernel(dy, Up(b, s, SCALING))
    arguments = case.arguments(dy, b, s, state)
    assert ops.quantize_grad.takes(*arguments).run is by_torch
    expected = ops.quantize_grad.reference(*case.arguments(dy, b, s, state.clone()))
    found = ops.quantize_grad(*arguments)
    assert_same_bytes(found[0], expected[0], E5M2)
    for a, e in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-1)  # two roundings to bf16


@pytest.mark.gpu
@pytest.mark.parametrize("each", [(500, 100, 424), (128, 128, -128, 256, 128)], ids=str)
def test_side_by_side_what_it_does_not_take_goes_through_torch(each: tuple[int, ...]) -> None:
    case = side_by_side(300, 16, *each)
    dy, b, s, state = case.inputs()
    arguments = case.arguments(dy, b, s, state)
    assert ops.quantize_grad.takes(*arguments).run is by_torch
    expected = ops.quantize_grad.reference(*case.arguments(dy, b, s, state.clone()))
    found = ops.quantize_grad(*arguments)
    assert_same_bytes(found[0], expected[0], E5M2)
    for a, e in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-1)  # two roundings to bf16


def test_why_side_by_side_goes_through_torch() -> None:
    dy, up = torch.zeros(2, 648, dtype=BF16), Up(torch.zeros(648, 8), None, 1.0)
    with (
        mock.patch.object(MODULE, "capability_of", return_value=(9, 0)),
        mock.patch.object(MODULE, "why_not_wgmma", return_value=None),
    ):
        assert why_not_csrc_kernel(dy, up) is None
        for rows in ([648], [128, 520], [0, 128, 384, 136], [384, 264], [640, 0, 8]):
            assert why_not_csrc_kernel(dy, up, SideBySide(rows, [8] * len(rows))) is None
        for rows, reason in (
            ([64, 584], "rows [64, 584] before the last must be multiples of 128"),
            ([128] * 4 + [136], "5 projections are more than 4"),
        ):
            side = SideBySide(rows, [8] * len(rows))
            assert why_not_csrc_kernel(dy, up, side) == reason
            assert why_not_csrc_kernel(dy, None, side) is None


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


FORMS = {"reference": ops.quantize_grad.reference, "torch": by_torch, "op": ops.quantize_grad}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("each", [(3, 2), (4, -3, 2), (-1, 5, 0, 2, -2)], ids=str)
def test_side_by_side_equals_the_block_diagonal(
    each: tuple[int, ...], dtype: torch.dtype, form: str
) -> None:
    """Small integers: every sum and product is exact, in any order and any of the types."""
    rank, case = 3, Case(6, sum(map(abs, each)), 3, each=each)
    dy, b = (torch.randint(-3, 4, (n, m)).float() for n, m in ((6, case.cols), (case.cols, rank)))
    s = torch.randint(-3, 4, (6, sum(case.side.ranks))).to(dtype)
    whole = torch.zeros(case.cols, s.shape[1])
    for cols, window in case.windows():
        if window is not None:
            whole[cols, window] = b[cols]
        else:
            b[cols] = torch.nan
    scaling = (Scaling(torch.ones(2, 2), 0, True), E5M2)
    dy = dy.to(dtype)
    expected = ops.quantize_grad.reference(dy, Up(whole, s, 2.0), *scaling)
    dy8, _, ds, dB = FORMS[form](dy, Up(b, s, 2.0), *scaling, case.side)
    assert torch.equal(dy8, expected[0]) and torch.equal(ds, expected[2])
    assert ds.dtype == dtype and dB.dtype == FP32 and dB.shape == b.shape
    for cols, window in case.windows():
        assert torch.equal(
            dB[cols], torch.zeros_like(b[cols]) if window is None else expected[3][cols, window]
        )
    without_s = FORMS[form](dy, Up(b, None, 2.0), *scaling, case.side)
    assert torch.equal(without_s[2], ds) and without_s[3].numel() == 0


@pytest.mark.parametrize(
    ("rows", "ranks", "message"),
    [
        ([4, 4], [2], r"rows and ranks must be of one length, found \[4, 4\] and \[2\]"),
        (None, [2, 2], "rows and ranks must be of one length"),
        ([4, 5], [2, 2], r"rows must sum to dy's 8 columns, found \[4, 5\]"),
        ([9, -1], [2, 2], "rows must sum to dy's 8 columns"),
        ([4, 4], [2, 1], r"ranks must be one rank R > 0, or 0 without an adapter, found \[2, 1\]"),
        ([4, 4], [0, 0], "ranks must be one rank"),
        ([4, 4], [3, 0], r"lora_B must be \[8, 3\] .* found \[8, 2\]"),
        ([4, 4], [2, 0], r"s must be \[5, 2\] .* found \[5, 4\]"),
    ],
)
@pytest.mark.parametrize("op", [ops.quantize_grad, ops.quantize_grad.run], ids=["cpu", "cuda"])
def test_what_does_not_fit_is_refused(op, rows, ranks, message: str) -> None:
    dy, b, s, state = torch.ones(5, 8), torch.ones(8, 2), torch.ones(5, 4), torch.zeros(2, 1)
    with pytest.raises(ValueError, match=message):
        op(dy, Up(b, s, 1.0), Scaling(state, 0, True), E5M2, SideBySide(rows, ranks))
    assert not bool(state.any())


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
