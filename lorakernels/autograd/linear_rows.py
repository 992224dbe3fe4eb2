# SPDX-License-Identifier: Apache-2.0
"""The products of linear.py for some of all rows, so that ranks exchange others meanwhile (parallel/tensor_fused.py).

`project_rows` and `grad_rows` write into a tensor that has all rows. Per row they compute what `project` and `grad_x`
do, of an operand with one scale. `grad_rows` takes one mask at most.
"""

from __future__ import annotations

from torch import Tensor

from lorakernels.autograd.linear import Projections
from lorakernels.ops.fp8_grad_input import fp8_grad_input_into
from lorakernels.ops.fp8_linear_lora import fp8_linear_lora_into
from lorakernels.values import Scaled, Up, Weight


def masks_at(to: Projections, row0: int) -> Projections:
    """`to` with masks for rows that begin at `row0` of its own."""
    return to._replace(masks=tuple(m and m._replace(row0=m.row0 + row0) for m in to.masks))


def project_rows(
    y: Tensor,
    rows: slice,
    operand: Scaled,
    s: Tensor | None,
    to: Projections,
    stacked_B: Tensor | None,
) -> None:
    """Write the `rows` of y [M, ΣN]. `operand` and `s` have these alone."""
    up = None if stacked_B is None else Up(stacked_B, s, to.spec.scaling)
    weight = Weight(to.weight, to.scale_inv)
    fp8_linear_lora_into(y[rows], operand, weight, to.bias, up, to.spec.split_fprop)


def grad_rows(dx: Tensor, rows: slice, dy8: Scaled, ds: Tensor | None, to: Projections) -> None:
    """Write the `rows` of dx [M, K]. `dy8` and `ds` have these alone, and `to` has the masks of all."""
    lora_A = to.lora_A
    mask = masks_at(to, rows.start).masks[0] if to.masks else None
    d = ds if lora_A is not None else None
    spec = to.spec
    fp8_grad_input_into(
        dx[rows], dy8, spec.backward_dtype, to.grad_weight, d, lora_A, mask, spec.split_dgrad
    )
