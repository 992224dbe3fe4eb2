# SPDX-License-Identifier: Apache-2.0
"""block_diagonal and block_diagonal_parts: cases, and their results bit for bit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import torch

from lorakernels import ops
from lorakernels.ops import SideBySide
from tests.ops.contract import (
    BF16,
    FP16,
    FP32,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Made,
    Refusal,
    same,
)

Projections = list[tuple[int, int]]  # N_i and R_i


def side_of(projections: Projections, m: Made) -> SideBySide:
    """The first projection has M rows where it names none."""
    rows, ranks = zip(*projections, strict=True)
    return SideBySide([m.rows if n < 0 else n for n in rows], [*ranks])


def blocks(
    projections: Projections, dtype: torch.dtype, compact: bool, m: Made, each: tuple[int, ...] = ()
) -> Arguments:
    side = side_of(projections, m)
    made = [m.randn(*each, n, r, dtype=dtype) for n, r in zip(*side, strict=True) if r]
    return made, side, 0.5 + m.rand(2, len(side.rows)), compact


def matrix(
    projections: Projections, dtype: torch.dtype, compact: bool, m: Made, each: tuple[int, ...] = ()
) -> Arguments:
    side = side_of(projections, m)
    width = max(side.ranks) if compact else sum(side.ranks)
    whole = m.randn(*each, sum(side.rows), width, dtype=dtype)
    return whole, side, 0.5 + m.rand(len(side.rows)), compact


def places(side: SideBySide, compact: bool) -> Iterator[tuple[int, slice, slice]]:
    """Of each projection with an adapter: its number, its rows and its columns."""
    row = column = 0
    for i, (n, r) in enumerate(zip(*side, strict=True)):
        if r:
            yield i, slice(row, row + n), slice(0, r) if compact else slice(column, column + r)
        row, column = row + n, column + r


def bound(call: Call) -> Iterator[Checked]:
    """Each element is one product in fp32, rounded once: the reference's bits. The rest is zeros."""
    given, side, factors, compact = call.before
    for found, of_factors, below in zip(call.results, factors, (False, compact), strict=True):
        width = max(side.ranks) if below else sum(side.ranks)
        expected = found.new_zeros(*given[0].shape[:-2], sum(side.rows), width)
        for block, (i, rows, columns) in zip(given, places(side, below), strict=True):
            expected[..., rows, columns] = (block.float() * of_factors[i]).to(block.dtype)
        yield same("compact" if below else "diagonal", found, expected)


def bound_parts(call: Call) -> Iterator[Checked]:
    """One product in fp32, rounded once, of each element of a block, without gaps."""
    whole, side, factors, compact = call.before
    for found, (i, rows, columns) in zip(call.results, places(side, compact), strict=True):
        expected = (whole[..., rows, columns].float() * factors[i]).to(whole.dtype)
        yield same(f"part {i}", found, expected)
        yield same(f"strides of part {i}", found, found.contiguous().view(found.shape))
        assert found.is_contiguous()


SIDES: dict[str, Projections] = {  # one block, gaps, rows that end inside of a tile
    "one": [(33, 7)],
    "two": [(70, 16), (70, 16)],
    "a gap": [(100, 3), (30, 0), (70, 5)],
    "gaps outside": [(70, 0), (10, 4), (3, 0)],
    "four": [(5, 1), (6, 2), (7, 3), (8, 4)],
    "a gap in q, k, v": [(40, 16), (20, 0), (9, 16)],
}  # fmt: skip
FIVE = [(3, 1), (2, 1), (1, 1), (2, 0), (4, 2)]
TOO_MANY = "5 projections are more than 4"


def one_rank(projections: Projections) -> bool:
    return len({r for _, r in projections if r}) == 1


def shapes(make: object) -> dict[str, Case]:
    return {
        f"{name} {dtype}{' compact' if compact else ''}": Case(
            partial(make, projections, dtype, compact)  # type: ignore[call-overload]
        )
        for name, projections in SIDES.items()
        for dtype in (FP32, BF16, FP16)
        for compact in (False, True)
        if one_rank(projections) or not compact
    }


ONES, SIDE = torch.ones(4, 2), SideBySide([4, 4], [2, 2])
MISFITS = {
    f"{rows} and {ranks}": Refusal(
        {"side": SideBySide(rows, ranks)}, ValueError, re.escape(f"none negative, found {rows} and {ranks}")
    )
    for rows, ranks in (([8], [2, 2]), ([4, 4], [4]), ([9, -1], [2, 2]), ([4, 4], [5, -1]))
}  # fmt: skip
ELSEWHERE = (ValueError, "factors must be on cpu, found meta")
CONTRACTS = (
    Contract(
        ops.block_diagonal,
        {
            "two": Case(partial(blocks, [(-1, 5), (10, 3)], FP32, False)),
            "compact": Case(partial(blocks, [(-1, 3), (10, 3)], BF16, True)),
            "several": Case(partial(blocks, [(-1, 5), (4, 0), (40, 3)], FP32, False, each=(3,))),
            "several, compact": Case(partial(blocks, [(-1, 3), (90, 3)], FP16, True, each=(3,))),
            "five": Case(partial(blocks, FIVE, FP16, False), why_not=TOO_MANY),
        },
        bound,
        shapes(blocks),
        {"blocks": [ONES, ONES], "side": SIDE, "factors": torch.ones(2, 2), "compact": False},
        {
            "rows": Refusal(
                {"side": SideBySide([4, 5], [2, 2])}, ValueError, r"blocks must be \[\(4, 2\), \(5, 2\)\]"
            ),
            "dtypes": Refusal({"blocks": [ONES, ONES.half()]}, TypeError, "one dtype"),
            "factors": Refusal({"factors": torch.ones(1, 2)}, ValueError, r"factors must be float32 \[2, 2\]"),
            "compact of two ranks": Refusal(
                {"blocks": [ONES, ONES[:, :1]], "side": SideBySide([4, 4], [2, 1]), "compact": True},
                ValueError,
                r"one rank R, or 0, to be compact, found \[2, 1\]",
            ),
            "elsewhere": Refusal({"factors": torch.ones(2, 2, device="meta")}, *ELSEWHERE),
            **MISFITS,
        },
    ),
    Contract(
        ops.block_diagonal_parts,
        {
            "several": Case(partial(matrix, [(-1, 5), (4, 0), (40, 3)], FP32, False, each=(3,))),
            "several, compact": Case(partial(matrix, [(-1, 3), (90, 3)], FP16, True, each=(3,))),
            "one adapter": Case(partial(matrix, [(-1, 4), (10, 0)], FP32, False)),
            "compact": Case(partial(matrix, [(-1, 3), (10, 3)], BF16, True)),
            "five": Case(partial(matrix, FIVE, FP16, False), why_not=TOO_MANY),
        },
        bound_parts,
        shapes(matrix),
        {"matrix": torch.ones(8, 4), "side": SIDE, "factors": torch.ones(2), "compact": False},
        {
            "columns": Refusal(
                {"matrix": torch.ones(8, 5)}, ValueError, r"matrix \(8, 5\) does not fit rows \[4, 4\]"
            ),
            **{
                f"factors {wrong.dtype} {tuple(wrong.shape)}": Refusal(
                    {"factors": wrong}, ValueError, r"factors must be float32 \[2\], found torch\.float"
                )
                for wrong in (torch.ones(2, 2), torch.ones(2).half(), torch.ones(2).double())
            },
            "integers": Refusal({"matrix": torch.ones(8, 4).int()}, TypeError, r"floating dtype, found torch\.int32"),
            "elsewhere": Refusal({"factors": torch.ones(2, device="meta")}, *ELSEWHERE),
            **MISFITS,
        },
    ),
)  # fmt: skip
