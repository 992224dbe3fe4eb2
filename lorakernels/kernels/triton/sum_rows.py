# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel that adds tensors of equal shape in fp32, in their order: the parts of a sum over ranks.

The parts may lie in the memory of other GPUs that this one can read. Each element is read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels.triton.launch import on_device

MOST_PARTS = 8
_BLOCK = 2048  # elements of a program: one load of 16 bytes of bf16 for each of its threads
_WARPS = 8


@triton.jit
def _sum_rows_kernel(  # type: ignore[no-untyped-def]
    out, p0, p1, p2, p3, p4, p5, p6, p7, added, count,
    PARTS: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    total = tl.load(p0 + offset, inside, other=0).to(tl.float32)
    if PARTS > 1:
        total += tl.load(p1 + offset, inside, other=0).to(tl.float32)
    if PARTS > 2:
        total += tl.load(p2 + offset, inside, other=0).to(tl.float32)
    if PARTS > 3:
        total += tl.load(p3 + offset, inside, other=0).to(tl.float32)
    if PARTS > 4:
        total += tl.load(p4 + offset, inside, other=0).to(tl.float32)
    if PARTS > 5:
        total += tl.load(p5 + offset, inside, other=0).to(tl.float32)
    if PARTS > 6:
        total += tl.load(p6 + offset, inside, other=0).to(tl.float32)
    if PARTS > 7:
        total += tl.load(p7 + offset, inside, other=0).to(tl.float32)
    if ADDS:
        total += tl.load(added + offset, inside, other=0).to(tl.float32)
    tl.store(out + offset, total.to(out.dtype.element_ty), inside)


def sum_rows(parts: Sequence[Tensor], added: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Σ parts + added in fp32, rounded once to `dtype`. All are contiguous and of one shape; at most MOST_PARTS."""
    out = torch.empty(parts[0].shape, dtype=dtype, device=parts[0].device)
    if out.numel() == 0:
        return out
    pointers = [*parts, *[parts[0]] * (MOST_PARTS - len(parts))]  # the rest is not read
    with on_device(out):
        _sum_rows_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
            out,
            *pointers,
            parts[0] if added is None else added,
            out.numel(),
            PARTS=len(parts),
            ADDS=added is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return out
