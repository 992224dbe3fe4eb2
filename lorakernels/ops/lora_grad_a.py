# SPDX-License-Identifier: Apache-2.0
"""dA = dsᵀ D(x): the gradient of the adapter's first half.

dA is [R, K]. csrc/ops/lora_grad_a reads x once: MK bytes of e4m3, 2MK of a plain x. Each 64 ranks beyond the first read
it again. The kernel draws the mask on the way, or reads MK / 8 bytes of one that was drawn before. The product runs on
the tensor cores in ds's dtype, in which e4m3 is exact. Its fp32 sums have an order that depends on the shape alone.
They are multiplied by scale_inv and the dropout factor, and then rounded once. With a scale for each 1 × 128 of x, its
elements are multiplied by theirs in fp32 and rounded to ds's dtype before the product.

PyTorch's kernels first write D(x) in ds's dtype and then read it: another 4MK bytes. They sum fp16 in fp32, because the
sum before scale_inv could pass 65504, where fp16 ends.

Of J adapters in one batch (numerics/segments.py), dA is [J, R, K]; each is summed over its own M / J rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, multiprocessors_of, why_not_csrc
from lorakernels.kernels.arguments import name, where
from lorakernels.kernels.triton import segments as segment_kernels
from lorakernels.numerics.blocks import blocks_of, dequantize_rows, in_blocks
from lorakernels.numerics.dropout import drops, masked
from lorakernels.numerics.fp8 import E4M3
from lorakernels.numerics.products import dequantized
from lorakernels.numerics.segments import segments, sum_over_rows
from lorakernels.ops import checks
from lorakernels.ops.hardware import FLOATS, SEVERAL, LayerOnGPU, why_not_batched
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.values import Dropout, RankSizes, Scaled

MULTIPLE = {True: 16, False: 8}  # of K, for csrc, by whether x is FP8
COLUMN_MULTIPLE = 8  # of col0, for csrc
MAX_RANK = 256  # for csrc
GROUP = 8  # numbers of ds that csrc copies together


class GradA(NamedTuple):
    """ds is [M, R], x [M, K] e4m3 or plain, `out_dtype` dA's, `adapters` J in one batch, or 0.

    x's scale_inv is [1], or [⌈K/128⌉, M] for each 1 × 128. `dropout.dropped` may hold the mask.
    """

    ds: Tensor
    x: Scaled
    dropout: Dropout | None
    out_dtype: torch.dtype
    adapters: int = 0


def reference(a: GradA) -> Tensor:
    """dA [R, K] in `out_dtype`; the mask is drawn, also where `dropout.dropped` has it.

    Raises:
        ValueError: the slot, a mask that has been drawn already, or the scales of blocks do not fit.
    """
    check(a)
    x = a.x
    xd, factor = masked(dequantized(x), a.dropout)
    return (sum_over_rows(a.ds.float(), xd, a.adapters) * factor).to(a.out_dtype)


def fake(a: GradA) -> Tensor:
    leading = (a.adapters,) if a.adapters else ()
    return empty(a.ds, *leading, a.ds.shape[1], a.x.data.shape[1], dtype=a.out_dtype)


def check(a: GradA) -> None:
    """ValueError if the slot, a mask that has been drawn already, the scales of blocks, or J do not fit."""
    x, adapters = a.x, a.adapters
    if adapters < 0 or (adapters and a.ds.shape[0] % adapters):
        raise ValueError(f"adapters must be 0 or divide the {a.ds.shape[0]} rows, found {adapters}")
    (rows, cols), scale_inv = x.data.shape, x.scale_inv
    checks.mask(a.dropout, rows, x.data.device)
    checks.dropped(a.dropout, rows, cols, x.data.device)
    if scale_inv is not None and in_blocks(x) and scale_inv.shape != (blocks_of(cols), rows):
        expected = [blocks_of(cols), rows]
        raise ValueError(f"x_scale_inv must be [1] or {expected}, found {list(scale_inv.shape)}")


def why_not_csrc_kernel(a: GradA) -> str | None:
    """None if csrc's kernel takes these tensors; otherwise the reason why not."""
    ds, x, dropout, out_dtype, adapters = a
    if adapters:
        return SEVERAL
    data, fp8 = x.data, x.scale_inv is not None
    if why_not := why_not_sizes(capability_of(data.device), data.shape[1], fp8):
        return why_not
    if ds.dtype not in (torch.bfloat16, torch.float16):
        return f"ds is {ds.dtype}, not bfloat16 or float16"
    if not fp8 and data.dtype != ds.dtype:
        return f"x is {data.dtype}, ds {ds.dtype}"
    if out_dtype not in FLOATS:
        return f"out_dtype is {out_dtype}"
    if dropout is not None and dropout.col0 % COLUMN_MULTIPLE:
        return f"col0 = {dropout.col0} must be a multiple of {COLUMN_MULTIPLE}"
    if not 0 < ds.shape[1] <= MAX_RANK:
        return f"rank {ds.shape[1]} is not in 1 to {MAX_RANK}"
    if data.data_ptr() % 16 or not data.is_contiguous():
        return f"x must be contiguous and 16-byte aligned, found strides {data.stride()}"
    if x.scale_inv is not None and not x.scale_inv.is_contiguous():
        return f"x_scale_inv must be contiguous, found strides {x.scale_inv.stride()}"
    return None


def why_not_sizes(capability: tuple[int, int], k: int, fp8: bool) -> str | None:
    """None if csrc's kernel takes an x of K = `k` columns on such a GPU; otherwise the reason why not."""
    if why_not := why_not_csrc(capability):
        return why_not
    if capability < (8, 0):
        return f"compute capability {capability} has no bf16 tensor cores"
    multiple = MULTIPLE[fp8]
    return f"K = {k} must be a multiple of {multiple}" if k % multiple else None


def by_csrc(a: GradA) -> Tensor:
    """One read of x, by csrc's kernel; the mask is `dropout.dropped`, if that is there."""
    ds, x = a.ds, a.x
    data = x.data
    (rows, cols), rank, ext = data.shape, ds.shape[1], extension()
    dA = data.new_empty((rank, cols), dtype=a.out_dtype)
    floats = ext.lora_grad_a_partial(rows, cols, rank, multiprocessors_of(data.get_device()))
    partial = data.new_empty(floats, dtype=torch.float32)
    ds = _in_whole_groups(ds)
    ext.lora_grad_a(
        (dA, partial),
        (ds, ds.stride(0)),
        (*x, in_blocks(x)),
        RankSizes(rows, cols, rank),
        (name(ds.dtype), name(a.out_dtype)),
        a.dropout if drops(a.dropout) else None,
        where(data),
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


def why_not_segments(a: GradA) -> str | None:
    """None if Triton's kernel takes the adapters of a batch; otherwise the reason why not."""
    ds, x = a.ds, a.x
    if not a.adapters:
        return "dA is of one adapter"
    if in_blocks(x):
        return "each 1 × 128 of x has a scale"
    if x.scale_inv is None and x.data.dtype != ds.dtype:
        return f"x is {x.data.dtype}, ds {ds.dtype}"
    if ds.dtype not in (torch.bfloat16, torch.float16):
        return f"ds is {ds.dtype}, not bfloat16 or float16"
    parts = segments(ds, a.adapters)
    return why_not_batched(x.data, parts, ds.shape[1], a.dropout)


def by_segments(a: GradA) -> Tensor:
    """One kernel of Triton for all adapters."""
    return segment_kernels.outer(a.x.data, a.ds, a.adapters, a.x.scale_inv, a.out_dtype)


def by_torch(a: GradA) -> Tensor:
    """One PyTorch kernel after the other, for any dtype, shape and stride."""
    ds, x, dropout, out_dtype, adapters = a
    if ds.dtype == torch.float16:
        return reference(a)
    if in_blocks(x):
        x = Scaled(dequantize_rows(x, dtype=ds.dtype))
    data, scale_inv = x
    values = (data if scale_inv is None else data.view(E4M3)).to(ds.dtype)
    xd, factor = masked(values, dropout)
    dA = sum_over_rows(ds, xd, adapters, factor)
    return (dA if scale_inv is None else dA * scale_inv).to(out_dtype)


def chosen(place: LayerOnGPU) -> tuple[str, str]:
    multiple = MULTIPLE[place.fp8]
    k = place.sizes[1] if place.sizes else multiple
    if why_not := why_not_sizes(place.capability, k, place.fp8):
        return "torch", why_not
    needs_k = "" if place.sizes else f", K a multiple of {multiple}"
    return "csrc", f"one pass for bf16 and fp16, rank ≤ {MAX_RANK}{needs_k}; else PyTorch's"


lora_grad_a = define(
    Op(
        "lora_grad_a",
        GradA,
        reference,
        fake,
        check,
        (
            Implementation("csrc", by_csrc, why_not_csrc_kernel),
            Implementation("triton", by_segments, why_not_segments),
            Implementation("torch", by_torch),
        ),
        chosen,
    ),
    "(Tensor ds, Tensor x, Tensor? x_scale_inv, Tensor? slot, float p, SymInt site, ScalarType out_dtype,"
    " SymInt row0=0, SymInt col0=0, SymInt adapters=0, Tensor? dropped=None, SymInt[] chunks=[]) -> Tensor",
)
