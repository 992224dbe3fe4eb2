# SPDX-License-Identifier: Apache-2.0
"""dA_g = dsᵀ x of rows in groups: the gradient of the first halves of experts' adapters.

ds [M, R], x [M, K] e4m3 bytes with a scale_inv fp32 [G] of each group, dA [G, R, K]. Rows behind the end of a group do
not count. A program of the Triton kernel sums some columns of a group's rows in their order, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.kernels.triton import grouped
from lorakernels.numerics.groups import spans
from lorakernels.ops import checks
from lorakernels.ops.grouped_linear_lora import values
from lorakernels.ops.grouped_quantize_lora_down import chosen_grouped, why_not_grouped_triton
from lorakernels.ops.register import Implementation, define, empty, of_parameters
from lorakernels.values import Groups, Scaled


def reference(ds: Tensor, x: Scaled, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """dA [G, R, K] in `out_dtype`, rounded once. The host reads where each group begins.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(ds, x, groups, out_dtype)
    dA = fake(ds, x, groups, out_dtype).zero_()
    for g, own in spans(groups):
        dA[g] = (ds[own].float().t() @ values(x, g, own)).to(out_dtype)
    return dA


def fake(ds: Tensor, x: Scaled, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    return empty(ds, groups.ends.shape[0], ds.shape[1], x.data.shape[1], dtype=out_dtype)


def check(ds: Tensor, x: Scaled, groups: Groups, out_dtype: torch.dtype) -> None:
    """TypeError or ValueError unless ds and x are matrices of as many rows, and x has a scale for each group."""
    checks.matrix("ds", ds)
    checks.floats("ds", ds)
    checks.groups(groups, ds.shape[0], ds.device)
    checks.scales_of_groups("x_scale_inv", x.scale_inv, groups)
    if x.data.dim() != 2 or len(x.data) != len(ds):
        raise ValueError(f"x must be [{len(ds)}, K], found {list(x.data.shape)}")


def why_not_triton(ds: Tensor, x: Scaled, groups: Groups, out_dtype: torch.dtype) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    return why_not_grouped_triton(ds.shape[1], ds=ds, x8=x.data)


def by_triton(ds: Tensor, x: Scaled, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """One read of x."""
    dA = fake(ds, x, groups, out_dtype)
    assert x.scale_inv is not None
    grouped.grad_a(dA, ds, x.data, x.scale_inv, groups)
    return dA


grouped_lora_grad_a = define(
    of_parameters(
        "grouped_lora_grad_a",
        reference,
        fake,
        check,
        (Implementation("triton", by_triton, why_not_triton), Implementation("torch", reference)),
        chosen_grouped,
    ),
    "(Tensor ds, Tensor x, Tensor x_scale_inv, Tensor group_of, Tensor starts, Tensor ends, ScalarType out_dtype)"
    " -> Tensor",
)
