# SPDX-License-Identifier: Apache-2.0
"""quantize_lora_down: cases, x8 and the amax bit for bit, and s from float64 under the reference's mask."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.numerics.segments import rows_times
from lorakernels.ops import Dropout, Scaling
from lorakernels.ops.hardware import SEVERAL
from tests.ops.cases.bias_dropout_add import exact_branch
from tests.ops.contract import (
    BF16,
    E4M3,
    FP16,
    FP32,
    STATES,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Large,
    Made,
    Refusal,
    near,
    quantized,
    quantized_in_blocks,
    rounded_again,
)


def made(
    k: int,
    rank: int,
    p: float,
    kind: str,
    dtype: torch.dtype,
    m: Made,
    a: torch.dtype = FP32,
    col0: int = 0,
    power: bool | None = None,
) -> Arguments:
    """Rank 0: no adapter. `power`, with `kind` none: each block has a scale."""
    lora_A = (m.randn(rank, k) / k**0.5).to(a) if rank else None
    dropout = m.dropout(p, 7 if col0 else 0, col0) if p else None
    return (3 * m.randn(m.rows, k)).to(dtype), lora_A, m.scaling(kind), dropout, power


def in_blocks(k: int, rank: int, p: float, dtype: torch.dtype, power: bool, m: Made) -> Arguments:
    """Blocks of every magnitude, of zeros, and with inf and NaN, which no other block sees."""
    x, *others = made(k, rank, p, "none", dtype, m, power=power)
    x *= (
        (2.0 ** torch.arange(-12, k // 128 + 1 - 12, device=x.device))
        .repeat_interleave(128)[:k]
        .to(dtype)
    )
    x[:, : k // 3] = x[:, : k // 3].where(m.rand(m.rows, 1) > 0.2, 0.0)
    return x, *others


def several(adapters: int, k: int, rank: int, kind: str, dtype: torch.dtype, m: Made) -> Arguments:
    """Of adapters in one batch, which divide M."""
    x, _, scaling, *_ = made(k, 0, 0.0, kind, dtype, m)
    return x, m.randn(adapters, rank, k) / k**0.5, scaling, None, None


def column_by_column(m: Made) -> Arguments:
    x, *others = made(64, 4, 0.1, "kept", BF16, m)
    return x.t().contiguous().t(), *others


def misaligned(m: Made) -> Arguments:
    x, *others = made(64, 4, 0.1, "kept", BF16, m)
    return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape), *others


def bound(call: Call) -> Iterator[Checked]:
    """x8 and the amax bit for bit. s: one rounding at the store, fp32 sums of K products: K roundings at worst.

    PyTorch's kernels round s before the dropout factor, too.
    """
    (x, lora_A, before, dropout, power), after = call.before, call.after[2]
    x8, scale_inv, s = call.results
    if power is None:
        yield from quantized("x8", x, (x8, scale_inv), (before, after), E4M3)
    else:
        yield from quantized_in_blocks("x8", x, (x8, scale_inv), E4M3, power)
    if lora_A is None:
        yield Checked("s", s, s.new_empty(0))
        return
    xd, a = exact_branch(x, dropout), lora_A.to(x.dtype).double()
    size = rows_times(xd.abs(), a.abs().mT)
    yield near("s", s, rows_times(xd, a.mT), size, 1 + x.shape[1], rounded_again(call, x.dtype))


def large(device: torch.device | str) -> Large:
    x = torch.zeros(2**17 + 1, 2**14, dtype=BF16, device=device)
    x[-1].normal_()
    made, a = Made(device, 1), torch.randn(16, 2**14, device=device)
    shards: list[tuple[Tensor, Dropout]] = [
        (t, made.dropout(0.3, x.shape[0] - t.shape[0])) for t in (x, x[-1:])
    ]
    return Large(*((t, a, made.scaling(), dropout, None) for t, dropout in shards))


SIZES = [
    (1, 8, 1),  # K % 16 == 8: without TMA
    (16, 1032, 16),
    (77, 1000, 17),
    (4100, 520, 64),
    (300, 648, 128),
    (40, 24, 0),
    (15, 64, 7),  # by boxes, the last three with more steps a block than its ring has places
    (16, 1040, 16),
    (5000, 1040, 0),
    (20000, 144, 16),
    (20000, 144, 20),
    (300, 640, 128),  # by panels, the last three as before
    (500, 2064, 33),
    (4100, 528, 64),
    (26000, 400, 100),
    (20000, 432, 20),
    (1, 16, 129),  # by panels of 192 and of 256 ranks
    (300, 640, 192),
    (4100, 2064, 192),
    (700, 1040, 193),
    (4100, 528, 256),
    (77, 1000, 192),  # K % 16 == 8: 128 ranks at a time
    (300, 648, 256),
]  # fmt: skip
X = torch.ones(4, 16)
CONTRACTS = (
    Contract(
        ops.quantize_lora_down,
        {
            "fp8": Case(partial(made, 24, 3, 0.3, "kept", BF16)),
            "no scale yet, fp16": Case(partial(made, 24, 3, 0.5, "unset", FP16, a=FP16)),
            "base only": Case(partial(made, 24, 0, 0.0, "eval", BF16)),
            "plain shard": Case(partial(made, 512, 16, 0.3, "none", BF16, a=BF16, col0=16), 5),
            "blocks": Case(partial(in_blocks, 272, 3, 0.3, BF16, False)),
            "blocks, base only": Case(partial(in_blocks, 272, 0, 0.0, FP16, True)),
            "blocks, K % 16": Case(partial(in_blocks, 264, 3, 0.3, BF16, True)),
            "blocks, fp32": Case(partial(in_blocks, 272, 3, 0.0, FP32, False), why_not="x is torch.float32"),
            "several": Case(partial(several, 3, 24, 5, "kept", BF16), 48, why_not=SEVERAL, is_traced=True),
            "fp32": Case(partial(made, 24, 3, 0.3, "kept", FP32), why_not="x is torch.float32"),
            "K % 8": Case(partial(made, 60, 4, 0.1, "kept", BF16), why_not="K = 60"),
            "rank": Case(partial(made, 64, 257, 0.1, "kept", BF16), why_not="rank 257"),
            "col0": Case(partial(made, 64, 4, 0.1, "kept", BF16, col0=4), why_not="col0 = 4"),
            "column by column": Case(column_by_column, why_not="x must be contiguous", is_traced=True),
            "misaligned": Case(misaligned, why_not="16-byte aligned"),
        },
        bound,
        {
            **{
                f"{m}x{k} r{r} p{p:g} {dtype}": Case(partial(made, k, r, p, "kept", dtype), m)
                for m, k, r in SIZES
                for p, dtype in ((0.1, BF16), (0.0, FP16))
                if r or not p
            },
            **{
                f"{m}x{k} r{r} p{p:g} {dtype} blocks": Case(partial(in_blocks, k, r, p, dtype, p == 0), m)
                for m, k, r in SIZES
                for p, dtype in ((0.1, BF16), (0.0, FP16))
                if r or not p
            },
            "4096x4096 r16 blocks": Case(partial(in_blocks, 4096, 16, 0.1, BF16, False), 4096),
            "4096x4096 r32 blocks": Case(partial(in_blocks, 4096, 32, 0.1, BF16, False), 4096),
            **{
                f"130x{k} r{r} {kind}": Case(partial(made, k, r, 0.0, kind, BF16), 130)
                for k, r in ((256, 0), (256, 16), (256, 64), (256, 192), (264, 192))
                for kind in STATES
            },
            **{
                f"{j} adapters, {m}x{k} r{r} {dtype}": Case(partial(several, j, k, r, "kept", dtype), m, SEVERAL)
                for j, m, k, r, dtype in (
                    (1, 16, 8, 1, BF16), (3, 480, 1000, 48, BF16), (8, 1024, 4096, 16, BF16), (2, 4096, 520, 128, FP16)
                )
            },
        },
        {"x": X, "lora_A": X, "scaling": None, "dropout": None, "power_of_two": None},
        {
            "two recipes": Refusal(
                {"scaling": Scaling(torch.ones(2, 3), 1, True), "power_of_two": False},
                ValueError,
                "scaling must be None with power_of_two = False",
            ),
            "slot": Refusal(
                {"dropout": Dropout(torch.tensor([5]), 0.1, 0)},
                ValueError,
                r"slot must be int64 \[2\] on cpu, found torch.int64 \[1\]",
            ),
            "lora_A": Refusal(
                {"lora_A": torch.ones(3, 2)},
                ValueError,
                r"lora_A must be \[R, \d+\] or \[J, R, \d+\], found \[3, 2\]",
            ),
            "adapters": Refusal(
                {"lora_A": torch.ones(3, 2, 16)},
                ValueError,
                r"lora_A \[3, 2, 16\] has 3 adapters, which must divide the rows, found 4",
            ),
        },
        large,
    ),
)  # fmt: skip
