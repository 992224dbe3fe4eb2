# SPDX-License-Identifier: Apache-2.0
"""dx = dy W_g + ds A_g of rows in groups: the gradient of the input of experts.

dx is [M, K]. Rows outside of all groups (`Groups.group_of`) are not written. Rows after the end of a group are
multiplied as they are.

csrc's kernel is the one of fp8_grad_input with W as it lies, with the matrices of each row tile's own group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorakernels.device import capability_of, extension, multiprocessors_of
from lorakernels.kernels.arguments import format_of, name, where
from lorakernels.numerics.groups import GROUP_ROWS
from lorakernels.ops import checks
from lorakernels.ops.grouped_linear_lora import blocks, chosen_grouped_gemm, values, why_not_sizes
from lorakernels.ops.hardware import why_not_aligned
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.values import GroupedWeight, Groups, ProductSizes, Scaled, Tiles, Weight


class GroupedGradInput(NamedTuple):
    """dy [M, N] is bytes of `fp8_dtype` with scale_inv fp32 [G], one for each group; `out_dtype` is dx's.

    The weight [G, N, K] is e4m3 bytes with scale_inv [G]. ds is [M, R], lora_A [G, R, K]. `split` asks the FP8 tensor
    cores to add partial sums in fp32.
    """

    dy: Scaled
    fp8_dtype: torch.dtype
    weight: Weight
    groups: Groups
    ds: Tensor | None
    lora_A: Tensor | None
    out_dtype: torch.dtype
    split: bool = True


def reference(a: GroupedGradInput) -> Tensor:
    """dx [M, K] in `out_dtype`, rounded once. The host reads which rows each group has.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(a)
    ds = a.ds
    dx = fake(a).zero_()
    for g, rows in blocks(a.groups):
        total = values(a.dy, g, rows, a.fp8_dtype) @ values(a.weight, g, g)
        if ds is not None and a.lora_A is not None:
            total += ds[rows].float() @ a.lora_A[g].to(ds.dtype).float()
        dx[rows] = total.to(a.out_dtype)
    return dx


def fake(a: GroupedGradInput) -> Tensor:
    return empty(a.dy.data, a.dy.data.shape[0], a.weight.data.shape[2], dtype=a.out_dtype)


def check(a: GroupedGradInput) -> None:
    """TypeError or ValueError unless the operands are bytes with a scale for each group, and the factors fit them."""
    dy, weight, groups = a.dy, a.weight, a.groups
    rows, cols = dy.data.shape
    checks.groups(groups, rows, dy.data.device)
    checks.of_groups("weight", weight.data, groups, (cols, None), torch.uint8)
    checks.scales_of_groups("dy_scale_inv", dy.scale_inv, groups)
    checks.scales_of_groups("weight_scale_inv", weight.scale_inv, groups)
    if a.ds is not None and a.lora_A is not None:
        checks.of_groups("lora_A", a.lora_A, groups, (a.ds.shape[1], weight.data.shape[2]))


def why_not_csrc_kernel(a: GroupedGradInput) -> str | None:
    """None if csrc's kernel takes these operands; otherwise the reason why not."""
    _, n, k = a.weight.data.shape
    if why_not := why_not_sizes(capability_of(a.dy.data.device), n, k):
        return why_not
    if a.out_dtype != torch.bfloat16:
        return f"out_dtype is {a.out_dtype}, not bfloat16"
    return why_not_aligned(dy=a.dy.data, weight=a.weight.data, lora_A=a.lora_A)


def by_csrc(a: GroupedGradInput) -> Tensor:
    """One kernel of csrc, for any rank."""
    dy, fp8_dtype, weight, groups, ds, lora_A, out_dtype, split = a
    dx = fake(a)
    (rows, depth), (g, _, cols) = dy.data.shape, weight.data.shape
    assert weight.scale_inv is not None
    rank = 0 if ds is None or lora_A is None else ds.shape[1]
    if ds is not None:
        padded = rank % 8 or ds.data_ptr() % 16
        ds = F.pad(ds, (0, -rank % 8)).contiguous() if padded else ds.contiguous()
    if lora_A is not None and lora_A.dtype not in (out_dtype, torch.float32):
        lora_A = lora_A.to(out_dtype)
    extension().grouped_grad_input(
        (dx, ds, lora_A),
        dy,
        GroupedWeight(weight.data, weight.scale_inv, groups.group_of, g),
        ProductSizes(rows, cols, depth, rank),
        (
            name(out_dtype),
            name(out_dtype if lora_A is None else lora_A.dtype),
            format_of(fp8_dtype),
        ),
        Tiles(split, GROUP_ROWS, 128, multiprocessors_of(dx.get_device())),
        where(dx),
    )
    return dx


grouped_grad_input = define(
    Op(
        "grouped_grad_input",
        GroupedGradInput,
        reference,
        fake,
        check,
        (Implementation("csrc", by_csrc, why_not_csrc_kernel), Implementation("torch", reference)),
        chosen_grouped_gemm,
    ),
    "(Tensor dy, Tensor dy_scale_inv, ScalarType fp8_dtype, Tensor weight, Tensor weight_scale_inv, Tensor group_of,"
    " Tensor starts, Tensor ends, Tensor? ds, Tensor? lora_A, ScalarType out_dtype, bool split=True) -> Tensor",
)
