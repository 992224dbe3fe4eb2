# SPDX-License-Identifier: Apache-2.0
"""dA_g = dsᵀ x of rows in groups: the gradient of the first halves of experts' adapters.

dA is [G, R, K]. Rows after the end of a group do not count. A program of the Triton kernel sums some columns of a
group's rows in their order, in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.kernels.triton import grouped
from lorakernels.numerics.groups import spans
from lorakernels.ops import checks
from lorakernels.ops.grouped_linear_lora import values
from lorakernels.ops.grouped_quantize_lora_down import chosen_grouped, why_not_grouped_triton
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.values import Groups, Scaled


class GroupedGradA(NamedTuple):
    """ds is [M, R], x [M, K] e4m3 bytes with scale_inv fp32 [G], one for each group. `out_dtype` is dA's."""

    ds: Tensor
    x: Scaled
    groups: Groups
    out_dtype: torch.dtype


def reference(a: GroupedGradA) -> Tensor:
    """dA [G, R, K] in `out_dtype`, rounded once. The host reads where each group begins.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(a)
    dA = fake(a).zero_()
    for g, rows in spans(a.groups):
        dA[g] = (a.ds[rows].float().t() @ values(a.x, g, rows)).to(a.out_dtype)
    return dA


def fake(a: GroupedGradA) -> Tensor:
    return empty(a.ds, a.groups.ends.shape[0], a.ds.shape[1], a.x.data.shape[1], dtype=a.out_dtype)


def check(a: GroupedGradA) -> None:
    """TypeError or ValueError unless ds and x are matrices of as many rows, and x has a scale for each group."""
    ds, x = a.ds, a.x
    checks.matrix("ds", ds)
    checks.floats("ds", ds)
    checks.groups(a.groups, ds.shape[0], ds.device)
    checks.scales_of_groups("x_scale_inv", x.scale_inv, a.groups)
    if x.data.dim() != 2 or len(x.data) != len(ds):
        raise ValueError(f"x must be [{len(ds)}, K], found {list(x.data.shape)}")


def why_not_triton(a: GroupedGradA) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    return why_not_grouped_triton(a.ds.shape[1], ds=a.ds, x8=a.x.data)


def by_triton(a: GroupedGradA) -> Tensor:
    """One read of x."""
    dA = fake(a)
    assert a.x.scale_inv is not None
    grouped.grad_a(dA, a.ds, a.x.data, a.x.scale_inv, a.groups)
    return dA


grouped_lora_grad_a = define(
    Op(
        "grouped_lora_grad_a",
        GroupedGradA,
        reference,
        fake,
        check,
        (Implementation("triton", by_triton, why_not_triton), Implementation("torch", reference)),
        chosen_grouped,
    ),
    "(Tensor ds, Tensor x, Tensor x_scale_inv, Tensor group_of, Tensor starts, Tensor ends, ScalarType out_dtype)"
    " -> Tensor",
)
