# SPDX-License-Identifier: Apache-2.0
"""dx = dy W_g + ds A_g of rows in groups: the gradient of what experts multiply.

dy [M, N] is bytes of e4m3 or e5m2 with a scale_inv fp32 [G], one for each group. W [G, N, K] is e4m3 bytes with a
scale_inv [G]. ds is [M, R], A [G, R, K], dx [M, K]. Rows that are nobody's (`Groups.group_of`) are not written. Rows
behind the end of a group are multiplied as they are.

csrc's kernel is the one of fp8_grad_input with W as it lies, whose row tiles take the matrices of their own group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lorakernels.device import capability_of, extension, multiprocessors_of
from lorakernels.kernels.arguments import format_of, name, where
from lorakernels.numerics.groups import GROUP_ROWS
from lorakernels.ops import checks
from lorakernels.ops.grouped_linear_lora import blocks, chosen_grouped_gemm, values, why_not_sizes
from lorakernels.ops.hardware import why_not_aligned
from lorakernels.ops.register import Implementation, define, empty, of_parameters
from lorakernels.values import GroupedWeight, Groups, ProductSizes, Scaled, Tiles, Weight


def reference(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    groups: Groups,
    ds: Tensor | None,
    lora_A: Tensor | None,
    out_dtype: torch.dtype,
    split: bool = True,
) -> Tensor:
    """dx [M, K] in `out_dtype`, rounded once. The host reads whose rows are whose.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(dy, fp8_dtype, weight, groups, ds, lora_A, out_dtype, split)
    dx = fake(dy, fp8_dtype, weight, groups, ds, lora_A, out_dtype).zero_()
    for g, own in blocks(groups):
        total = values(dy, g, own, fp8_dtype) @ values(weight, g, g)
        if ds is not None and lora_A is not None:
            total += ds[own].float() @ lora_A[g].to(ds.dtype).float()
        dx[own] = total.to(out_dtype)
    return dx


def fake(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    groups: Groups,
    ds: Tensor | None,
    lora_A: Tensor | None,
    out_dtype: torch.dtype,
    split: bool = True,
) -> Tensor:
    return empty(dy.data, dy.data.shape[0], weight.data.shape[2], dtype=out_dtype)


def check(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    groups: Groups,
    ds: Tensor | None,
    lora_A: Tensor | None,
    out_dtype: torch.dtype,
    split: bool = True,
) -> None:
    """TypeError or ValueError unless the operands are bytes with a scale for each group, and the factors fit them."""
    rows, cols = dy.data.shape
    checks.groups(groups, rows, dy.data.device)
    checks.of_groups("weight", weight.data, groups, (cols, None), torch.uint8)
    checks.scales_of_groups("dy_scale_inv", dy.scale_inv, groups)
    checks.scales_of_groups("weight_scale_inv", weight.scale_inv, groups)
    if ds is not None and lora_A is not None:
        checks.of_groups("lora_A", lora_A, groups, (ds.shape[1], weight.data.shape[2]))


def why_not_csrc_kernel(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    groups: Groups,
    ds: Tensor | None,
    lora_A: Tensor | None,
    out_dtype: torch.dtype,
    split: bool = True,
) -> str | None:
    """None if csrc's kernel takes these operands; otherwise the reason why not."""
    _, n, k = weight.data.shape
    if why_not := why_not_sizes(capability_of(dy.data.device), n, k):
        return why_not
    if out_dtype != torch.bfloat16:
        return f"out_dtype is {out_dtype}, not bfloat16"
    return why_not_aligned(dy=dy.data, weight=weight.data, lora_A=lora_A)


def by_csrc(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    groups: Groups,
    ds: Tensor | None,
    lora_A: Tensor | None,
    out_dtype: torch.dtype,
    split: bool = True,
) -> Tensor:
    """One kernel of csrc, for any rank."""
    dx = fake(dy, fp8_dtype, weight, groups, ds, lora_A, out_dtype)
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
    of_parameters(
        "grouped_grad_input",
        reference,
        fake,
        check,
        (Implementation("csrc", by_csrc, why_not_csrc_kernel), Implementation("torch", reference)),
        chosen_grouped_gemm,
    ),
    "(Tensor dy, Tensor dy_scale_inv, ScalarType fp8_dtype, Tensor weight, Tensor weight_scale_inv, Tensor group_of,"
    " Tensor starts, Tensor ends, Tensor? ds, Tensor? lora_A, ScalarType out_dtype, bool split=True) -> Tensor",
)
