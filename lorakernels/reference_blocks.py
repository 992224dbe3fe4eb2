# SPDX-License-Identifier: Apache-2.0
"""The adapters of projections that are one matrix, in plain PyTorch (autograd/fused_linear.py has the formulas).

block_diagonal         diag(f_1 B_1, …, f_n B_n) [ΣN, ΣR] for two choices of f, the forward's and the backward's
block_diagonal_parts   of D [ΣN, ΣR]: f_i D[rows of i, columns of i]

compact: what the backward has, of blocks of one rank R, is [ΣN, R] instead, one below the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels.reference import adapter_places


def block_diagonal(
    blocks: Sequence[Tensor],
    rows: Sequence[int],
    ranks: Sequence[int],
    factors: Tensor,
    compact: bool = False,
) -> tuple[Tensor, Tensor]:
    """diag(f_i B_i) [ΣN, ΣR] in the blocks' dtype, for f the first and the second row of `factors` fp32 [2, n].
    `compact`: the second is [ΣN, R], its rows zeros where R_i = 0.

    `rows` N_i and `ranks` R_i are those of n projections; the `blocks`, [N_i, R_i] of one dtype, are those of the ones
    with R_i > 0.

    Raises:
        ValueError, TypeError: they do not fit together.
    """
    check_blocks(blocks, rows, ranks, factors, compact)
    found = []
    for of_factors, below in zip(factors, (False, compact), strict=True):
        out = blocks[0].new_zeros(sum(rows), width(ranks, below))
        for block, (i, place) in zip(blocks, adapter_places(rows, ranks, below), strict=True):
            out[place] = (block.float() * of_factors[i]).to(out.dtype)
        found.append(out)
    return found[0], found[1]


def block_diagonal_parts(
    matrix: Tensor,
    rows: Sequence[int],
    ranks: Sequence[int],
    factors: Tensor,
    compact: bool = False,
) -> list[Tensor]:
    """f_i D_i of each R_i > 0, contiguous, in the matrix's dtype, for f `factors` fp32 [n].

    Raises:
        ValueError, TypeError: they do not fit together.
    """
    check_matrix(matrix, rows, ranks, factors, compact)
    return [
        (matrix[place].float() * factors[i]).to(matrix.dtype)
        for i, place in adapter_places(rows, ranks, compact)
    ]


def width(ranks: Sequence[int], compact: bool) -> int:
    """Columns of D."""
    return max(ranks) if compact else sum(ranks)


def check_matrix(
    matrix: Tensor,
    rows: Sequence[int],
    ranks: Sequence[int],
    factors: Tensor,
    compact: bool = False,
) -> None:
    """ValueError or TypeError where `block_diagonal_parts` cannot take these."""
    _check_sizes(rows, ranks, compact)
    if matrix.shape != (sum(rows), width(ranks, compact)):
        raise ValueError(
            f"matrix {tuple(matrix.shape)} does not fit rows {list(rows)}, ranks {list(ranks)}"
        )
    if not matrix.is_floating_point():
        raise TypeError(f"matrix must be of a floating dtype, found {matrix.dtype}")
    _check_factors(factors, matrix.device, len(rows))


def check_blocks(
    blocks: Sequence[Tensor],
    rows: Sequence[int],
    ranks: Sequence[int],
    factors: Tensor,
    compact: bool = False,
) -> None:
    """ValueError or TypeError where `block_diagonal` cannot take these."""
    _check_sizes(rows, ranks, compact)
    expected = [(n, r) for n, r in zip(rows, ranks, strict=True) if r]
    found = [tuple(block.shape) for block in blocks]
    if found != expected or not blocks:
        raise ValueError(f"blocks must be {expected}, found {found}")
    if len({block.dtype for block in blocks}) > 1:
        raise TypeError(f"blocks must have one dtype, found {[block.dtype for block in blocks]}")
    _check_factors(factors, blocks[0].device, 2, len(rows))


def _check_sizes(rows: Sequence[int], ranks: Sequence[int], compact: bool) -> None:
    if len(rows) != len(ranks) or min(*rows, *ranks, 0) < 0:
        raise ValueError(
            f"rows and ranks must be as many and none negative, found {list(rows)} and {list(ranks)}"
        )
    if compact and len({*ranks} - {0}) > 1:
        raise ValueError(f"ranks must be one rank R, or 0, to be compact, found {list(ranks)}")


def _check_factors(factors: Tensor, device: torch.device, *shape: int) -> None:
    if factors.shape != shape or factors.dtype != torch.float32:
        raise ValueError(
            f"factors must be float32 {list(shape)}, found {factors.dtype} {tuple(factors.shape)}"
        )
    if factors.device != device:
        raise ValueError(f"factors must be on {device}, found {factors.device}")
