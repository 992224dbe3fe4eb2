# SPDX-License-Identifier: Apache-2.0
"""dA = dsᵀ D(x) on CUDA.

ds [M, R], x [M, K] (e4m3 bytes with their scale_inv, or plain), dA [R, K]. csrc/ops/lora_grad_a reads x once: MK bytes
of x8, 2MK of a plain x; the mask is drawn on the way or comes as bits (MK / 8 bytes), the product runs on the tensor
cores in ds's dtype, in which e4m3 is exact, with fp32 sums in an order that depends on shape and GPU alone, and
scale_inv and the dropout factor are applied to the sums before their one rounding. What it does not take
(`ladder.why_not_lora_grad_a`) goes through PyTorch's kernels. There fp16, whose range ends at 65504 and whose unscaled
sum could overflow, runs in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import checks, reference
from lorakernels.device import extension, multiprocessors_of
from lorakernels.kernels import ladder
from lorakernels.kernels.pointers import address, name, stream
from lorakernels.kernels.product import product

GROUP = 8  # numbers of ds that csrc copies together


def lora_grad_a(
    ds: Tensor,
    x: Tensor,
    x_scale_inv: Tensor | None,
    slot: Tensor | None,
    p: float,
    site: int,
    out_dtype: torch.dtype,
    row0: int = 0,
    col0: int = 0,
    dropped: Tensor | None = None,
) -> Tensor:
    """`reference.lora_grad_a`."""
    why_not = ladder.why_not_lora_grad_a(ds, x, x_scale_inv, out_dtype, col0)
    arguments = (ds, x, x_scale_inv, slot, p, site, out_dtype, row0, col0)
    return in_torch(*arguments) if why_not else in_one_pass(*arguments, dropped)


def in_torch(
    ds: Tensor,
    x: Tensor,
    x_scale_inv: Tensor | None,
    slot: Tensor | None,
    p: float,
    site: int,
    out_dtype: torch.dtype,
    row0: int,
    col0: int,
) -> Tensor:
    """One PyTorch kernel after the other, for any dtype, shape and stride."""
    if ds.dtype == torch.float16:
        return reference.lora_grad_a(ds, x, x_scale_inv, slot, p, site, out_dtype, row0, col0)
    values = (x if x_scale_inv is None else x.view(reference.E4M3)).to(ds.dtype)
    xd, factor = reference.masked(values, slot, p, site, row0, col0)
    dA = product(ds.t(), xd, factor)
    return (dA if x_scale_inv is None else dA * x_scale_inv).to(out_dtype)


def in_one_pass(
    ds: Tensor,
    x: Tensor,
    x_scale_inv: Tensor | None,
    slot: Tensor | None,
    p: float,
    site: int,
    out_dtype: torch.dtype,
    row0: int,
    col0: int,
    dropped: Tensor | None,
) -> Tensor:
    """What `ladder.why_not_lora_grad_a` has no objection to, by csrc; the mask is `dropped`, if given."""
    checks.slot(slot, x.device)
    checks.dropped(dropped, len(x), reference.dropped_words(x.shape[1]), x.device)
    rows, cols = x.shape
    rank, ext = ds.shape[1], extension()
    threshold = 0 if slot is None else reference.dropout_threshold(p)
    dA = torch.empty(rank, cols, dtype=out_dtype, device=x.device)
    floats = ext.lora_grad_a_partial(rows, cols, rank, multiprocessors_of(x.get_device()))
    partial = torch.empty(floats, device=x.device)
    ds = _in_whole_groups(ds)
    ext.lora_grad_a(
        dA.data_ptr(),
        partial.data_ptr(),
        ds.data_ptr(),
        x.data_ptr(),
        address(x_scale_inv),
        rows,
        cols,
        rank,
        ds.stride(0),
        name(ds.dtype),
        name(out_dtype),
        address(slot),
        site,
        threshold,
        row0,
        col0,
        address(dropped) if threshold else 0,
        stream(x.device),
        x.get_device(),
    )
    return dA


def _in_whole_groups(ds: Tensor) -> Tensor:
    """ds, if its rows are aligned groups of 8 numbers; otherwise a copy padded with zeros."""
    rows, rank = ds.shape
    aligned = ds.stride(1) == 1 and ds.stride(0) % GROUP == 0 and ds.data_ptr() % 16 == 0
    if aligned and rank % GROUP == 0:
        return ds
    padded = ds.new_zeros(rows, rank + -rank % GROUP)
    padded[:, :rank] = ds
    return padded
