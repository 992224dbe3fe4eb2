# SPDX-License-Identifier: Apache-2.0
"""dy8 = sat(dy · scale), ds = scaling · dy B, dB = scaling · dyᵀ s on CUDA.

dy [M, N], B [N, R], s [M, R], ds [M, R], dB [N, R]; projections side by side have B and dB one below the other and s
and ds side by side (`reference.quantize_grad`). csrc/ops/quantize_grad reads dy once and writes dy8: 3MN bytes;
the sums are kept in registers and shared memory and added up in an order that depends on shape and GPU alone. While it
waits for memory it draws the mask that lora_grad_a and fp8_grad_input will read. What it does
not take (`ladder.why_not_one_pass`) goes through PyTorch's kernels. Both products have dy's dtype, fp32 accumulation
and one rounding; in PyTorch's form dB is rounded to dy's dtype first, and fp16, whose range ends at 65504, sums
dB in fp32: there loss scaling makes it large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels import checks, reference
from lorakernels.device import capability_of, extension, multiprocessors_of
from lorakernels.kernels import ladder
from lorakernels.kernels.pointers import address, cell, name, stream
from lorakernels.kernels.product import product


def quantize_grad(
    dy: Tensor,
    lora_B: Tensor | None,
    s: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    scaling: float,
    fp8_dtype: torch.dtype,
    rows: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.quantize_grad`."""
    checks.side_by_side(dy, lora_B, s, rows, ranks)
    arguments = (dy, lora_B, s, state, column, delayed, scaling, fp8_dtype, rows, ranks)
    if ladder.why_not_one_pass(dy, lora_B, s, rows):
        return in_torch(*arguments)
    return in_one_pass(*arguments)


def quantize_grad_and_mask(
    dy: Tensor,
    lora_B: Tensor,
    s: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    scaling: float,
    fp8_dtype: torch.dtype,
    slot: Tensor,
    p: float,
    site: int,
    cols: int,
    row0: int = 0,
    col0: int = 0,
    rows: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference.quantize_grad_and_mask`."""
    checks.side_by_side(dy, lora_B, s, rows, ranks)
    checks.slot(slot, dy.device)
    arguments = (dy, lora_B, s, state, column, delayed, scaling, fp8_dtype, rows, ranks)
    words = reference.dropped_words(cols)
    dropped = torch.empty(len(dy), words, dtype=torch.int32, device=dy.device)
    mask = Mask(dropped, cols, slot, p, site, row0, col0)
    if ladder.why_not_one_pass(dy, lora_B, s, rows):
        return *in_torch(*arguments), draw(mask)
    if lora_B.shape[1] > ladder.DRAWN_RANK or not _by_csrc(mask):
        return *in_one_pass(*arguments), draw(mask)
    return *in_one_pass(*arguments, mask), dropped


class Mask(NamedTuple):
    """A mask [M, cols] to draw into `dropped`; none: nothing is drawn."""

    dropped: Tensor | None = None
    cols: int = 0
    slot: Tensor | None = None
    p: float = 0.0
    site: int = 0
    row0: int = 0
    col0: int = 0


NO_MASK = Mask()


def _by_csrc(mask: Mask) -> bool:
    return reference.dropout_threshold(mask.p) > 0 and mask.col0 % 8 == 0


def draw(mask: Mask) -> Tensor:
    """`mask.dropped`, drawn by itself."""
    dropped, cols, slot, p, site, *place = mask
    assert dropped is not None and slot is not None
    if not _by_csrc(mask) or ladder.why_not_csrc(capability_of(dropped.device)):
        keep = reference.drawn_mask(slot, p, site, len(dropped), cols, *place)
        return reference.dropped_bits(keep)
    threshold, device = reference.dropout_threshold(p), dropped.get_device()
    where = (*place, stream(dropped.device), device)
    size, source = (len(dropped), cols), (slot.data_ptr(), site, threshold)
    extension().dropped_bits(dropped.data_ptr(), *size, *source, *where)
    return dropped


def in_torch(
    dy: Tensor,
    lora_B: Tensor | None,
    s: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    scaling: float,
    fp8_dtype: torch.dtype,
    rows: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One PyTorch kernel after the other, for any dtype, shape and stride."""
    dy8, scale_inv = reference.quantize(dy, state, column, delayed, fp8_dtype)
    scale_inv = reference.scale_that_tells(dy, scale_inv)
    if lora_B is None:
        return dy8, scale_inv, dy.new_empty(0), dy.new_empty(0)
    places = reference.adapter_places(rows, ranks)
    b = lora_B.to(dy.dtype)
    parts = [product(dy[:, cols], b[cols], scaling) for _, (cols, _) in places]
    ds = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if s is None:
        return dy8, scale_inv, ds, dy.new_empty(0)
    if dy.dtype == torch.float16:
        dy = dy.float()
    if not rows:
        return dy8, scale_inv, ds, product(dy.t(), s.to(dy.dtype), scaling).to(lora_B.dtype)
    dB, s = torch.zeros_like(lora_B), s.to(dy.dtype)
    for _, (cols, window) in places:
        dB[cols] = product(dy[:, cols].t(), s[:, window], scaling)
    return dy8, scale_inv, ds, dB


def in_one_pass(
    dy: Tensor,
    lora_B: Tensor | None,
    s: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    scaling: float,
    fp8_dtype: torch.dtype,
    rows: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    mask: Mask = NO_MASK,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `ladder.why_not_one_pass` has no objection to, by csrc, and a mask at a col0 that is a multiple of 8."""
    height, cols = dy.shape
    ext = extension()
    if lora_B is None:
        s = rows = None
    rank = 0 if lora_B is None else lora_B.shape[1]
    projections = [*zip(rows, ranks or (), strict=True)] if rows else []
    columns = sum(r for _, r in projections) if rows else rank  # of s and ds
    quantizes = state is not None
    dy8 = torch.empty((height, cols) if quantizes else 0, dtype=torch.uint8, device=dy.device)
    scale_inv = torch.empty(1 if quantizes else 0, device=dy.device)
    ds = torch.empty(0 if lora_B is None else (height, columns), dtype=dy.dtype, device=dy.device)
    dB = dy.new_empty(0) if lora_B is None or s is None else torch.empty_like(lora_B)
    floats = ext.quantize_grad_workspace(
        height, cols, rank, s is not None, multiprocessors_of(dy.get_device()), projections
    )
    scratch = torch.empty(ext.AMAX_PARTIALS + floats, device=dy.device)
    b_dtype = dy.dtype if lora_B is None else lora_B.dtype
    ext.quantize_grad(
        dy8.data_ptr() if quantizes else 0,
        scale_inv.data_ptr() if quantizes else 0,
        cell(state, 0, column) if delayed else 0,
        0 if lora_B is None else ds.data_ptr(),
        0 if s is None else dB.data_ptr(),
        scratch.data_ptr() + 4 * ext.AMAX_PARTIALS,
        dy.data_ptr(),
        0 if lora_B is None else lora_B.data_ptr(),
        0 if s is None else s.data_ptr(),
        cell(state, -1, column) if delayed else 0,
        scratch.data_ptr(),
        height,
        cols,
        rank,
        scaling,
        name(dy.dtype),
        name(b_dtype),
        name(fp8_dtype).removeprefix("float8_"),
        reference.FP8_MAX[fp8_dtype],
        address(mask.dropped),
        mask.cols,
        address(mask.slot),
        mask.site,
        reference.dropout_threshold(mask.p),
        mask.row0,
        mask.col0,
        stream(dy.device),
        dy.get_device(),
        projections,
    )
    return dy8, reference.scale_that_tells(dy, scale_inv), ds, dB
