# SPDX-License-Identifier: Apache-2.0
"""Ranks that share rows of tokens draw their tokens' parts of one mask, whatever the sizes and slices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorakernels import _C
from lorakernels.device import why_not_csrc
from lorakernels.numerics.dropout import (
    drawn_mask,
    dropout_keep,
    dropped_bits,
    dropped_words,
    rows_of_tensor,
)
from lorakernels.parallel.context.attention import Chunks
from lorakernels.values import Dropout, RowChunks

COLS = 21
# n, B and C: odd sizes and one token; with 40, a slice of 8 rows may lie in one chunk
LAYOUTS = [(2, 1, 1), (2, 3, 5), (3, 1, 7), (3, 3, 4), (4, 1, 40), (4, 3, 3)]
DRAWS = {"torch": dropout_keep, "csrc": drawn_mask}


def slot(device: torch.device) -> Tensor:
    return torch.tensor([2**40 + 77, 2**33 + 5], device=device)


def of_rank(whole: Tensor, rank: int, ranks: int, rows: int, size: int) -> Tensor:
    """A rank's [B 2C, …] of [B S, …]."""
    tokens = whole.unflatten(0, (rows, 2 * ranks * size))
    return Chunks(rank, ranks, size).own(tokens).flatten(0, 1)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize(("ranks", "rows", "size"), LAYOUTS)
def test_a_rank_draws_its_tokens_part_of_one_mask(
    ranks: int, rows: int, size: int, draw: object, device: torch.device
) -> None:
    dropout = Dropout(slot(device), 0.4, 3, col0=5)
    whole = dropout_keep(dropout, rows * 2 * ranks * size, COLS)
    for rank in range(ranks):
        own = of_rank(whole, rank, ranks, rows, size)
        mine = dropout._replace(chunks=RowChunks(rank, ranks, size))
        assert torch.equal(draw(mine, len(own), COLS), own)  # type: ignore[operator]
        for first, last in ((1, len(own)), (size, len(own) - 1), (len(own) // 3, len(own) // 2)):
            part = draw(mine._replace(row0=first), last - first, COLS)  # type: ignore[operator]
            assert torch.equal(part, own[first:last])


def test_other_chunks_have_another_mask(device: torch.device) -> None:
    dropout = Dropout(slot(device), 0.4, 3)
    masks = [
        drawn_mask(dropout._replace(chunks=chunks), 12, COLS)
        for chunks in ((), (0, 2, 3), (1, 2, 3), (1, 3, 3), (1, 2, 6))
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


# about powers of two, where a division by multiplication would first be off by one
SIZES = [1, 2, 3, 641, 8191, 8192, 8193, 131_072, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1]


@pytest.mark.parametrize("size", SIZES)
def test_csrc_divides_every_row_below_2_31(size: int) -> None:
    """The places of rows at multiples of a chunk, and of the last rows that there may be."""
    given = slot(torch.device("cpu"))
    chunks = RowChunks(2, 5, size)
    last = (2**31 - 2) // size * size
    for at in {0, size, last // 2 // size * size, last, 2**31 - 9}:
        first = min(max(at - 3, 0), 2**31 - 9)
        mine = Dropout(given, 0.5, 1, first, chunks=chunks)
        found = torch.zeros(8, 64, dtype=torch.bool)
        _C.dropout_mask_host(found, (8, 64), mine)
        assert torch.equal(found, dropout_keep(mine, 8, 64))


@pytest.mark.parametrize(
    ("chunks", "row0"), [((2, 2, 8), 0), ((0, 0, 8), 0), ((0, 2, 0), 0), ((0, 2, 8), 2**31)]
)
def test_csrc_refuses_what_is_no_ranks_chunks(chunks: tuple[int, ...], row0: int) -> None:
    mine = Dropout(slot(torch.device("cpu")), 0.5, 1, row0, chunks=chunks)
    with pytest.raises(ValueError, match="chunks must be"):
        _C.dropout_mask_host(torch.zeros(8, 8, dtype=torch.bool), (8, 8), mine)
    with pytest.raises(TypeError):
        _C.dropout_mask_host(None, (0, 8), mine._replace(chunks=(0, 1)))


def test_rows_without_chunks_follow_each_other() -> None:
    found = rows_of_tensor(7, 5, (), torch.device("cpu"))
    assert found.tolist() == [7, 8, 9, 10, 11]


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "rows", "size"), LAYOUTS)
def test_bits_drawn_on_a_gpu_are_the_mask(ranks: int, rows: int, size: int) -> None:
    """A unit of 8 rows of csrc/device/draw_mask.h may begin at any row."""
    if why_not := why_not_csrc(torch.cuda.get_device_capability()):
        pytest.skip(why_not)
    for first in (0, 1, 6):
        count = rows * 2 * size + 700
        mine = Dropout(slot(torch.device("cuda")), 0.4, 3, first, 8, chunks=(1, ranks, size))
        found = torch.zeros(count, dropped_words(128), dtype=torch.int32, device="cuda")
        _C.dropped_bits(found, (count, 128), mine, (torch.cuda.current_stream().cuda_stream, 0))
        assert torch.equal(found, dropped_bits(dropout_keep(mine, count, 128)))
