# SPDX-License-Identifier: Apache-2.0
"""The kernel of ops/cross_entropy.py, one program per row of z:

    m = max_v z_v       l = Σ_v exp(z_v − m)       loss = m + log l − z_label       dz_v = factor · (exp(z_v − m) / l −
    [v = label])

First pass: online maximum and sum, so z is read once for both. Second pass: dz over z in z's dtype, or beside it in
e5m2. An ignored row is not read: its loss and gradient are 0 whatever it holds. A label outside of [0, V) gives NaN,
because a captured kernel cannot raise. The arithmetic is fp32's, in an order that depends on V alone, with one rounding
at the store.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels.triton.launch import launch as launch_kernel
from lorakernels.kernels.triton.quantize import encode, is_native


@triton.jit
def _cross_entropy_kernel(
    losses: tl.tensor,
    logits: tl.tensor,
    gradient: tl.tensor,
    labels: tl.tensor,
    factor: tl.tensor,
    ignore_index: tl.tensor,
    V: tl.tensor,
    GRADIENT: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    z, to = logits + row * V, gradient + row * V
    label = tl.load(labels + row)
    column = tl.arange(0, BLOCK)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, V, BLOCK):
                zero = tl.zeros((BLOCK,), tl.float32).to(gradient.dtype.element_ty)
                tl.store(to + start + column, zero, start + column < V)
    else:
        largest = -float("inf")
        total = 0.0
        for start in range(0, V, BLOCK):
            part = tl.load(z + start + column, start + column < V, -float("inf")).to(tl.float32)
            now = tl.maximum(largest, tl.max(part, 0))
            origin = tl.where(now == -float("inf"), 0.0, now)  # a block of −inf alone
            total = total * tl.exp(largest - origin) + tl.sum(tl.exp(part - origin), 0)
            largest = now
        in_range = (label >= 0) & (label < V)
        logit = tl.load(z + tl.where(in_range, label, 0)).to(tl.float32)
        nan = float("nan")
        tl.store(losses + row, tl.where(in_range, largest - logit + tl.log(total), nan))
        if GRADIENT:
            share = 57344.0 if E5M2 else 1.0  # the largest number of e5m2
            if HAS_FACTOR:
                share = tl.load(factor)
            share = tl.where(in_range, share, nan)
            for start in range(0, V, BLOCK):
                offset = start + column
                part = tl.load(z + offset, offset < V, 0.0).to(tl.float32)
                p = tl.exp(part - largest) / total
                dz = share * tl.where(offset == label, p - 1.0, p)
                if E5M2:
                    tl.store(to + offset, encode(dz, True, NATIVE), offset < V)
                else:
                    tl.store(to + offset, dz.to(gradient.dtype.element_ty), offset < V)


def launch(
    losses: Tensor,
    logits: Tensor,
    labels: Tensor,
    factor: Tensor | None,
    ignore_index: int,
    gradient: Tensor | None,
    block: int,
    warps: int,
) -> None:
    """Write `losses` and the gradient of `logits`, which are contiguous and not empty.

    gradient: where it goes, of logits' shape: the logits themselves, or uint8 for e5m2 bytes of 57344 · (softmax −
    onehot), which take no factor. None: nowhere.
    """
    rows, vocabulary = logits.shape
    launch_kernel(
        _cross_entropy_kernel,
        (rows,),
        losses,
        logits,
        logits if gradient is None else gradient,
        labels,
        losses if factor is None else factor,
        ignore_index,
        vocabulary,
        GRADIENT=gradient is not None,
        HAS_FACTOR=factor is not None,
        E5M2=gradient is not None and gradient.dtype == torch.uint8,
        NATIVE=is_native(logits.device),
        BLOCK=min(block, triton.next_power_of_2(vocabulary)),
        num_warps=warps,
    )
