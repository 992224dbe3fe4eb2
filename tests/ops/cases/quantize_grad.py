# SPDX-License-Identifier: Apache-2.0
"""quantize_grad, of one projection and of several side by side, with a mask and without: cases and bounds.

The adapter's rows of a projection without one are NaN: they are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.numerics.dropout import dropout_keep, dropped_bits
from lorakernels.numerics.segments import adapters_of, rows_times, sum_over_rows
from lorakernels.ops import Dropout, Scaling, SideBySide, Up
from lorakernels.ops.hardware import SEVERAL
from tests.ops.contract import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Made,
    Refusal,
    near,
    quantized,
    quantized_in_blocks,
    rounded_again,
    same,
)

SCALING = 0.7
Windows = list[tuple[slice, slice | None]]


def side_of(each: tuple[int, ...], rank: int) -> SideBySide | None:
    """`each`: columns of projections side by side, negative without an adapter; none: one projection."""
    return SideBySide([*map(abs, each)], [rank if n > 0 else 0 for n in each]) if each else None


def windows(side: SideBySide | None) -> Windows:
    """Of each projection: its columns of dy, and of s and ds if it has an adapter."""
    if side is None:
        return [(slice(None), slice(None))]
    found: Windows = []
    column = place = 0
    for n, r in zip(*side, strict=True):
        found.append((slice(column, column + n), slice(place, place + r) if r else None))
        column, place = column + n, place + r
    return found


def made(
    each: int | tuple[int, ...],
    rank: int,
    m: Made,
    dtype: torch.dtype = BF16,
    b: torch.dtype = BF16,
    fp8: torch.dtype = E5M2,
    kind: str = "kept",
    fill: float | None = None,
    power: bool | None = None,
) -> Arguments:
    """`fill`: dy is nothing else. Rank 0: no adapter. `power`: each block has a scale, and `kind` is none."""
    side = side_of(each, rank) if isinstance(each, tuple) else None
    n, columns = (sum(side.rows), sum(side.ranks)) if side else (each, rank)
    dy = m.randn(m.rows, n, dtype=dtype)
    if fill is not None:
        dy.fill_(fill)
    up = None
    if rank:
        up = Up(m.randn(n, rank, dtype=b), m.randn(m.rows, columns, dtype=dtype), SCALING)
        for cols, window in windows(side):
            if window is None:
                up.lora_B[cols] = torch.nan
    scaling = m.scaling(kind if power is None else "none")
    return dy, up, scaling, fp8, side, power


def several(
    adapters: int, n: int, rank: int, m: Made, dtype: torch.dtype = BF16, kind: str = "kept"
) -> Arguments:
    """Of adapters in one batch, which divide M."""
    dy, up, *others = made(n, rank, m, dtype=dtype, kind=kind)
    return dy, up._replace(lora_B=m.randn(adapters, n, rank)), *others


def without_s(m: Made, kind: str = "kept") -> Arguments:
    dy, up, *others = made(24, 3, m, kind=kind)
    return dy, up._replace(s=None), *others


def column_by_column(m: Made) -> Arguments:
    dy, *others = made(24, 3, m)
    return dy.t().contiguous().t(), *others


def with_mask(make: Any, cols: int, m: Made, p: float = 0.3, col0: int = 24) -> Arguments:
    return *make(m), m.dropout(p, 5, col0), cols


def every_amax(m: Made, fp8: torch.dtype, power: bool, dtype: torch.dtype = BF16) -> Arguments:
    """Each finite magnitude of `dtype` and inf are the amax of a block; beside it are zeros."""
    dy, *others = made(1024, 16, m, dtype=dtype, fp8=fp8, power=power)
    each = torch.arange(4096 * 8, dtype=torch.int32, device=dy.device).to(torch.int16).view(dtype)
    dy.zero_()
    dy.view(-1, 128)[: each.numel(), 77] = each.where(~each.isnan(), 1.0)
    return dy, *others


def bound(call: Call) -> Iterator[Checked]:
    """dy8 and the amax bit for bit.

    ds and dB: one rounding at the store, and fp32 sums of n products, which lose an eps of the sum of the magnitudes
    √n times, and 4 for the factors. cuBLAS adds parts of a sum in fp32 where PyTorch tells it to, as the contract
    test does. Numbers near the ends of fp32's range leave it in between: they are not judged.

    The mask's bits are the reference's where they stand for a column.
    """
    dy, up, before, fp8, side, power, *mask = call.before
    dy8, scale_inv, ds, dB, dropped = call.results
    yield _of_mask(dropped, *mask)
    states = (before, call.after[2])
    if power is None:
        yield from quantized("dy8", dy, (dy8, scale_inv), states, fp8, tells=True)
    else:
        yield from quantized_in_blocks("dy8", dy, (dy8, scale_inv), fp8, power)
    size = dy.abs().where(dy.isfinite() & (dy != 0), 1.0)
    if size.numel() and not 1e-30 < float(size.min()) <= float(size.max()) < 1e30:
        return
    for cols, window in windows(side) if up is not None else []:
        yield from _of_projection(call, cols, window)
    if up is None:
        yield same("ds", ds, ds.new_empty(0))
    if up is None or up.s is None:
        yield same("dB", dB, dB.new_empty(0))


def _of_projection(call: Call, cols: slice, window: slice | None) -> Iterator[Checked]:
    dy, (lora_B, s, factor) = call.before[:2]
    _, _, ds, dB, _ = call.results
    if window is None:
        if s is not None:
            yield same("dB", dB[cols], torch.zeros_like(dB[cols]))
        return
    d, b = dy[:, cols].double(), lora_B[..., cols, :].to(dy.dtype).double()
    adapters = adapters_of(b)
    more = 2 * rounded_again(call, dy.dtype)
    size = factor * d.abs()
    terms = 2 * (d.shape[1] ** 0.5 + 4)
    exact = factor * rows_times(d, b)
    yield near("ds", ds[:, window], exact, rows_times(size, b.abs()), terms, more)
    if s is not None:
        t, terms = s[:, window].double(), 2 * (len(d) ** 0.5 + 4)
        exact = factor * sum_over_rows(d, t, adapters)
        summed = sum_over_rows(size, t.abs(), adapters)
        yield near("dB", dB[..., cols, :], exact, summed, terms, more)


def _of_mask(dropped: Tensor, dropout: Dropout | None = None, cols: int = 0) -> Checked:
    if dropout is None:
        return same("dropped", dropped, dropped.new_empty(0))
    keep = dropout_keep(dropout, len(dropped), cols)
    columns = dropped_bits(torch.zeros_like(keep))
    return same("dropped", dropped & columns, dropped_bits(keep))


# Every rank that is padded or not, rows and columns on both sides of a tile (128), of a strip (512; 256 for rank 128)
# and of a run of panels; each dtype, format and source of the scale at least once with each kind of shape.
ONE: dict[str, Case] = {
    **{f"500x1000 r{r}": Case(partial(made, 1000, r), 500) for r in (1, 7, 16, 33, 64, 128)},
    **{f"{m}x1000 r16": Case(partial(made, 1000, 16), m) for m in (1, 15, 16, 4100)},
    **{f"500x{n} r16": Case(partial(made, n, 16), 500) for n in (8, 16, 4096)},
    **{f"4100x4096 r{r} fp32 B": Case(partial(made, 4096, r, b=FP32), 4100) for r in (8, 24, 64, 128)},
    "1x8 unset e4m3": Case(partial(made, 8, 1, fp8=E4M3, kind="unset"), 1),
    "16x1000 fp16, fp32 B": Case(partial(made, 1000, 33, dtype=FP16, b=FP32, fp8=E4M3), 16),
    "4100x4096 fp16 eval": Case(partial(made, 4096, 16, dtype=FP16, b=FP16, fp8=E4M3, kind="eval"), 4100),
    **{f"500x1000 r{r} unset": Case(partial(made, 1000, r, fp8=E4M3, kind="unset"), 500) for r in (0, 16, 33)},
    "4100x4096 r64 unset": Case(partial(made, 4096, 64, kind="unset"), 4100),
    "4100x1000 fp16 unset": Case(partial(made, 1000, 128, dtype=FP16, kind="unset"), 4100),
    "500x4096 eval": Case(partial(made, 4096, 7, b=FP16, fp8=E4M3, kind="eval"), 500),
    "3 adapters, 480x1000 r48": Case(partial(several, 3, 1000, 48), 480, SEVERAL),
    "8 adapters, 4096x4096 r16": Case(partial(several, 8, 4096, 16), 4096, SEVERAL),
    "2 adapters, 32x8 r128 fp16": Case(partial(several, 2, 8, 128, dtype=FP16, kind="none"), 32, SEVERAL),
}  # fmt: skip
# Strips of 128 columns (few rows, or a border inside of a wide strip) and wide ones; adapters everywhere, or lacking at
# the start, in the middle, at the end; as many projections as it takes, an empty one; a ragged last one; blocks of the
# grid that begin and end inside of each projection.
SIDES: dict[str, Case] = {
    **{f"500 r{r}, q k v": Case(partial(made, (384, 128, 128), r), 500) for r in (7, 8, 16, 33, 64, 128)},
    **{f"2100 r{r}, q k v": Case(partial(made, (4096, 1024, 1024), r), 2100) for r in (8, 16, 64, 128)},
    "2100, no k": Case(partial(made, (4096, -1024, 1024), 16), 2100),
    "2100, border in a strip": Case(partial(made, (4224, 896, 1024), 16), 2100),
    **{f"{m}, no k, ragged": Case(partial(made, (512, -256, 136), 16), m) for m in (1, 200)},
    "four, an empty one": Case(partial(made, (-128, 256, 0, 1000), 8, b=FP32), 300),
    "none at the end": Case(partial(made, (1024, 512, -8), 64, dtype=FP16, b=FP32, fp8=E4M3), 300),
    "none at the start": Case(partial(made, (-2048, 2048), 16, dtype=FP16, b=FP16, kind="eval"), 4100),
    "one side by side": Case(partial(made, (1000,), 16), 130),
}  # fmt: skip
FILLED: dict[str, Case] = {
    f"all {fill} {fp8} {kind}": Case(partial(made, 528, 16, fp8=fp8, kind=kind, fill=float(fill)), 130)
    for fill in ("nan", "inf", "-inf", "0", "-0", "2e-40", "3e38")
    for fp8 in (E5M2, E4M3)
    for kind in ("kept", "eval")
}  # fmt: skip
# Blocks of 128 columns with a scale: by each kind of warps that make dy8, a ragged last one, projections side by side.
IN_BLOCKS: dict[str, Case] = {
    **{f"500x1008 r{r} blocks": Case(partial(made, 1008, r, power=r % 2 > 0), 500) for r in (0, 1, 16, 33, 64, 128)},
    **{f"4100x4096 r{r} blocks": Case(partial(made, 4096, r, fp8=E4M3, power=False), 4100) for r in (16, 64, 128)},
    "1x16 blocks": Case(partial(made, 16, 1, fp8=E4M3, power=True), 1),
    "4100x4096 fp16 blocks": Case(partial(made, 4096, 24, dtype=FP16, fp8=E4M3, power=False), 4100),
    "2100, q k v, blocks": Case(partial(made, (4096, 1024, 1024), 16, power=False), 2100),
    "300, no k, blocks": Case(partial(made, (512, -256, 144), 64, fp8=E4M3, power=True), 300),
    **{f"all {fill} blocks {fp8}": Case(partial(made, 528, 16, fp8=fp8, fill=float(fill), power=False), 130)
       for fill in ("nan", "inf", "-0", "2e-40", "3e38") for fp8 in (E5M2, E4M3)},
    **{f"every amax {dtype} {fp8} {power}": Case(partial(every_amax, fp8=fp8, power=power, dtype=dtype), 4096)
       for dtype in (BF16, FP16) for fp8 in (E5M2, E4M3) for power in (False, True)},
}  # fmt: skip
ONES = torch.ones(5, 8)
UP, STATE = Up(torch.ones(8, 2), torch.ones(5, 4), 1.0), Scaling(torch.zeros(2, 1), 0, True)
VALID = {"dy": ONES, "up": UP, "scaling": STATE, "fp8_dtype": E5M2, "side": SideBySide([4, 4], [2, 2])}  # fmt: skip
VALID["power_of_two"] = None
ONE_LENGTH = r"rows and ranks must be of one length"
REFUSALS = {
    f"{rows} and {ranks}": Refusal({"side": SideBySide(rows, ranks)}, ValueError, message)
    for rows, ranks, message in (
        ([4, 4], [2], ONE_LENGTH + r", found \[4, 4\] and \[2\]"),
        (None, [2, 2], ONE_LENGTH),
        ([4, 5], [2, 2], r"rows must sum to dy's 8 columns, found \[4, 5\]"),
        ([9, -1], [2, 2], "rows must sum to dy's 8 columns"),
        ([4, 4], [2, 1], r"ranks must be one rank R > 0, or 0 without an adapter, found \[2, 1\]"),
        ([4, 4], [0, 0], "ranks must be one rank"),
        ([4, 4], [3, 0], r"lora_B must be \[8, 3\] .* found \[8, 2\]"),
        ([4, 4], [2, 0], r"s must be \[5, 2\] .* found \[5, 4\]"),
    )
}  # fmt: skip
SMALL = {
    "fp8": Case(partial(made, 24, 3)),
    "fp16, fp32 B, eval": Case(partial(made, 24, 3, dtype=FP16, b=FP32, fp8=E4M3, kind="eval")),
    "side by side": Case(partial(made, (128, -128, 8), 3, kind="unset")),
}  # fmt: skip
MASKED = {
    **{f"mask, {k}": case._replace(make=partial(with_mask, case.make, 72)) for k, case in SMALL.items()},
    "mask, blocks": Case(partial(with_mask, partial(made, 272, 3, power=True), 72)),
    "mask, base only": Case(partial(with_mask, partial(made, 24, 0), 72), why_not="rank 0"),
    "mask, rank": Case(partial(with_mask, partial(made, 24, 65), 72), why_not="rank 65"),
    "mask, N % 8": Case(partial(with_mask, partial(made, 23, 3), 72), why_not="N = 23"),
    "mask, p": Case(partial(with_mask, partial(made, 24, 3), 72, p=1e-6), why_not="no mask of p"),
    "mask, col0": Case(partial(with_mask, partial(made, 24, 3), 72, col0=4), why_not="at col0 = 4"),
    "mask, several": Case(partial(with_mask, partial(several, 3, 24, 5), 72), 48, why_not=SEVERAL),
}  # fmt: skip
MASKS: dict[str, Case] = {
    f"mask, {m}x{n} r{r} {dtype} p{p:g}, {cols}": Case(
        partial(with_mask, partial(made, n, r, dtype=dtype, b=dtype), cols, p=p), m
    )
    for m, n, cols, r in (
        (1, 8, 16, 1),
        (300, 384, 656, 16),  # few rows a block; words that end inside of a warp's 32
        (77, 8192, 128, 33),  # wide strips
        (2100, 520, 8200, 17),  # more to draw than to read: all warps end up drawing
        (4100, 8200, 8200, 64),  # so many pairs a block that those that multiply make dy8
        (4000, 264, 4096, 64),  # where only some draw
    )
    for dtype, p in ((BF16, 0.1), (FP16, 0x7C00 / 65536), (BF16, 2**-16), (FP16, 0.9))
}  # fmt: skip
MASKS |= {
    f"mask, {m}x{n} r{r} blocks": Case(partial(with_mask, partial(made, n, r, fp8=E4M3, power=False), 4096), m)
    for m, n, r in ((300, 384, 16), (4100, 8208, 64), (2100, 4096, 33), (4096, 4096, 16))
}  # fmt: skip
MASKS |= {
    f"mask, {m}x{n} r{r} unset": Case(partial(with_mask, partial(made, n, r, kind="unset"), 4096), m)
    for m, n, r in ((300, 384, 16), (4100, 8200, 64))
}  # fmt: skip
MASKS["mask, 3000 rows side by side"] = Case(
    partial(with_mask, partial(made, (256, -128, 128), 16), 1024), 3000
)
MASK = {"dropout": Made("cpu", 5).dropout(), "cols": 8}
SLOT = MASK["dropout"]._replace(slot=torch.ones(2))
CONTRACTS = (
    Contract(
        ops.quantize_grad,
        {
            **SMALL,
            "base only": Case(partial(made, 24, 0)),
            "frozen B": Case(without_s),
            "frozen B, unset": Case(partial(without_s, kind="unset")),
            "blocks": Case(partial(made, 272, 3, power=False)),
            "blocks, side by side": Case(partial(made, (128, -128, 16), 3, fp8=E4M3, power=True)),
            "blocks, N % 16": Case(partial(made, 24, 3, power=False)),
            "blocks, fp32": Case(partial(made, 272, 3, dtype=FP32, power=True), why_not="dy is torch.float32"),
            "several": Case(partial(several, 3, 24, 5), 48, why_not=SEVERAL, is_traced=True),
            "plain base": Case(partial(made, 24, 3, kind="none")),
            "fp32": Case(partial(made, 24, 3, dtype=FP32), why_not="dy is torch.float32"),
            "N % 8": Case(partial(made, 23, 3), why_not="N = 23"),
            "column by column": Case(column_by_column, why_not="strides", is_traced=True),
            "rank": Case(partial(made, 24, 144), why_not="rank 144"),
            "narrow projections": Case(partial(made, (4, -1, 5), 3, dtype=FP16), why_not="N = 10"),
            "unaligned projections": Case(partial(made, (100, 20, 24), 16), why_not="multiples of 128"),
            "five projections": Case(partial(made, (128, 128, -128, 256, 128), 16), why_not="5 projections"),
            **MASKED,
        },
        bound,
        {**ONE, **SIDES, **FILLED, **IN_BLOCKS, **MASKS},
        VALID,
        {
            **REFUSALS,
            "slot": Refusal(MASK | {"dropout": SLOT}, ValueError, r"slot must be int64 \[2\]"),
            "two recipes": Refusal({"power_of_two": True}, ValueError, "scaling must be None with power"),
        },
    ),
)  # fmt: skip
