# SPDX-License-Identifier: Apache-2.0
"""Wᵀ [K, N] of the bytes W [N, K]: a copy of a frozen FP8 weight that a backward makes for itself.

Hopper's FP8 tensor cores read operands along the contraction only, so that dy W needs Wᵀ. csrc/ops/transpose_fp8 reads
and writes 2NK bytes. Where N and K are multiples of 16, it moves 16 bytes at a time, and otherwise single bytes.
PyTorch's strided copy moves the same bytes one by one. The result is exact, as the whole tensor has one scale.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, why_not_csrc
from lorakernels.kernels.arguments import where
from lorakernels.ops.hardware import chosen_csrc
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.values import Sizes


class Transpose(NamedTuple):
    """weight is [N, K]."""

    weight: Tensor


def reference(a: Transpose) -> Tensor:
    """[K, N], contiguous, in the dtype of `weight`.

    Raises:
        ValueError: `weight` is not a matrix.
    """
    check(a)
    return a.weight.t().clone(memory_format=torch.contiguous_format)


def fake(a: Transpose) -> Tensor:
    return empty(a.weight, a.weight.shape[1], a.weight.shape[0])


def check(a: Transpose) -> None:
    """ValueError if `weight` is not a matrix."""
    if a.weight.dim() != 2:
        raise ValueError(f"weight must be [N, K], found {list(a.weight.shape)}")


def why_not_csrc_kernel(a: Transpose) -> str | None:
    """None if csrc's kernel takes this matrix; otherwise the reason why not."""
    weight = a.weight
    if why_not := why_not_csrc(capability_of(weight.device)):
        return why_not
    if weight.element_size() != 1:
        return f"weight is {weight.dtype}, not a byte an element"
    if not weight.is_contiguous():
        return f"weight must be contiguous, found strides {weight.stride()}"
    return None


def by_csrc(a: Transpose) -> Tensor:
    """One pass."""
    weight = a.weight
    out = weight.new_empty(weight.shape[::-1])
    extension().transpose_fp8(out, weight, Sizes(*weight.shape), where(weight))
    return out


transpose_fp8 = define(
    Op(
        "transpose_fp8",
        Transpose,
        reference,
        fake,
        check,
        (Implementation("csrc", by_csrc, why_not_csrc_kernel), Implementation("torch", reference)),
        partial(chosen_csrc, "one pass"),
    ),
    "(Tensor weight) -> Tensor",
)
