# SPDX-License-Identifier: Apache-2.0
"""kernels/triton/chunk_rows.py: keys and values of all ranks come into a row's order, and their gradients are added by
rank. Each rank's memory is a tensor here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lorakernels.kernels.triton.chunk_rows import KeyGradients, in_order, layered, side_by_side
from lorakernels.kernels.triton.sum_rows import MOST_PARTS, sum_rows
from tests.kernels.by_triton import interpret


class Sizes(NamedTuple):
    """B, H, Hk, tokens of a chunk, D."""

    rows: int
    heads: int
    kv_heads: int
    size: int
    dim: int


SIZES = [
    Sizes(1, 4, 2, 5, 64),
    Sizes(3, 3, 1, 33, 96),  # D is no power of two
    Sizes(2, 4, 4, 1, 128),
    Sizes(1, 2, 1, 67, 8),
]
RANKS = (1, 2, 3, 4, 5, 6, 7, MOST_PARTS)
CASES = [(ranks, SIZES[ranks % len(SIZES)]) for ranks in RANKS] + [(2, sizes) for sizes in SIZES]


def columns(sizes: Sizes, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """k and v [B, Hk, T, D], columns of one matrix with q's, as a fused layer has them."""
    batch, heads, kv, _, dim = sizes
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(batch * tokens, (heads + 2 * kv) * dim, generator=generator)
    every = qkv.view(batch, tokens, heads + 2 * kv, dim).transpose(1, 2)
    return every[:, heads : heads + kv], every[:, heads + kv :]


def owned(rank: int, ranks: int, size: int) -> Tensor:
    """Where a rank's tokens lie in a row."""
    begins = rank * size, (2 * ranks - 1 - rank) * size
    return torch.cat([torch.arange(b, b + size) for b in begins])


def misplaced(ranks: int, sizes: Sizes, device: str, dtype: torch.dtype) -> int:
    """Elements of the gathered keys and values that are not those of the row."""
    k, v = (x.to(device, dtype) for x in columns(sizes, 2 * ranks * sizes.size, ranks))
    there = []
    for rank in range(ranks):
        at = owned(rank, ranks, sizes.size).to(device)
        shape = sizes.rows, 2 * sizes.size, 2 * sizes.kv_heads, sizes.dim
        place = torch.full(shape, torch.nan, dtype=dtype, device=device)
        side_by_side(k[:, :, at], v[:, :, at].contiguous(), place)
        there.append(place)
    exact = torch.cat((k, v), 1).transpose(1, 2)
    return sum(int((in_order(there, rank) != exact).sum()) for rank in range(ranks))


def error(ranks: int, sizes: Sizes, device: str, dtype: torch.dtype) -> float:
    """How far the sums of all ranks' ranges are from float64, in roundings to `dtype`."""
    length = 2 * ranks * sizes.size
    exact = torch.zeros(2, sizes.rows, sizes.kv_heads, length, sizes.dim, dtype=torch.float64)
    magnitude = torch.zeros_like(exact)
    there = []
    for rank in range(ranks):
        parts = []
        for begin in owned(rank, ranks, sizes.size)[:: sizes.size].tolist():
            for first, end in ((begin, begin + sizes.size), (0, begin)):
                if first == end:
                    continue
                pair = columns(sizes, end - first, 100 * rank + begin + end)
                dk, dv = (x.to(device, dtype) for x in pair)
                parts.append(KeyGradients(first, dk, dv.contiguous() if rank % 2 else dv))
                for total, d in zip(exact, (dk, dv), strict=True):
                    total[:, :, first:end] += d.double().cpu()
                for total, d in zip(magnitude, (dk, dv), strict=True):
                    total[:, :, first:end] += d.double().cpu().abs()
        shape = ranks, sizes.rows, 2 * sizes.size, 2 * sizes.kv_heads, sizes.dim
        place = torch.full(shape, torch.nan, device=device)
        layered(parts, place)
        there.append(place)
    worst = 0.0
    for rank in range(ranks):
        both = sum_rows([each[rank] for each in there], None, dtype).cpu().double()
        at = owned(rank, ranks, sizes.size)
        for found, total, size in zip(both.transpose(1, 2).chunk(2, 1), exact, magnitude, strict=True):  # fmt: skip
            # one rounding to the dtype, behind at most 2 n sums in fp32
            unit = torch.finfo(dtype).eps / 2 * total[:, :, at].abs()
            unit += 2 * ranks * 2.0**-24 * size[:, :, at] + torch.finfo(dtype).tiny * 2.0**-11
            worst = max(worst, float(((found - total[:, :, at]).abs() / unit).max()))
    return worst


def others(ranks: int, sizes: Sizes, device: str, dtype: torch.dtype) -> int:
    """Elements that torch's ops, a zero and a sum for each range, give other bits. The last rank has four ranges."""
    length, size = 2 * ranks * sizes.size, sizes.size
    begins = (ranks - 1) * size, ranks * size
    total = torch.zeros(2, sizes.rows, sizes.kv_heads, length, sizes.dim, device=device)
    parts = []
    for begin in begins:
        for first, end in ((begin, begin + size), (0, begin)):
            if first < end:
                pair = [x.to(device, dtype) for x in columns(sizes, end - first, begin + end)]
                parts.append(KeyGradients(first, *pair))
                for whole, d in zip(total, pair, strict=True):
                    whole[:, :, first:end] += d
    shape = ranks, sizes.rows, 2 * size, 2 * sizes.kv_heads, sizes.dim
    found = torch.full(shape, torch.nan, device=device)
    layered(parts, found)
    both = torch.cat((*total,), 1).transpose(1, 2)
    at = [owned(rank, ranks, size).to(device) for rank in range(ranks)]
    return sum(int((found[r] != both[:, at[r]]).sum()) for r in range(ranks))


def results(device: str, dtype: torch.dtype) -> list[Any]:
    return [
        tuple(count(*case, device, dtype) for count in (misplaced, others, error)) for case in CASES
    ]


def compare(found: list[Any]) -> None:
    for case, (elsewhere, other_bits, off) in zip(CASES, found, strict=True):
        assert elsewhere == 0 and other_bits == 0, case
        assert off <= 1.0, (case, off)


@pytest.mark.slow
def test_the_interpreter_places_and_adds(tmp_path: Path) -> None:
    compare(interpret(__file__, tmp_path / "found"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gpu_places_and_adds(dtype: torch.dtype) -> None:
    compare(results("cuda", dtype))


@pytest.mark.gpu
def test_the_gpu_places_float64() -> None:
    assert misplaced(3, SIZES[1], "cuda", torch.float64) == 0


if __name__ == "__main__":
    torch.save(results("cpu", torch.float16), sys.argv[1])
