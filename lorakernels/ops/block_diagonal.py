# SPDX-License-Identifier: Apache-2.0
"""The adapters of projections that are one matrix, as one block-diagonal matrix D and back.

    block_diagonal         D = diag(f_1 B_1, …, f_n B_n) [ΣN, ΣR] for two choices of f, the forward's and the backward's
    block_diagonal_parts   f_i D[rows of i, columns of i] for every R_i > 0

B_i [N_i, R_i] and the results are of one floating dtype, f is fp32. A projection without an adapter has R_i = 0 and no
block; its rows are zeros. With `compact`, all R_i > 0 are one R. The backward's matrix is then [ΣN, R], with the blocks
stacked. autograd/linear/linear.py has the formulas that need them.

One kernel each (kernels/triton/block_diagonal.py), where torch takes one or two per block. Each element is read once,
multiplied in fp32 and rounded once at the store. More than 4 projections go through PyTorch.

Of J adapters in one batch (numerics/segments.py), the B_i and the results lead with J, and f serves all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.kernels.triton.block_diagonal import MAX_BLOCKS, launch
from lorakernels.numerics.products import adapter_places
from lorakernels.ops.hardware import chosen_layer_kernel, why_not_layer_kernel
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.values import SideBySide


class DiagonalBlocks(NamedTuple):
    """`blocks` are the B_i [N_i, R_i] of one dtype, of projections with R_i > 0. factors is fp32 [2, n].

    `compact`: the backward's matrix is [ΣN, R].
    """

    blocks: Sequence[Tensor]
    side: SideBySide
    factors: Tensor
    compact: bool = False


def reference(a: DiagonalBlocks) -> tuple[Tensor, Tensor]:
    """diag(f_i B_i) [ΣN, ΣR] in the blocks' dtype, for f the first and the second row of `factors`.

    `compact`: the second is [ΣN, R], its rows zeros where R_i = 0.

    Raises:
        ValueError, TypeError: they do not fit together.
    """
    check(a)
    blocks, side, factors, compact = a
    matrices = []
    of_both = zip(_shapes(side, compact), factors, (False, compact), strict=True)
    for shape, of_factors, below in of_both:
        out = blocks[0].new_zeros(*blocks[0].shape[:-2], *shape)
        for block, (i, (n, r)) in zip(blocks, adapter_places(side, below), strict=True):
            out[..., n, r] = (block.float() * of_factors[i]).to(out.dtype)
        matrices.append(out)
    return matrices[0], matrices[1]


def _shapes(side: SideBySide, compact: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of the forward's D and of the backward's."""
    rows = sum(side.rows)
    return (rows, sum(side.ranks)), (rows, _width(side, compact))


def _width(side: SideBySide, compact: bool) -> int:
    return max(side.ranks) if compact else sum(side.ranks)


def fake(a: DiagonalBlocks) -> tuple[Tensor, Tensor]:
    (first, second), like = _shapes(a.side, a.compact), a.blocks[0]
    leading = like.shape[:-2]
    return empty(like, *leading, *first), empty(like, *leading, *second)


def check(a: DiagonalBlocks) -> None:
    """ValueError or TypeError where the blocks, the projections and the factors do not fit together."""
    blocks, side, factors, compact = a
    _check_side(side, compact)
    expected = [(n, r) for n, r in zip(*side, strict=True) if r]
    shapes = [tuple(block.shape) for block in blocks]
    leading = {shape[:-2] for shape in shapes}
    if [shape[-2:] for shape in shapes] != expected or len(leading) != 1 or len(*leading) > 1:
        raise ValueError(f"blocks must be {expected}, found {shapes}")
    if len({block.dtype for block in blocks}) > 1:
        raise TypeError(f"blocks must have one dtype, found {[block.dtype for block in blocks]}")
    _check_factors(factors, blocks[0].device, 2, len(side.rows))


def _check_side(side: SideBySide, compact: bool) -> None:
    rows, ranks = side
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


def why_not_triton(a: DiagonalBlocks) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    if len(a.side.rows) > MAX_BLOCKS:
        return f"{len(a.side.rows)} projections are more than {MAX_BLOCKS}"
    return why_not_layer_kernel(**{f"block {i}": tensor for i, tensor in enumerate(a.blocks)})


def by_triton(a: DiagonalBlocks) -> tuple[Tensor, Tensor]:
    """One kernel; the reference's bits."""
    first, second = fake(a)
    launch(first, second, *a, split=False)
    return first, second


block_diagonal = define(
    Op(
        "block_diagonal",
        DiagonalBlocks,
        reference,
        fake,
        check,
        (Implementation("triton", by_triton, why_not_triton), Implementation("torch", reference)),
        partial(chosen_layer_kernel, "one launch for q, k, v or gate, up, forward and backward"),
    ),
    "(Tensor[] blocks, SymInt[] rows, SymInt[] ranks, Tensor factors, bool compact=False) -> (Tensor, Tensor)",
)


class Matrix(NamedTuple):
    """matrix is [ΣN, ΣR], or with `compact` [ΣN, R]; factors is fp32 [n]."""

    matrix: Tensor
    side: SideBySide
    factors: Tensor
    compact: bool = False


def reference_parts(a: Matrix) -> list[Tensor]:
    """f_i D_i of each R_i > 0, contiguous, in the matrix's dtype, for f `factors`.

    Raises:
        ValueError, TypeError: they do not fit together.
    """
    check_parts(a)
    return [
        (a.matrix[..., n, r].float() * a.factors[i]).to(a.matrix.dtype)
        for i, (n, r) in adapter_places(a.side, a.compact)
    ]


def fake_parts(a: Matrix) -> list[Tensor]:
    leading = a.matrix.shape[:-2]
    return [empty(a.matrix, *leading, n, r) for n, r in zip(*a.side, strict=True) if r]


def check_parts(a: Matrix) -> None:
    """ValueError or TypeError where the matrix, the projections and the factors do not fit together."""
    matrix, side, factors, compact = a
    _check_side(side, compact)
    rows, ranks = side
    if matrix.dim() > 3 or matrix.shape[-2:] != (sum(rows), _width(side, compact)):
        raise ValueError(
            f"matrix {tuple(matrix.shape)} does not fit rows {list(rows)}, ranks {list(ranks)}"
        )
    if not matrix.is_floating_point():
        raise TypeError(f"matrix must be of a floating dtype, found {matrix.dtype}")
    _check_factors(factors, matrix.device, len(rows))


def why_not_triton_parts(a: Matrix) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    return why_not_triton(DiagonalBlocks([a.matrix], a.side, a.factors, a.compact))


def by_triton_parts(a: Matrix) -> list[Tensor]:
    """One kernel; the reference's bits."""
    blocks = fake_parts(a)
    launch(a.matrix, a.matrix, blocks, a.side, a.factors, a.compact, split=True)
    return blocks


block_diagonal_parts = define(
    Op(
        "block_diagonal_parts",
        Matrix,
        reference_parts,
        fake_parts,
        check_parts,
        (
            Implementation("triton", by_triton_parts, why_not_triton_parts),
            Implementation("torch", reference_parts),
        ),
    ),
    "(Tensor matrix, SymInt[] rows, SymInt[] ranks, Tensor factors, bool compact=False) -> Tensor[]",
)
