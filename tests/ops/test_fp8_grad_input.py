# SPDX-License-Identifier: Apache-2.0
"""fp8_grad_input in one kernel: dx against float64, its mask bit for bit, the same bits every time."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.kernels import tune
from lorakernels.numerics.dropout import drawn_mask, dropped_bits, keep_scale
from lorakernels.ops.fp8_grad_input import by_csrc, why_not_csrc_kernel
from lorakernels.values import Dropout, Scaled, Weight

E5M2, E4M3 = torch.float8_e5m2, torch.float8_e4m3fn
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SITE = 11


@dataclass(frozen=True)
class Case:
    """dx [rows, cols], contraction over `depth`."""

    rows: int
    cols: int
    depth: int
    rank: int
    p: float = 0.1
    dtype: torch.dtype = BF16
    a_dtype: torch.dtype = FP32
    fp8: torch.dtype = E5M2
    keeps_weight_t: bool = False
    split: bool = True

    def __str__(self) -> str:
        types = [str(t).removeprefix("torch.") for t in (self.dtype, self.a_dtype, self.fp8)]
        layout = ("both" if self.keeps_weight_t else "single") + ("" if self.split else "-fast")
        return f"{self.rows}x{self.cols}x{self.depth}-r{self.rank}-p{self.p:g}-{'-'.join(types)}-{layout}"

    def inputs(self) -> dict[str, Tensor]:
        tensors = {
            "dy": torch.randn(self.rows, self.depth, device="cuda").to(self.fp8),
            "weight": torch.randn(self.depth, self.cols, device="cuda").to(E4M3),
            "ds": torch.randn(self.rows, self.rank, device="cuda").to(self.dtype),
            "lora_A": torch.randn(self.rank, self.cols, device="cuda").to(self.a_dtype),
            "dy_scale_inv": torch.rand(1, device="cuda") + 0.1,
            "weight_scale_inv": torch.rand(1, device="cuda") + 0.1,
            "slot": torch.tensor([2**40 + 77, 2**33 + 5], device="cuda"),
        }
        return {
            name: t.view(torch.uint8) if t.element_size() == 1 else t for name, t in tensors.items()
        }

    def arguments(
        self,
        tensors: dict[str, Tensor],
        row0: int = 0,
        col0: int = 0,
        dropped: Tensor | None = None,
    ) -> tuple:  # type: ignore[type-arg]
        """Of the op."""
        t = tensors
        weight_t = t["weight"].t().contiguous() if self.keeps_weight_t else None
        dropout = Dropout(t["slot"], self.p, SITE, row0, col0, dropped) if self.p else None
        return (
            *(Scaled(t["dy"], t["dy_scale_inv"]), self.fp8),
            Weight(t["weight"], t["weight_scale_inv"], weight_t),
            *((t["ds"], t["lora_A"]) if self.rank > 0 else (None, None)),
            *(dropout, self.dtype, self.split),
        )

    def run(
        self,
        tensors: dict[str, Tensor],
        row0: int = 0,
        col0: int = 0,
        dropped: Tensor | None = None,
    ) -> Tensor:
        arguments = self.arguments(tensors, row0, col0, dropped)
        assert why_not_csrc_kernel(*arguments) is None
        return ops.fp8_grad_input(*arguments)

    def keep(self, slot: Tensor, row0: int = 0, col0: int = 0) -> Tensor:
        """The mask, bool [rows, cols]."""
        return drawn_mask(Dropout(slot, self.p, SITE, row0, col0), self.rows, self.cols)

    def expected(self, tensors: dict[str, Tensor], row0: int = 0, col0: int = 0) -> Tensor:
        """In float64, with A rounded to ds's dtype as the kernel says."""
        t = {name: tensor for name, tensor in tensors.items()}
        scale = t["dy_scale_inv"].double() * t["weight_scale_inv"].double()
        dx = t["dy"].view(self.fp8).double() @ t["weight"].view(E4M3).double() * scale
        if self.rank == 0:
            return dx
        branch = t["ds"].double() @ t["lora_A"].to(self.dtype).double()
        if self.p:
            keep = self.keep(t["slot"], row0, col0)
            branch = branch.where(keep, 0.0) * keep_scale(self.p)
        return dx + branch


def assert_close(found: Tensor, expected: Tensor, depth: int) -> None:
    """One rounding to the dtype, and what the FP8 tensor cores drop: an addition of 32 products keeps 13 bits below the
    largest term (DeepSeek-V3 report, 3.3.2, found 14), so that four lose 2^-11 of the largest sum at most. Split, that
    is all; fast, as many more as there are 128s in the depth."""
    epsilon = 2.0**-8 if found.dtype == BF16 else 2.0**-11
    error = (found.double() - expected).abs()
    bound = epsilon * expected.abs() + 2.0**-11 * max(1, depth / 128) * expected.abs().max()
    assert bool((error <= bound).all()), float((error / bound).max())


CASES = [
    Case(512, 512, 512, 16),
    Case(256, 128, 128, 0),
    Case(1, 16, 16, 1),
    Case(129, 144, 48, 5, p=0.5),
    Case(777, 1040, 2064, 16, p=0.0),
    Case(777, 1040, 2064, 7, a_dtype=BF16, keeps_weight_t=True),
    Case(300, 4112, 1040, 64, fp8=E4M3),
    Case(300, 4112, 1040, 64, dtype=FP16, a_dtype=FP16),
    Case(4100, 2064, 272, 33, p=0.9, dtype=FP16),
    Case(5000, 4096, 1024, 16, p=0.3),
    Case(5000, 4096, 128, 128),
    Case(5000, 4096, 512, 128, split=False),
    Case(300, 528, 512, 16, split=False, fp8=E4M3),
    Case(3000, 5008, 256, 256, p=0.01, a_dtype=FP16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64_and_itself(case: Case) -> None:
    tensors = case.inputs()
    dx = case.run(tensors)
    assert dx.shape == (case.rows, case.cols) and dx.dtype == case.dtype
    assert_close(dx, case.expected(tensors), 128 if case.split else case.depth)
    for _ in range(3):
        assert torch.equal(case.run(tensors), dx)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [512, 4096], ids=["small tiles", "large tiles"])
@pytest.mark.parametrize("origin", [(0, 0), (1000, 4096)], ids=["whole", "shard"])
def test_the_mask_is_the_reference_s_bit_for_bit(cols: int, origin: tuple[int, int]) -> None:
    case = Case(4000, cols, 256, 16, p=0.3)
    tensors = case.inputs()
    tensors["dy"].zero_()
    tensors["ds"].fill_(1.0)
    tensors["lora_A"].fill_(1.0)
    dx = case.run(tensors, *origin)
    keep = case.keep(tensors["slot"], *origin)
    assert torch.equal(dx != 0, keep)


@pytest.mark.gpu
@pytest.mark.parametrize("handed", [False, True], ids=["drawn", "handed over"])
@pytest.mark.parametrize("rank", [16, 17, 70], ids="r{}".format)
@pytest.mark.parametrize("origin", [(0, 0), (1001, 4104)], ids=["whole", "shard"])
@pytest.mark.parametrize("tile", tune.CSRC_TILES["turned"], ids=lambda tile: f"{tile[0]}x{tile[1]}")
def test_the_mask_over_w_as_it_lies_is_the_reference_s_bit_for_bit(
    tile: tuple[int, int],
    origin: tuple[int, int],
    rank: int,
    handed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """dy = 0, ds and A of ones: dx is 0 where the branch is dropped and rank / (1 - p) elsewhere, in tiles that hang
    over the last row and the last column; rank, p and what is kept are exact in bf16."""
    monkeypatch.setattr(tune, "csrc_turns", lambda *_: True)
    monkeypatch.setattr(tune, "csrc_tile", lambda *_: (tile, 1.0))
    case = Case(2 * 192 + 77, 2 * 128 + 80, 144, rank, p=0.5)
    tensors = case.inputs()
    tensors["dy"].zero_()
    tensors["ds"].fill_(1.0)
    tensors["lora_A"].fill_(1.0)
    keep = case.keep(tensors["slot"], *origin)
    dx = case.run(tensors, *origin, dropped_bits(keep) if handed else None)
    assert torch.equal(dx, (keep * (rank / (1 - case.p))).to(case.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(300, 528, 272, 24, p=0.3),
        Case(5000, 4112, 256, 16, p=0.1),
        Case(513, 4096, 128, 130, p=0.9),
        Case(5000, 4096, 128, 16, split=False),
    ],
    ids=str,
)
def test_a_mask_handed_over_is_as_good_as_one_drawn(case: Case) -> None:
    tensors = case.inputs()
    keep = case.keep(tensors["slot"], 3, 16)
    drawn = case.run(tensors, 3, 16)
    handed = case.run(tensors, 3, 16, dropped_bits(keep))
    assert torch.equal(drawn, handed)
    none = torch.zeros_like(dropped_bits(keep))  # and it is read
    assert not torch.equal(drawn, case.run(tensors, 3, 16, none))


def test_bits_of_a_mask() -> None:
    """Column 8 d + 2 w + h of a word's 32 has bit 16 h + 8 (d % 2) + 2 w + d // 2; the rest of a row's words is 0."""
    keep = torch.ones(3, 130, dtype=torch.bool)
    keep[0, [0, 1, 2, 8, 16, 31]] = False
    keep[2, 129] = False
    bits = dropped_bits(keep)
    assert bits.shape == (3, 8) and bits.dtype == torch.int32
    assert bits[0, 0].item() & 0xFFFFFFFF == 1 | 1 << 16 | 1 << 2 | 1 << 8 | 1 << 1 | 1 << 31
    assert bits[2].tolist() == [0, 0, 0, 0, 1 << 16, 0, 0, 0]
    assert bits[1].eq(0).all()


@pytest.mark.parametrize(
    ("rows", "cols", "rank", "how", "tile"),
    [
        (1, 1, 0, "split", (128, 128)),
        (4000, 512, 16, "split", (128, 128)),
        (4096, 4096, 16, "split", (256, 128)),
        (4096, 4096, 64, "split", (192, 128)),
        (8192, 8192, 16, "split", (192, 128)),
        (1024, 2048, 16, "turned", (128, 128)),
        (8192, 8192, 16, "turned", (192, 128)),
        (1, 1, 0, "fast", (128, 128)),
        (8192, 8192, 16, "fast", (128, 256)),
    ],
)
def test_tiles_that_fill_the_multiprocessors(
    rows: int, cols: int, rank: int, how: str, tile: tuple[int, int]
) -> None:
    assert tune.csrc_tile(rows, cols, rank, how, 132)[0] == tile


@pytest.mark.parametrize(("rows", "turns"), [(1, True), (1024, True), (65536, False)])
def test_w_is_turned_where_transposing_costs_more(rows: int, turns: bool) -> None:
    assert tune.csrc_turns(rows, 2048, 16, 132) is turns


def test_the_tile_is_printed_once_when_asked(monkeypatch, capsys) -> None:
    monkeypatch.setenv("LORAKERNELS_PRINT_CONFIGS", "1")
    for _ in range(2):
        tune.csrc_tile(4097, 8192, 16, "split", 131)
    said = "lorakernels: csrc, [4097, 8192], split: tiles of (192, 128)\n"
    assert capsys.readouterr().err == said


@pytest.mark.gpu
def test_sums_in_parts_keep_what_the_tensor_cores_drop() -> None:
    """At N = 28672 the error is that of one rounding to bf16; fast accumulation is off by more than twice that."""
    case = Case(512, 512, 28672, 16)
    tensors = case.inputs()
    expected = case.expected(tensors)

    def error(dx: Tensor) -> float:
        return float((dx.double() - expected).norm() / expected.norm())

    split = error(case.run(tensors))
    rounding = error(expected.to(case.dtype))
    assert split < 1.05 * rounding
    assert error(replace(case, split=False).run(tensors)) > 2 * split


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(200))
def test_random_shapes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of any shape, whether or not they would be chosen."""
    draw = random.Random(seed)
    case = Case(
        rows=draw.choice([1, 3, 64, 127, 128, 200, 513, draw.randint(1, 3000)]),
        cols=16 * draw.randint(1, 300),
        depth=16 * draw.randint(1, 90),
        rank=draw.choice([0, 1, 2, 8, 15, 16, 17, 64, 65, 100, 128, 130, 256]),
        p=draw.choice([0.0, 0.001, 0.1, 0.5, 0.9]),
        dtype=draw.choice([BF16, FP16]),
        a_dtype=draw.choice([BF16, FP16, FP32]),
        fp8=draw.choice([E5M2, E4M3]),
        keeps_weight_t=draw.random() < 0.5,
        split=draw.random() < 0.7,
    )
    turned = not case.keeps_weight_t and case.split and draw.random() < 0.7
    tile = draw.choice(
        list(tune.CSRC_TILES["turned" if turned else "split" if case.split else "fast"])
    )
    monkeypatch.setattr(tune, "csrc_turns", lambda *_: turned)
    monkeypatch.setattr(tune, "csrc_tile", lambda *_: (tile, 1.0))
    tensors = case.inputs()
    if case.dtype == FP16:
        tensors["dy_scale_inv"] *= 0.1  # 65504 is not far
    assert_close(case.run(tensors), case.expected(tensors), 128 if case.split else case.depth)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(192, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["transposed", "turned"])
def test_it_writes_dx_and_nothing_around_it(
    turned: bool, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "csrc_turns", lambda *_: turned)
    monkeypatch.setattr(tune, "csrc_tile", lambda *_: (tile, 1.0))
    case = Case(301, 528, 272, 24)
    tensors = case.inputs()
    expected = case.run(tensors)
    space = torch.full((301 * 528 * 2 + 2048,), 0xA5, dtype=torch.uint8, device="cuda")
    inner = space[1024:-1024].view(BF16).view(301, 528)
    inner.fill_(torch.nan)
    arguments = replace(case, keeps_weight_t=not turned).arguments(tensors)
    with mock.patch.object(torch, "empty", return_value=inner):
        found = by_csrc(*arguments)
    assert found.data_ptr() == inner.data_ptr()
    assert torch.equal(inner, expected)
    assert bool((space[:1024] == 0xA5).all()) and bool((space[-1024:] == 0xA5).all())


@pytest.mark.gpu
def test_captured_it_reads_slot_and_scales_of_the_replay() -> None:
    case = Case(512, 1024, 256, 16)
    tensors = case.inputs()
    case.run(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.run(tensors)
    for offset in (3, 2**35):
        tensors["slot"][1] = offset
        tensors["dy_scale_inv"].fill_(float(offset % 7) + 0.5)
        graph.replay()
        assert torch.equal(found, case.run(tensors))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"out_dtype": FP32}, "float32"),
        ({"col0": 4}, "col0 = 4"),
        ({"dy": lambda t: t.t().contiguous().t()}, "strides"),
        ({"ds": lambda t: t.to(FP16)}, "ds is torch.float16"),
    ],
    ids=["fp32", "col0", "strides", "ds"],
)
def test_what_it_does_not_take_goes_through_torch(change: dict, reason: str) -> None:
    case = Case(64, 512, 256, 16)
    t = case.inputs()
    out_dtype, col0 = change.get("out_dtype", BF16), change.get("col0", 0)
    for name in ("dy", "ds"):
        if name in change:
            t[name] = change[name](t[name])
    dropout = Dropout(t["slot"], case.p, SITE, 0, col0)
    weight = Weight(t["weight"], t["weight_scale_inv"])
    base = (Scaled(t["dy"], t["dy_scale_inv"]), case.fp8, weight)
    arguments = (*base, t["ds"], t["lora_A"], dropout, out_dtype)
    assert reason in why_not_csrc_kernel(*arguments)
    found = ops.fp8_grad_input(*arguments)
    expected = case.expected(t, 0, col0)
    assert (
        float((found.double() - expected).norm() / expected.norm()) < 0.01
    )  # three roundings to bf16
