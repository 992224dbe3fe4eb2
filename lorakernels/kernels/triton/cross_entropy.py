# SPDX-License-Identifier: Apache-2.0
"""The kernel of ops/cross_entropy.py, one program per row of z:

    m = max_v z_v       l = Σ_v exp(z_v − m)       loss = m + log l − z_label       dz_v = factor · (exp(z_v − m) / l −
    [v = label])

First pass: online maximum and sum, so z is read once for both. Second pass: dz over z, in z's dtype. An ignored row is
not read: its loss and gradient are 0 whatever it holds. A label outside of [0, V) gives NaN: a capture cannot raise.
fp32 arithmetic in an order that depends on V alone, one rounding at the store.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels.triton.launch import launch as launch_kernel


@triton.jit
def _cross_entropy_kernel(
    losses: tl.tensor,
    logits: tl.tensor,
    labels: tl.tensor,
    factor: tl.tensor,
    ignore_index: tl.tensor,
    V: tl.tensor,
    GRADIENT: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    z = logits + row * V
    label = tl.load(labels + row)
    column = tl.arange(0, BLOCK)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, V, BLOCK):
                zero = tl.zeros((BLOCK,), tl.float32).to(logits.dtype.element_ty)
                tl.store(z + start + column, zero, start + column < V)
    else:
        largest = -float("inf")
        total = 0.0
        for start in range(0, V, BLOCK):
            part = tl.load(z + start + column, start + column < V, -float("inf")).to(tl.float32)
            now = tl.maximum(largest, tl.max(part, 0))
            origin = tl.where(now == -float("inf"), 0.0, now)  # a block of −inf alone
            total = total * tl.exp(largest - origin) + tl.sum(tl.exp(part - origin), 0)
            largest = now
        known = (label >= 0) & (label < V)
        asked = tl.load(z + tl.where(known, label, 0)).to(tl.float32)
        nan = float("nan")
        tl.store(losses + row, tl.where(known, largest - asked + tl.log(total), nan))
        if GRADIENT:
            share = 1.0
            if HAS_FACTOR:
                share = tl.load(factor)
            share = tl.where(known, share, nan)
            for start in range(0, V, BLOCK):
                at = start + column
                part = tl.load(z + at, at < V, 0.0).to(tl.float32)
                p = tl.exp(part - largest) / total
                dz = share * tl.where(at == label, p - 1.0, p)
                tl.store(z + at, dz.to(logits.dtype.element_ty), at < V)


def launch(
    losses: Tensor,
    logits: Tensor,
    labels: Tensor,
    factor: Tensor | None,
    ignore_index: int,
    gradient: bool,
    block: int,
    warps: int,
) -> None:
    """Write `losses` and, with `gradient`, dz over `logits`, which are contiguous and not empty."""
    rows, vocabulary = logits.shape
    launch_kernel(
        _cross_entropy_kernel,
        (rows,),
        losses,
        logits,
        labels,
        losses if factor is None else factor,
        ignore_index,
        vocabulary,
        GRADIENT=gradient,
        HAS_FACTOR=factor is not None,
        BLOCK=min(block, triton.next_power_of_2(vocabulary)),
        num_warps=warps,
    )
