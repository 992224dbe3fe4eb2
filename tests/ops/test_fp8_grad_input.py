# SPDX-License-Identifier: Apache-2.0
"""fp8_grad_input in one kernel: its mask bit for bit, its tiles, random shapes; its cases have the rest."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.kernels import tune
from lorakernels.numerics.dropout import drawn_mask, dropped_bits
from lorakernels.ops.fp8_grad_input import GradInput, by_csrc, why_not_csrc_kernel
from lorakernels.values import Scaled, Weight
from tests.ops.cases.fp8_grad_input import Grad, bound
from tests.ops.contract import BF16, E4M3, E5M2, FP16, FP32, UINT8, Arguments, Call, Made, fault
from tests.ops.guards import GUARD, assert_untouched, between_guards

P = 0.5


def arguments(
    rows: int, k: int, n: int, rank: int, origin: tuple[int, int] = (0, 0), **options: object
) -> Arguments:
    """On the GPU, with the mask's window at `origin`."""
    *base, dropout, dtype, split = Grad(k, n, rank, **options)(Made("cuda", rows))
    row0, col0 = origin
    moved = None if dropout is None else dropout._replace(row0=row0, col0=col0)
    return *base, moved, dtype, split


def run(call: Arguments) -> Tensor:
    assert why_not_csrc_kernel(GradInput(*call)) is None
    return ops.fp8_grad_input(*call)


def given(call: Arguments, mask: Tensor | None) -> Arguments:
    """The same call, the mask handed over."""
    *base, dropout, dtype, split = call
    return *base, dropout._replace(dropped=mask), dtype, split


def of_ones(call: Arguments) -> tuple[Arguments, Tensor]:
    """dy = 0, ds and A of ones: dx is 0 where the branch is dropped and rank / (1 - p) elsewhere; and the mask."""
    dy, _, weight, ds, lora_A, dropout, *_ = call
    dy.data.zero_()
    ds.fill_(1.0)
    lora_A.fill_(1.0)
    return call, drawn_mask(dropout, len(dy.data), weight.data.shape[1])


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [512, 4096], ids=["small tiles", "large tiles"])
@pytest.mark.parametrize("origin", [(0, 0), (1000, 4096)], ids=["whole", "shard"])
def test_the_mask_is_the_reference_s_bit_for_bit(cols: int, origin: tuple[int, int]) -> None:
    call, keep = of_ones(arguments(4000, cols, 256, 16, origin, p=0.3))
    assert torch.equal(run(call) != 0, keep)


@pytest.mark.gpu
@pytest.mark.parametrize("handed", [False, True], ids=["drawn", "handed over"])
@pytest.mark.parametrize("rank", [16, 17, 70, 192], ids="r{}".format)
@pytest.mark.parametrize("origin", [(0, 0), (1001, 4104)], ids=["whole", "shard"])
@pytest.mark.parametrize(
    ("tile", "split"),
    [
        *((t, True) for t in tune.CSRC_TILES["turned"]),
        *((t, False) for t in tune.CSRC_TILES["turned fast"]),
    ],
    ids=lambda value: (
        {True: "split", False: "fast"}[value]
        if isinstance(value, bool)
        else f"{value[0]}x{value[1]}"
    ),
)
def test_the_mask_of_every_tile_is_the_reference_s_bit_for_bit(
    tile: tuple[int, int],
    split: bool,
    origin: tuple[int, int],
    rank: int,
    handed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In tiles that hang over the last row and the last column; rank, p and what is kept are exact in bf16."""
    monkeypatch.setattr(tune, "csrc_tile", lambda *_: (tile, 1.0))
    operands = arguments(2 * 192 + 77, 2 * 128 + 80, 144, rank, origin, p=P, split=split)
    call, keep = of_ones(operands)
    dx = run(given(call, dropped_bits(keep) if handed else None))
    assert torch.equal(dx, (keep * (rank / (1 - P))).to(BF16))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "k", "n", "rank", "options"),
    [
        (300, 528, 272, 24, {"p": 0.3}),
        (5000, 4112, 256, 16, {"p": 0.1}),
        (513, 4096, 128, 130, {"p": 0.9}),
        (5000, 4096, 128, 16, {"split": False}),
    ],
    ids=str,
)
def test_a_mask_handed_over_is_as_good_as_one_drawn(
    rows: int, k: int, n: int, rank: int, options: dict[str, object]
) -> None:
    call = arguments(rows, k, n, rank, (3, 16), **options)
    bits = dropped_bits(drawn_mask(call[5], rows, k))
    drawn = run(call)
    assert torch.equal(drawn, run(given(call, bits)))
    assert not torch.equal(drawn, run(given(call, torch.zeros_like(bits)))), "it is read"


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*tune.CSRC_TILES["turned"]], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_ranks_of_zeros_change_no_bit(
    tile: tuple[int, int], p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 ranks are multiplied piece by piece of a tile; more of them, all pieces at once."""
    monkeypatch.setattr(tune, "csrc_tile", lambda *_: (tile, 1.0))
    call = arguments(1000, 1040, 272, 64, p=p)
    dy, fp8, weight, ds, lora_A, *others = call
    expected = run(call)
    for rank in (128, 192):
        wide_ds, wide_A = ds.new_zeros(len(ds), rank), lora_A.new_zeros(rank, lora_A.shape[1])
        wide_ds[:, :64], wide_A[:64] = ds, lora_A
        wide_ds[:, 64:].normal_()
        assert torch.equal(run((dy, fp8, weight, wide_ds, wide_A, *others)), expected)


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
    ("rows", "cols", "how", "tile"),
    [
        (1, 1, "split", (128, 128)),
        (4000, 512, "split", (128, 128)),
        (8192, 8192, "split", (192, 128)),
        (1024, 2048, "turned", (128, 128)),
        (8192, 8192, "turned", (192, 128)),
        (1, 1, "turned fast", (128, 128)),
        (8192, 8192, "fast", (128, 256)),
        (64, 4096, "turned fast", (128, 128)),
        (64, 4096, "fast", (64, 128)),
        (64, 128 * 1000, "fast", (64, 128)),
        (65, 4096, "fast", (128, 128)),
        (1024, 2048, "turned fast", (128, 128)),
        (8192, 8192, "turned fast", (256, 128)),
    ],
)
def test_tiles_that_fill_the_multiprocessors(
    rows: int, cols: int, how: str, tile: tuple[int, int]
) -> None:
    assert tune.csrc_tile(rows, cols, how, 132)[0] == tile


def test_the_tile_is_printed_once_when_asked(monkeypatch, capsys) -> None:
    monkeypatch.setenv("LORAKERNELS_PRINT_CONFIGS", "1")
    for _ in range(2):
        tune.csrc_tile(4097, 8192, "split", 131)
    said = "lorakernels: csrc, [4097, 8192], split: tiles of (192, 128)\n"
    assert capsys.readouterr().err == said


@pytest.mark.gpu
def test_sums_in_parts_keep_what_the_tensor_cores_drop() -> None:
    """A product of 2¹⁶ and then N − 1 of 2⁻⁴, each multiplied by 2⁻⁴ at the end, in every element of dx.

    An addition keeps 14 bits of its largest term at most. So 32 of the small ones, 2 together, add nothing to 2¹⁶ where
    all sums are in one accumulator. In parts of 512, 511 of them are lost: 2 of 4208, where fp16 has steps of 4.
    """
    n, one = 28672, torch.ones(1, device="cuda")
    dy, w = torch.full((512, n), 0.25, device="cuda"), torch.full((n, 512), 0.25, device="cuda")
    dy[:, 0], w[0] = 256.0, 256.0
    operands = Scaled(dy.to(E5M2).view(UINT8), one / 16), E5M2, Weight(w.to(E4M3).view(UINT8), one)
    rest = (n - 1) / 256
    split, fast = (run((*operands, None, None, None, FP16, split)) for split in (True, False))
    assert bool(((split.double() - (4096 + rest)).abs() <= 2 + 511 / 256).all())
    assert bool((fast.double() < 4096 + rest / 10).all())


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(200))
def test_random_shapes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of any shape, whether or not they would be chosen."""
    draw = random.Random(seed)
    split = draw.random() < 0.7
    tile = draw.choice(list(tune.CSRC_TILES["turned" if split else "turned fast"]))
    monkeypatch.setattr(tune, "csrc_tile", lambda *_: (tile, 1.0))
    call = arguments(
        draw.choice([1, 3, 64, 127, 128, 200, 513, draw.randint(1, 3000)]),
        16 * draw.randint(1, 300),
        16 * draw.randint(1, 90),
        draw.choice([0, 1, 2, 8, 15, 16, 17, 64, 65, 100, 128, 130, 256]),
        p=draw.choice([0.0, 0.001, 0.1, 0.5, 0.9]),
        dtype=draw.choice([BF16, FP16]),
        a=draw.choice([BF16, FP16, FP32]),
        fp8=draw.choice([E5M2, E4M3]),
        split=split,
    )
    assert not fault(bound, Call(call, call, (run(call),)))


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["turned", "turned fast"])
@pytest.mark.parametrize("large", [True, False], ids=["large", "small"])
def test_it_writes_dx_and_nothing_around_it(
    how: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = next(iter(tune.CSRC_TILES[how])) if large else (128, 128)
    monkeypatch.setattr(tune, "csrc_tile", lambda *_: (tile, 1.0))
    call = arguments(301, 528, 272, 24, split="fast" not in how)
    expected = run(call)
    rooms: list[tuple[Tensor, int]] = []
    with between_guards(rooms):  # dx alone is allocated, and is NaN before
        found = by_csrc(GradInput(*call))
    [(whole, count)] = rooms
    assert found.data_ptr() == whole.data_ptr() + GUARD and found.nbytes == count
    assert torch.equal(found, expected)
    assert_untouched(rooms)
