# SPDX-License-Identifier: Apache-2.0
"""dy8 = sat(dy · scale_g), ds = scaling · dy B_g, dB_g = scaling · dyᵀ s, of rows in groups: experts' output gradient.

dy8 [M, N] is FP8 bytes, scale_inv fp32 [G], ds [M, R], dB [G, N, R]. A group's scale and amax are columns c + g of the
FP8 state. Rows after the end of a group count as zeros. Rows outside of all groups (`Groups.group_of`) are not written.

A program of the Triton kernel takes some columns of a group's rows and keeps their dB. It writes dy B_g of its columns
in fp32, and PyTorch adds these over the programs. Every order of summation therefore depends on the shapes
alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.kernels.triton import grouped
from lorakernels.numerics.fp8 import FP8_MAX, quantize, scale_that_tells
from lorakernels.numerics.groups import spans
from lorakernels.ops import checks
from lorakernels.ops.grouped_quantize_lora_down import chosen_grouped, why_not_grouped_triton
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.values import Groups, Scaling, Up

Results = tuple[Tensor, Tensor, Tensor, Tensor]


class GroupedGrad(NamedTuple):
    """dy is [M, N]; `up` has lora_B [G, N, R] and s [M, R]. The scaling's column is the first group's, c."""

    dy: Tensor
    groups: Groups
    up: Up | None
    scaling: Scaling
    fp8_dtype: torch.dtype


def reference(a: GroupedGrad) -> Results:
    """(dy8, scale_inv, ds, dB), group by group. ds and dB are empty without `up`, dB without its s.

    The scale_inv of a group whose fp16 dy holds inf or NaN is NaN (`scale_that_tells`).

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(a)
    dy, groups, up, scaling, fp8_dtype = a
    state, column, delayed = scaling
    dy8, scale_inv, ds, dB = (t.zero_() for t in fake(a))
    for g, rows in spans(groups):
        part = dy[rows]
        of_group = Scaling(state, column + g, delayed)
        dy8[rows], scale = quantize(part, of_group, fp8_dtype)
        scale_inv[g : g + 1] = scale_that_tells(part, scale)
        if up is None:
            continue
        ds[rows] = (up.scaling * (part.float() @ up.lora_B[g].to(dy.dtype).float())).to(dy.dtype)
        if up.s is not None:
            dB[g] = (up.scaling * (part.float().t() @ up.s[rows].float())).to(dB.dtype)
    return dy8, scale_inv, ds, dB


def fake(a: GroupedGrad) -> Results:
    dy, up = a.dy, a.up
    m, g = dy.shape[0], a.groups.ends.shape[0]
    dy8 = torch.empty_like(dy, dtype=torch.uint8, memory_format=torch.contiguous_format)
    scale_inv = empty(dy, g, dtype=torch.float32)
    if up is None:
        return dy8, scale_inv, empty(dy, 0), empty(dy, 0)
    ds = empty(dy, m, up.lora_B.shape[2])
    dB = empty(dy, 0) if up.s is None else torch.empty_like(up.lora_B)
    return dy8, scale_inv, ds, dB


def check(a: GroupedGrad) -> None:
    """TypeError or ValueError unless dy is a matrix of a dtype that is computed in, and the other tensors fit it."""
    dy, groups, up, scaling, fp8_dtype = a
    checks.matrix("dy", dy)
    checks.floats("dy", dy)
    checks.groups(groups, dy.shape[0], dy.device)
    checks.state(scaling, dy.device)
    if fp8_dtype not in FP8_MAX:
        raise TypeError(f"fp8_dtype must be float8_e4m3fn or float8_e5m2, found {fp8_dtype}")
    if up is not None:
        rank = None if up.s is None else up.s.shape[1]
        checks.of_groups("lora_B", up.lora_B, groups, (dy.shape[1], rank))


def why_not_triton(a: GroupedGrad) -> str | None:
    """None if Triton's kernels take these tensors; otherwise the reason why not."""
    dy, up = a.dy, a.up
    if dy.dtype == torch.float16:
        return "dy is torch.float16, whose inf and NaN a scale would have to show"
    if up is None:
        return why_not_grouped_triton(None, dy=dy)
    return why_not_grouped_triton(up.lora_B.shape[2], dy=dy, lora_B=up.lora_B, s=up.s)


def by_triton(a: GroupedGrad) -> Results:
    """One read of dy."""
    out, up = fake(a), a.up
    factors = (None, None, 1.0) if up is None else (up.lora_B, up.s, up.scaling)
    grouped.quantize_grad(out, a.dy, a.groups, factors, a.scaling, a.fp8_dtype)
    return out


grouped_quantize_grad = define(
    Op(
        "grouped_quantize_grad",
        GroupedGrad,
        reference,
        fake,
        check,
        (Implementation("triton", by_triton, why_not_triton), Implementation("torch", reference)),
        chosen_grouped,
    ),
    "(Tensor dy, Tensor group_of, Tensor starts, Tensor ends, Tensor? lora_B, Tensor? s, Tensor(a6!) state,"
    " SymInt column, bool delayed, float scaling, ScalarType fp8_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
)
