# SPDX-License-Identifier: Apache-2.0
"""x8 = sat(x · scale_g), s = x A_gᵀ, of rows in groups: the quantized input of experts, with their adapters' half.

x8 [M, K] is e4m3 bytes, scale_inv fp32 [G], s [M, R]. Row m of x8 and s is made from x[rows[m]], and is zeros where
rows[m] is −1. A group's scale and amax are columns c + g of the FP8 state. Rows outside of all groups
(`Groups.group_of`) are not written.

One Triton kernel gathers, quantizes and multiplies. Another one takes the amax of groups without a scale before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.device import capability_of
from lorakernels.kernels.triton import grouped
from lorakernels.numerics.fp8 import E4M3, quantize
from lorakernels.numerics.groups import GROUP_ROWS, spans
from lorakernels.ops import checks
from lorakernels.ops.hardware import LayerOnGPU, why_not_layer_capability
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.values import Groups, Scaling

MAX_RANK = grouped.MOST_RANK
Results = tuple[Tensor, Tensor, Tensor]


class GroupedDown(NamedTuple):
    """x is [T, K], rows int32 [M], lora_A [G, R, K]. The scaling's column is the first group's, c."""

    x: Tensor
    rows: Tensor
    groups: Groups
    lora_A: Tensor | None
    scaling: Scaling


def reference(a: GroupedDown) -> Results:
    """(x8, scale_inv, s), group by group; the host reads where each begins. s is empty without lora_A.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(a)
    x = a.x
    state, column, delayed = a.scaling
    x8, scale_inv, s = (t.zero_() for t in fake(a))
    for g, rows in spans(a.groups):
        part = x[a.rows[rows]]
        x8[rows], scale_inv[g : g + 1] = quantize(part, Scaling(state, column + g, delayed), E4M3)
        if a.lora_A is not None:
            s[rows] = (part.float() @ a.lora_A[g].to(x.dtype).float().t()).to(x.dtype)
    return x8, scale_inv, s


def fake(a: GroupedDown) -> Results:
    x = a.x
    m, g = a.rows.shape[0], a.groups.ends.shape[0]
    x8 = empty(x, m, x.shape[1], dtype=torch.uint8)
    s = empty(x, 0) if a.lora_A is None else empty(x, m, a.lora_A.shape[1])
    return x8, empty(x, g, dtype=torch.float32), s


def check(a: GroupedDown) -> None:
    """TypeError or ValueError unless x is a matrix of a dtype that is computed in, and the other tensors fit it."""
    x, rows, groups, lora_A, scaling = a
    checks.matrix("x", x)
    checks.floats("x", x)
    checks.groups(groups, rows.shape[0], x.device)
    checks.vector("rows", rows, rows.shape[0], x.device, torch.int32)
    checks.state(scaling, x.device)
    if lora_A is not None:
        checks.of_groups("lora_A", lora_A, groups, (None, x.shape[1]))


def why_not_triton(a: GroupedDown) -> str | None:
    """None if Triton's kernels take these tensors; otherwise the reason why not."""
    lora_A = a.lora_A
    rank = None if lora_A is None else lora_A.shape[1]
    return why_not_grouped_triton(rank, x=a.x, rows=a.rows, lora_A=lora_A)


def why_not_grouped_triton(rank: int | None, **of: Tensor | None) -> str | None:
    """None if Triton's kernels of rows in groups take these tensors, else the reason. The first of them is x."""
    for label, tensor in of.items():
        if tensor is None:
            continue
        if label in ("x", "dy", "ds"):
            if why_not := why_not_layer_capability(capability_of(tensor.device)):
                return why_not
            if tensor.dtype not in (torch.bfloat16, torch.float16):
                return f"{label} is {tensor.dtype}, not bfloat16 or float16"
        if tensor.numel() == 0:
            return f"{label} has no elements"
        if not tensor.is_contiguous():
            return f"{label} must be contiguous, found strides {tensor.stride()}"
    if rank is not None and not 0 < rank <= grouped.MOST_RANK:
        return f"rank {rank} is not in 1 to {grouped.MOST_RANK}"
    return None


def by_triton(a: GroupedDown) -> Results:
    """One read of each row."""
    out = fake(a)
    grouped.quantize_down(out, *a)
    return out


def chosen_grouped(place: LayerOnGPU) -> tuple[str, str]:
    """What doctor says of the ops of rows in groups."""
    why_not = why_not_layer_capability(place.capability)
    note = f"experts in bf16 and fp16, rank ≤ {grouped.MOST_RANK}, from rows in multiples of {GROUP_ROWS}"
    return ("torch", why_not) if why_not else ("triton", note)


grouped_quantize_lora_down = define(
    Op(
        "grouped_quantize_lora_down",
        GroupedDown,
        reference,
        fake,
        check,
        (Implementation("triton", by_triton, why_not_triton), Implementation("torch", reference)),
        chosen_grouped,
    ),
    "(Tensor x, Tensor rows, Tensor group_of, Tensor starts, Tensor ends, Tensor? lora_A, Tensor(a6!) state,"
    " SymInt column, bool delayed) -> (Tensor, Tensor, Tensor)",
)
