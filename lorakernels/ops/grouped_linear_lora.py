# SPDX-License-Identifier: Apache-2.0
"""y = x W_gᵀ + scaling · s B_gᵀ of rows in groups: the frozen matrices of experts with their adapters' second half.

y is [M, N]. Rows outside of all groups (`Groups.group_of`) are not written. Rows after the end of a group are
multiplied as they are.

csrc's kernel is the one of fp8_linear_lora, with the matrices of each row tile's own group: one launch for all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, multiprocessors_of
from lorakernels.kernels.arguments import name, where
from lorakernels.numerics.fp8 import E4M3
from lorakernels.numerics.groups import GROUP_ROWS
from lorakernels.ops import checks
from lorakernels.ops.fp8_linear_lora import padded_factors
from lorakernels.ops.hardware import LayerOnGPU, why_not_aligned, why_not_wgmma, why_not_wgmma_gemm
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.values import GroupedWeight, Groups, ProductSizes, Scaled, Tiles, Up, Weight

DEPTH = 128  # of a step of csrc's kernels


class GroupedLinear(NamedTuple):
    """x [M, K] and the weight [G, N, K] are e4m3 bytes, each with scale_inv fp32 [G], one for each group.

    `up` has s [M, R] and lora_B [G, N, R]. `out_dtype` is y's.
    """

    x: Scaled
    weight: Weight
    groups: Groups
    up: Up | None
    out_dtype: torch.dtype


def reference(a: GroupedLinear) -> Tensor:
    """y [M, N] in `out_dtype`, rounded once. The host reads which rows each group has.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(a)
    x, weight, groups, up, out_dtype = a
    y = fake(a).zero_()
    for g, rows in blocks(groups):
        total = values(x, g, rows) @ values(weight, g, g).t()
        if up is not None and up.s is not None:
            lora_B = up.lora_B[g].to(up.s.dtype).float()
            total += up.scaling * (up.s[rows].float() @ lora_B.t())
        y[rows] = total.to(out_dtype)
    return y


def blocks(groups: Groups) -> list[tuple[int, slice]]:
    """(g, its 128 rows) of each block of rows that belongs to a group."""
    group_of = enumerate(groups.group_of.tolist())
    return [(g, slice(i * GROUP_ROWS, (i + 1) * GROUP_ROWS)) for i, g in group_of if g >= 0]


def values(of: Scaled | Weight, group: int, part: slice | int, fp8: torch.dtype = E4M3) -> Tensor:
    """fp32 values of a group's part of an operand."""
    assert of.scale_inv is not None
    return of.data[part].view(fp8).float() * of.scale_inv[group]


def fake(a: GroupedLinear) -> Tensor:
    return empty(a.x.data, a.x.data.shape[0], a.weight.data.shape[1], dtype=a.out_dtype)


def check(a: GroupedLinear) -> None:
    """TypeError or ValueError unless the operands are bytes with a scale for each group, and the factors fit them."""
    x, weight, groups, up = a.x, a.weight, a.groups, a.up
    rows, depth = x.data.shape
    checks.groups(groups, rows, x.data.device)
    checks.of_groups("weight", weight.data, groups, (None, depth), torch.uint8)
    checks.scales_of_groups("x_scale_inv", x.scale_inv, groups)
    checks.scales_of_groups("weight_scale_inv", weight.scale_inv, groups)
    if up is not None and up.s is not None:
        checks.of_groups("lora_B", up.lora_B, groups, (weight.data.shape[1], up.s.shape[1]))


def why_not_csrc_kernel(a: GroupedLinear) -> str | None:
    """None if csrc's kernel takes these operands; otherwise the reason why not."""
    _, n, k = a.weight.data.shape
    if why_not := why_not_sizes(capability_of(a.x.data.device), n, k):
        return why_not
    if a.out_dtype != torch.bfloat16:
        return f"out_dtype is {a.out_dtype}, not bfloat16"
    s = None if a.up is None else a.up.s
    return why_not_aligned(x=a.x.data, weight=a.weight.data, s=s)


def why_not_sizes(capability: tuple[int, int], n: int, k: int) -> str | None:
    """None if csrc's kernels multiply matrices [n, k] of groups on such a GPU; otherwise the reason why not.

    dx sums over n, 128 at a time: what lies behind a matrix's last row is the next group's first.
    """
    if n % DEPTH:
        return f"N = {n} must be a multiple of {DEPTH} for groups"
    return why_not_wgmma_gemm(capability, n, k)


def by_csrc(a: GroupedLinear) -> Tensor:
    """One kernel of csrc, for any rank."""
    y, weight, up = fake(a), a.weight, a.up
    (rows, depth), (g, cols, _) = a.x.data.shape, weight.data.shape
    assert weight.scale_inv is not None
    factors = padded_factors(up, y.dtype)
    rank = 0 if up is None or factors is None else up.lora_B.shape[2]
    multiprocessors = multiprocessors_of(y.get_device())
    wide = -(-rows // GROUP_ROWS) * -(-cols // 256) >= multiprocessors
    extension().grouped_linear_lora(
        y,
        a.x,
        GroupedWeight(weight.data, weight.scale_inv, a.groups.group_of, g),
        factors,
        ProductSizes(rows, cols, depth, rank),
        (name(y.dtype), name(y.dtype if factors is None else factors.lora_B.dtype)),
        Tiles(False, GROUP_ROWS, 256 if wide else 128, multiprocessors),
        where(y),
    )
    return y


def chosen_grouped_gemm(place: LayerOnGPU) -> tuple[str, str]:
    """What doctor says of the products of rows in groups."""
    why_not = why_not_wgmma(place.capability)
    return ("torch", why_not) if why_not else ("csrc", "one kernel for all experts, bf16, any rank")


grouped_linear_lora = define(
    Op(
        "grouped_linear_lora",
        GroupedLinear,
        reference,
        fake,
        check,
        (Implementation("csrc", by_csrc, why_not_csrc_kernel), Implementation("torch", reference)),
        chosen_grouped_gemm,
    ),
    "(Tensor x, Tensor x_scale_inv, Tensor weight, Tensor weight_scale_inv, Tensor group_of, Tensor starts,"
    " Tensor ends, Tensor? s, Tensor? lora_B, float scaling, ScalarType out_dtype) -> Tensor",
)
