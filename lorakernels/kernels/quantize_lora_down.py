# SPDX-License-Identifier: Apache-2.0
"""x8 = sat(x · scale), s = D(x) Aᵀ on CUDA.

x [M, K], A [R, K], x8 [M, K] e4m3 bytes, s [M, R]. csrc/quantize_lora_down.cu reads x once and writes x8: 3MK bytes;
the mask is drawn on the way and the product runs on the tensor cores in x's dtype, with fp32 sums in an order that
depends on the shape alone and one rounding, after the dropout factor. What it does not take
(`ladder.why_not_one_read`) goes through PyTorch's kernels, which read x once for its amax, once to quantize it and
once or twice for s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import checks, reference
from lorakernels.device import extension
from lorakernels.kernels import ladder
from lorakernels.kernels.pointers import address, cell, name, stream
from lorakernels.kernels.product import product


def quantize_lora_down(
    x: Tensor,
    lora_A: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    slot: Tensor | None,
    p: float,
    site: int,
    row0: int = 0,
    col0: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.quantize_lora_down`."""
    form = in_torch if ladder.why_not_one_read(x, lora_A, col0) else in_one_read
    return form(x, lora_A, state, column, delayed, slot, p, site, row0, col0)


def in_torch(
    x: Tensor,
    lora_A: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    slot: Tensor | None,
    p: float,
    site: int,
    row0: int,
    col0: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One PyTorch kernel after the other, for any dtype and shape."""
    x8, scale_inv = reference.quantize(x, state, column, delayed, reference.E4M3)
    if lora_A is None:
        return x8, scale_inv, x.new_empty(0)
    xd, factor = reference.masked(x, slot, p, site, row0, col0)
    return x8, scale_inv, product(xd, lora_A.to(x.dtype).t(), factor)


def in_one_read(
    x: Tensor,
    lora_A: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    slot: Tensor | None,
    p: float,
    site: int,
    row0: int,
    col0: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `ladder.why_not_one_read` has no objection to, by csrc."""
    checks.slot(slot, x.device)
    rows, cols = x.shape
    rank = 0 if lora_A is None else lora_A.shape[0]
    quantizes, ext = state is not None, extension()
    x8 = torch.empty((rows, cols) if quantizes else 0, dtype=torch.uint8, device=x.device)
    scale_inv = torch.empty(1 if quantizes else 0, device=x.device)
    s = x.new_empty(0 if lora_A is None else (rows, rank))
    if x.numel() == 0:  # no kernel runs; the scale that the others use
        if quantizes:
            scale_inv = reference.quantize(x, state, column, delayed, reference.E4M3)[1]
        return x8, scale_inv, s.zero_()
    if not quantizes and lora_A is None:
        return x8, scale_inv, s
    if lora_A is not None and lora_A.dtype not in (x.dtype, torch.float32):
        lora_A = lora_A.to(x.dtype)
    floats = ext.quantize_lora_down_workspace(rows, cols, rank, x.get_device())
    workspace = torch.empty(floats, device=x.device)
    ext.quantize_lora_down(
        address(x8),
        address(scale_inv),
        cell(state, 0, column) if delayed else 0,
        address(s),
        address(workspace),
        address(x),
        address(lora_A),
        cell(state, -1, column) if delayed else 0,
        rows,
        cols,
        rank,
        name(x.dtype),
        name(x.dtype if lora_A is None else lora_A.dtype),
        address(slot),
        site,
        0 if slot is None else reference.dropout_threshold(p),
        row0,
        col0,
        stream(x.device),
        x.get_device(),
    )
    return x8, scale_inv, s
