# SPDX-License-Identifier: Apache-2.0
"""lora_grad_a: cases, and a bound from float64 under the reference's mask."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.numerics.segments import sum_over_rows
from lorakernels.ops import Dropout, Scaled
from lorakernels.ops.hardware import SEVERAL
from tests.ops.cases.bias_dropout_add import exact_branch
from tests.ops.contract import (
    BF16,
    FP16,
    FP32,
    UINT8,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Made,
    Refusal,
    blocks_of,
    near,
    rounded_again,
    wide,
)


def bytes_of(rows: int, k: int, m: Made) -> Tensor:
    """All 256 bytes but the two NaNs occur, subnormals and −0 included."""
    bytes_ = torch.randint(0, 254, (rows, k), device=m.device)
    return (bytes_ + (bytes_ >= 127).long()).to(UINT8)


def made(
    k: int,
    rank: int,
    fp8: bool,
    p: float,
    dtype: torch.dtype,
    out: torch.dtype,
    m: Made,
    col0: int = 0,
    blocks: bool = False,
) -> Arguments:
    x = Scaled(m.randn(m.rows, k, dtype=dtype))
    if fp8:
        x = Scaled(bytes_of(m.rows, k, m), torch.full((1,), 0.037, device=m.device))
    if blocks:
        x = x._replace(scale_inv=0.037 * m.scales(blocks_of(k), m.rows))
    dropout = m.dropout(p, 7 if col0 else 0, col0) if p else None
    return m.randn(m.rows, rank, dtype=dtype), x, dropout, out


def several(
    adapters: int, k: int, rank: int, fp8: bool, dtype: torch.dtype, m: Made, blocks: bool = False
) -> Arguments:
    """Of adapters in one batch, which divide M."""
    return *made(k, rank, fp8, 0.0, dtype, FP32, m, blocks=blocks), adapters


def other(name: str, change: object, m: Made) -> Arguments:
    """One operand of a call that the kernel takes is `change`d."""
    ds, x, dropout, out = made(64, 4, True, 0.1, BF16, FP32, m)
    if name == "ds":
        return change(ds), x, dropout, out  # type: ignore[operator]
    return ds, change(x), dropout, out  # type: ignore[operator]


def blocks_for(ds_dtype: torch.dtype, m: Made) -> Arguments:
    ds, x, dropout, out = made(144, 4, True, 0.1, BF16, FP32, m, blocks=True)
    return ds.to(ds_dtype), x, dropout, out


def column_by_column(x: Scaled) -> Scaled:
    return x._replace(data=x.data.t().contiguous().t())


def misaligned(x: Scaled) -> Scaled:
    flat = x.data.flatten()
    return x._replace(data=torch.cat((flat[:1], flat))[1:].view(x.data.shape))


def bound(call: Call) -> Iterator[Checked]:
    """One rounding at the store; fp32 sums of M exact products, and of two factors: M + 2 at worst.

    Tensor cores round what they add to fewer bits than that sum's own: twice as much. PyTorch's kernels round dA before
    the scale, too, and an x of another dtype than ds.
    An element of x times its block's scale is rounded to ds's dtype: half of its eps.
    """
    ds, x, dropout, _, *rest = call.before
    adapters = rest[0] if rest else 0
    in_blocks = x.scale_inv is not None and x.scale_inv.dim() == 2
    xd, d = exact_branch(wide(x), dropout), ds.double()
    size = sum_over_rows(d.abs(), xd.abs(), adapters)
    again = rounded_again(call, BF16)
    coarse = 0.0 if x.scale_inv is not None or x.data.dtype == ds.dtype else again
    if in_blocks and ds.dtype != FP32:
        coarse += torch.finfo(ds.dtype).eps / 2
    exact = sum_over_rows(d, xd, adapters)
    yield near("dA", call.results[0], exact, size, 2 * (len(ds) + 2), again, coarse)


SIZES = [
    (1, 16, 1),
    (7, 16, 2),
    (33, 272, 15),
    (64, 256, 16),
    (500, 144, 17),
    (1025, 528, 32),
    (300, 640, 33),
    (777, 1040, 64),
    (130, 400, 65),
    (2100, 160, 128),
    (9000, 48, 8),
    (300, 272, 129),
    (2100, 528, 192),
    (1025, 144, 256),
]  # fmt: skip
KINDS = [(True, BF16, 0.1), (False, FP16, 0.7), (True, FP16, 0.0), (False, BF16, 0.1)]
SLOT = torch.tensor([1, 2])


def mask(dropped: Tensor) -> dict[str, Dropout]:
    return {"dropout": Dropout(SLOT, 0.1, 11, dropped=dropped)}


UNFIT = r"dropped must be contiguous int32 \[3, 4\] on cpu, found"
MASKS = {  # of 3 rows and 100 columns
    "slot": Refusal({"dropout": Dropout(SLOT.int(), 0.1, 11)}, ValueError, r"slot must be int64 \[2\] on cpu"),
    "mask of floats": Refusal(mask(torch.zeros(3, 4)), ValueError, UNFIT),
    "mask too wide": Refusal(mask(torch.zeros(3, 8).int()), ValueError, UNFIT),
    "mask with gaps": Refusal(mask(torch.zeros(3, 8).int()[:, ::2]), ValueError, UNFIT),
}  # fmt: skip
CONTRACTS = (
    Contract(
        ops.lora_grad_a,
        {
            "fp8": Case(partial(made, 32, 3, True, 0.5, BF16, FP32)),
            "plain shard": Case(partial(made, 24, 3, False, 0.3, FP16, BF16, col0=8)),
            "columns of a wide ds": Case(partial(other, "ds", lambda ds: torch.cat((ds, ds), 1)[:, 1:6])),
            "every second column of ds": Case(partial(other, "ds", lambda ds: torch.cat((ds, ds), 1)[:, ::2])),
            "several": Case(partial(several, 3, 32, 5, True, BF16), 48, why_not=SEVERAL, is_traced=True),
            "several, blocks": Case(partial(several, 3, 144, 5, True, BF16, blocks=True), 48, SEVERAL),
            "K % 16": Case(partial(made, 72, 4, True, 0.1, BF16, FP32), why_not="K = 72"),
            "rank": Case(partial(made, 64, 257, True, 0.1, BF16, FP32), why_not="rank 257"),
            "blocks": Case(partial(made, 144, 3, True, 0.5, BF16, FP32, blocks=True)),
            "blocks, fp32 ds": Case(partial(blocks_for, torch.float32), why_not="ds is torch.float32"),
            "col0": Case(partial(made, 64, 4, True, 0.1, BF16, FP32, col0=4), why_not="col0 = 4"),
            "fp32 ds": Case(partial(other, "ds", lambda ds: ds.float()), why_not="ds is torch.float32"),
            "column by column": Case(partial(other, "x", column_by_column), why_not="x must be contiguous"),
            "misaligned": Case(partial(other, "x", misaligned), why_not="16-byte aligned"),
            "x of another dtype": Case(
                partial(other, "x", lambda x: Scaled(x.data.half())), why_not="x is torch.float16, ds torch.bfloat16"
            ),
        },
        bound,
        {
            f"{m}x{k if fp8 else k + 8} r{r} {'x8' if fp8 else 'x'} {dtype} p{p:g}": Case(
                partial(made, k if fp8 else k + 8, r, fp8, p, dtype, FP32), m
            )
            for m, k, r in SIZES
            for fp8, dtype, p in KINDS
        }
        | {
            f"{m}x{k} r{r} x8 in blocks {dtype} p{p:g}": Case(partial(made, k, r, True, p, dtype, FP32, blocks=True), m)
            for m, k, r in SIZES[::2]
            for dtype, p in ((BF16, 0.1), (FP16, 0.0))
        }
        | {
            f"{j} adapters, {m}x{k} r{r} {'x8' if fp8 else 'x'} {dtype}": Case(
                partial(several, j, k, r, fp8, dtype), m, SEVERAL
            )
            for j, m, k, r, fp8, dtype in (
                (1, 16, 16, 1, True, FP16), (3, 480, 1040, 48, False, BF16), (8, 4096, 4096, 16, True, BF16)
            )
        },
        {"ds": torch.zeros(3, 4), "x": Scaled(torch.zeros(3, 100)), "dropout": None, "out_dtype": FP32},
        MASKS
        | {
            "adapters": Refusal({"adapters": 2}, ValueError, r"adapters must be 0 or divide the 3 rows, found 2"),
            "scales of blocks": Refusal(
                {"x": Scaled(torch.zeros(3, 100, dtype=UINT8), torch.ones(3, 1))},
                ValueError,
                r"x_scale_inv must be \[1\] or \[1, 3\], found \[3, 1\]",
            )
        },
    ),
)  # fmt: skip
