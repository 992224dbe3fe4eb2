# SPDX-License-Identifier: Apache-2.0
"""The mask that quantize_grad draws beside: reference.py's bits, and the same dy8, ds, dB as without it."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
from torch import Tensor

from lorakernels import _C, ops, reference

MODULE = sys.modules["lorakernels.kernels.quantize_grad"]
BF16, FP16, FP32, E5M2 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2
SITE, ROW0, COL0 = 3, 5, 24
BESIDE = ([256, 128, 128], [16, 0, 16])
gpu = pytest.mark.gpu


def inputs(m: int, n: int, rank: int, columns: int, device: str, dtype: torch.dtype) -> tuple:
    """dy, B, s, a state, column, delayed, scaling, fp8_dtype."""
    shapes = (m, n), (n, rank), (m, columns)
    dy, b, s = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    return dy, b, s, torch.full((2, 2), 3.0, device=device), 1, True, 0.5, E5M2


def drawn(arguments: tuple, slot: Tensor, p: float, cols: int, sizes: tuple) -> tuple[Tensor, ...]:
    place = (slot, p, SITE, cols, ROW0, COL0)
    return ops.quantize_grad_and_mask(*arguments, *place, *sizes)


def check(arguments: tuple, slot: Tensor, p: float, cols: int, sizes: tuple, bits: Tensor) -> None:
    *found, dropped = drawn(arguments, slot, p, cols, sizes)
    assert all(map(torch.equal, found, ops.quantize_grad(*arguments, *sizes)))
    assert torch.equal(dropped & columns_of(dropped, cols), bits)


def columns_of(dropped: Tensor, cols: int) -> Tensor:
    """The bits that stand for a column."""
    keep = torch.zeros(len(dropped), cols, dtype=torch.bool, device=dropped.device)
    return reference.dropped_bits(keep)


def expected(slot: Tensor, p: float, m: int, cols: int) -> Tensor:
    return reference.dropped_bits(reference.dropout_keep(slot, p, SITE, m, cols, ROW0, COL0))


@pytest.mark.parametrize("p", [0.3, 1e-6], ids=["drawn", "below 16 bits"])
@pytest.mark.parametrize("sizes", [(None, None), BESIDE], ids=["one", "side by side"])
def test_on_a_cpu(sizes: tuple, p: float) -> None:
    arguments = inputs(33, 512, 16, 32 if sizes[0] else 16, "cpu", BF16)
    slot = torch.tensor([5, 6])
    check(arguments, slot, p, 72, sizes, expected(slot, p, 33, 72))


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("p", [2**-16, 0.1, 0x7C00 / 65536, 0.9])  # the third: no finite fp16
@pytest.mark.parametrize(
    ("m", "n", "cols", "rank"),
    [
        (1, 8, 16, 1),
        (300, 384, 656, 16),  # few rows a block; words that end inside of a warp's 32
        (77, 8192, 128, 33),  # wide strips
        (2100, 520, 8200, 17),  # more to draw than to read: all warps end up drawing
        (4000, 264, 4096, 64),  # where only some draw
    ],
)
def test_bits_are_the_reference_s(
    m: int, n: int, cols: int, rank: int, p: float, dtype: torch.dtype
) -> None:
    arguments = inputs(m, n, rank, rank, "cuda", dtype)
    slot = torch.tensor([0x7EDC_BA98_7654_3210, -1], device="cuda")
    with mock.patch.object(reference, "drawn_mask", side_effect=AssertionError("not by csrc")):
        check(arguments, slot, p, cols, (None, None), expected(slot, p, m, cols))


@gpu
def test_beside_projections_side_by_side() -> None:
    arguments = inputs(3000, 512, 16, 32, "cuda", BF16)
    slot = torch.tensor([5, 6], device="cuda")
    with mock.patch.object(reference, "drawn_mask", side_effect=AssertionError("not by csrc")):
        check(arguments, slot, 0.1, 1024, BESIDE, expected(slot, 0.1, 3000, 1024))


@gpu
@pytest.mark.parametrize(
    ("rank", "p", "col0", "n"),
    [(65, 0.1, 0, 256), (16, 0.1, 8, 252), (16, 1e-6, 0, 256), (16, 0.1, 4, 256)],
    ids=["rank", "N", "p", "col0"],
)
def test_what_is_not_drawn_beside_comes_from_another_kernel(
    rank: int, p: float, col0: int, n: int
) -> None:
    arguments = inputs(50, n, rank, rank, "cuda", BF16)
    slot = torch.tensor([5, 6], device="cuda")
    *found, dropped = ops.quantize_grad_and_mask(*arguments, slot, p, SITE, 8200, ROW0, col0)
    assert all(map(torch.equal, found, ops.quantize_grad(*arguments)))
    keep = reference.dropout_keep(slot, p, SITE, 50, 8200, ROW0, col0)
    assert torch.equal(dropped & columns_of(dropped, 8200), reference.dropped_bits(keep))


@gpu
@pytest.mark.parametrize("rank", [16, 64])
def test_nothing_is_written_beside_the_mask(rank: int) -> None:
    m, cols, guard = 333, 1040, 1024
    arguments = inputs(m, 520, rank, rank, "cuda", BF16)
    slot = torch.tensor([5, 6], device="cuda")
    words = reference.dropped_words(cols)
    room = torch.full((m * words + 2 * guard,), 0x5A5A5A5A, dtype=torch.int32, device="cuda")
    bits = room[guard:-guard].view(m, words)
    MODULE.in_one_pass(*arguments, mask=MODULE.Mask(bits, cols, slot, 0.1, SITE, ROW0, COL0))
    assert torch.equal(bits & columns_of(bits, cols), expected(slot, 0.1, m, cols))
    assert bool((room[:guard] == 0x5A5A5A5A).all() and (room[-guard:] == 0x5A5A5A5A).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 65}, "a rank of 1 to 64"),
        ({"threshold": 0}, "a threshold above 0"),
        ({"first_col": 4}, "first_col a multiple of 8"),
        ({"dropped": 8}, "16-byte aligned"),
    ],
    ids=["rank", "threshold", "first_col", "address"],
)
def test_the_binding_refuses(change: dict[str, int], message: str) -> None:
    names = (
        "dy8",
        "scale_inv",
        "amax",
        "ds",
        "dB",
        "workspace",
        "dy",
        "B",
        "s",
        "kept",
        "partials",
    )
    arguments = dict.fromkeys(names, 16) | {"rows": 4, "cols": 8, "rank": 16, "scaling": 1.0}
    arguments |= {"dtype": "bfloat16", "b_dtype": "bfloat16", "format": "e5m2", "fp8_max": 57344.0}
    arguments |= {"dropped": 16, "dropped_cols": 8, "slot": 16, "site": 0, "threshold": 5}
    arguments |= {"first_row": 0, "first_col": 0, "stream": 0, "device": 0} | change
    with pytest.raises(ValueError, match=message):
        _C.quantize_grad(**arguments)
