# SPDX-License-Identifier: Apache-2.0
"""The products of linear.py for some of all rows. Ranks exchange more rows meanwhile (parallel/tensor/projections.py).

`project_rows` and `grad_rows` write into a tensor that has all rows. Per row they compute what `project` and `grad_x`
do, of an operand with one scale. `grad_rows` takes one mask at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from lorakernels.autograd.linear.projections import Projections
from lorakernels.kernels import tune
from lorakernels.ops.fp8_grad_input import GradInput, fp8_grad_input_into
from lorakernels.ops.fp8_linear_lora import Linear, fp8_linear_lora_into
from lorakernels.values import Dropout, Scaled, Up, Weight

# Seconds for each 128 × 128 × 1 of a product, on an H100 or H200. It is 4.5 ns at 1,103 TFLOP/s and 5.4 ns at 861
# (docs/performance.md).
_OF_A_TILE = 5e-9


class Product(NamedTuple):
    """y [M, N] = x Wᵀ, or dx [M, K] = dy W, of any number of rows.

    Attributes:
        cols, depth: N and K of y, or K and N of dx.
        backward: whether it is dx.
        split: whether partial sums are added in fp32.
    """

    cols: int
    depth: int
    backward: bool
    split: bool

    @property
    def weight(self) -> tuple[int, int]:
        """[N, K] of W."""
        return (self.depth, self.cols) if self.backward else (self.cols, self.depth)

    def seconds(self, rows: int, multiprocessors: int) -> float:
        """On Hopper, by the rounds of csrc's tiles over the multiprocessors. The last one may be partly empty."""
        how = "split" if self.split else "fast"
        if self.backward:
            how = "turned" if self.split else "turned fast"
        rounds = tune.csrc_tile(rows, self.cols, how, multiprocessors)[1]
        return rounds * self.depth * _OF_A_TILE

    def slower_in(self, pieces: Iterable[int], multiprocessors: int) -> float:
        """The additional seconds in `pieces`, numbers of rows, over all rows at once."""
        sizes = [*pieces]
        apart = sum(self.seconds(rows, multiprocessors) for rows in sizes)
        return apart - self.seconds(sum(sizes), multiprocessors)


def slower_in_pieces(
    to: Projections, pieces: Iterable[int], multiprocessors: int, backward: bool = False
) -> float:
    """On Hopper, the additional seconds of y (or dx) in `pieces`, numbers of rows, over all rows at once."""
    cols, depth = to.weight.shape[::-1] if backward else to.weight.shape
    split = to.spec.split_dgrad if backward else to.spec.split_fprop
    return Product(cols, depth, backward, split).slower_in(pieces, multiprocessors)


def masks_at(to: Projections, rows: slice) -> Projections:
    """`to` with the masks of these of its rows."""

    def of(mask: Dropout) -> Dropout:
        bits = None if mask.dropped is None else mask.dropped[rows]
        return mask._replace(row0=mask.row0 + rows.start, dropped=bits)

    return to._replace(masks=tuple(mask and of(mask) for mask in to.masks))


def project_rows(
    y: Tensor,
    rows: slice,
    operand: Scaled,
    s: Tensor | None,
    to: Projections,
    stacked_B: Tensor | None,
) -> None:
    """Write the `rows` of y [M, ΣN]. `operand` and `s` have these rows only."""
    up = None if stacked_B is None else Up(stacked_B, s, to.spec.scaling)
    weight = Weight(to.weight, to.scale_inv)
    split, side = to.spec.split_fprop, to.diagonal
    a = Linear(operand, weight, to.bias, up, y.dtype, split, side=side)
    fp8_linear_lora_into(y[rows], a)


def grad_rows(dx: Tensor, rows: slice, dy8: Scaled, ds: Tensor | None, to: Projections) -> None:
    """Write the `rows` of dx [M, K]. `dy8` and `ds` have these rows only, and `to` has the masks of all rows."""
    lora_A = to.lora_A
    mask = masks_at(to, rows).masks[0] if to.masks else None
    d = ds if lora_A is not None else None
    dtype, split = to.spec.backward_dtype, to.spec.split_dgrad
    a = GradInput(dy8, dtype, to.grad_weight, d, lora_A, mask, dx.dtype, split)
    fp8_grad_input_into(dx[rows], a)
