# SPDX-License-Identifier: Apache-2.0
"""fp8_grad_input: cases, and a bound from float64 under the reference's mask."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from lorakernels import ops
from lorakernels.numerics.segments import rows_times
from lorakernels.ops import Scaled, Weight
from lorakernels.ops.hardware import PLAIN, SEVERAL
from tests.ops.cases.bias_dropout_add import exact_branch
from tests.ops.cases.lora_grad_a import MASKS
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
    blocks_of,
    near_gemm,
    wide,
)


class Grad(NamedTuple):
    """Makes the operands of dx [M, K], a contraction over N. Rank 0: no adapter.

    `in_blocks`: each block of 128 has a scale.
    """

    k: int
    n: int
    rank: int
    p: float = 0.1
    dtype: torch.dtype = BF16
    a: torch.dtype = FP32
    fp8: torch.dtype = E5M2
    split: bool = True
    adapters: int = 0
    in_blocks: bool = False

    def __call__(self, m: Made) -> Arguments:
        k, n, rank, p, dtype, a, fp8, split, adapters, in_blocks = self
        each = (adapters,) if adapters else ()
        dy = Scaled(m.fp8(m.rows, n, dtype=fp8), (m.rand(1) + 0.1) / n**0.5)
        weight = Weight(m.fp8(n, k), m.rand(1) + 0.1)
        if in_blocks:
            dy = dy._replace(scale_inv=m.scales(blocks_of(n), m.rows) / n**0.5)
            weight = weight._replace(scale_inv=m.scales(blocks_of(n), blocks_of(k)))
        ds = m.randn(m.rows, rank, dtype=dtype) if rank else None
        lora_A = m.randn(*each, rank, k, dtype=a) if rank else None
        return dy, fp8, weight, ds, lora_A, m.dropout(p) if p else None, dtype, split


in_blocks = partial(Grad, in_blocks=True)


def plain(m: Made) -> Arguments:
    return Scaled(m.randn(m.rows, 10)), E5M2, Weight(m.randn(10, 24)), None, None, None, FP32, True


def changed(m: Made, **changes: Any) -> Arguments:
    """A call that the kernel takes, but for the arguments that these make of the old ones."""
    names = ("dy", "fp8", "weight", "ds", "lora_A", "dropout", "dtype", "split")
    arguments = dict(zip(names, Grad(32, 16, 3)(m), strict=True))
    return tuple((arguments | {k: change(arguments[k]) for k, change in changes.items()}).values())


def bound(call: Call) -> Iterator[Checked]:
    """`near_gemm`; A is rounded to ds's dtype. Without ds or A there is no branch."""
    dy, fp8, weight, ds, lora_A, dropout, _, split = call.before
    d, w = wide(dy, fp8), wide(weight)
    exact, size = d @ w, d.abs() @ w.abs()
    depth = dy.data.shape[1]
    if ds is not None and lora_A is not None:
        s, a = ds.double(), lora_A.to(ds.dtype).double()
        exact = exact + exact_branch(rows_times(s, a), dropout)
        size = size + exact_branch(rows_times(s.abs(), a.abs()), dropout)
        depth += a.shape[-2]
    yield near_gemm(call, (d, w), exact, size, depth, split)._replace(name="dx")


IN_BLOCKS = {
    "in blocks": Case(in_blocks(256, 512, 3, p=0.5), 8),
    "in blocks, part of one, e4m3": Case(in_blocks(208, 144, 3, dtype=FP16, a=FP16, fp8=E4M3)),
    "in blocks, base only": Case(in_blocks(32, 16, 0)),
    "in blocks, fp32, odd sizes": Case(in_blocks(131, 130, 3, dtype=FP32), why_not="multiples of 16"),
    "in blocks, several": Case(in_blocks(208, 144, 3, adapters=2), 6, SEVERAL, is_traced=True),
}  # fmt: skip
SHAPES_IN_BLOCKS = {
    "in blocks, 512x512x512": Case(in_blocks(512, 512, 16), 512),
    "in blocks, 300x272x1536": Case(in_blocks(272, 1536, 16, fp8=E4M3), 300),
    "in blocks, one row": Case(in_blocks(16, 16, 1), 1),
    "in blocks, SmolLM2's down": Case(in_blocks(1536, 576, 16, p=0.0), 777),
    "in blocks, bf16 A": Case(in_blocks(1040, 2064, 7, a=BF16), 777),
    "in blocks, fp16, p 0.9": Case(in_blocks(2064, 272, 33, p=0.9, dtype=FP16), 4100),
    "in blocks, e4m3": Case(in_blocks(4112, 1040, 64, fp8=E4M3), 300),
    "in blocks, 8 adapters": Case(in_blocks(1040, 528, 17, p=0.0, adapters=8), 1000, SEVERAL),
    "in blocks, 3 adapters, odd sizes": Case(in_blocks(131, 130, 3, dtype=FP32, adapters=3), 9, SEVERAL),
}  # fmt: skip
SHAPES = {
    **SHAPES_IN_BLOCKS,
    "512x512x512": Case(Grad(512, 512, 16), 512),
    "no adapter": Case(Grad(128, 128, 0), 256),
    "one row": Case(Grad(16, 16, 1), 1),
    "p 0.5": Case(Grad(144, 48, 5, p=0.5), 129),
    "no dropout": Case(Grad(1040, 2064, 16, p=0.0), 777),
    "bf16 A": Case(Grad(1040, 2064, 7, a=BF16), 777),
    "e4m3": Case(Grad(4112, 1040, 64, fp8=E4M3), 300),
    "fp16": Case(Grad(4112, 1040, 64, dtype=FP16, a=FP16), 300),
    "fp16, p 0.9": Case(Grad(2064, 272, 33, p=0.9, dtype=FP16), 4100),
    "5000x4096x1024": Case(Grad(4096, 1024, 16, p=0.3), 5000),
    "rank 128": Case(Grad(4096, 128, 128), 5000),
    "rank 192": Case(Grad(4096, 128, 192), 5000),
    "rank 300, fp16": Case(Grad(528, 272, 300, p=0.0, dtype=FP16), 700),
    "fast": Case(Grad(4096, 512, 128, split=False), 5000),
    "fast, e4m3": Case(Grad(528, 512, 16, split=False, fp8=E4M3), 300),
    "fp16 A": Case(Grad(5008, 256, 256, p=0.01, a=FP16), 3000),
    "3 adapters": Case(Grad(272, 384, 48, p=0.0, adapters=3), 768),
    "8 adapters, dropout": Case(Grad(1040, 128, 17, adapters=8), 1024),
    "8 adapters, fast, e4m3": Case(Grad(4096, 1024, 16, p=0.0, fp8=E4M3, split=False, adapters=8), 4096),
}  # fmt: skip
DY = torch.zeros(3, 130, dtype=torch.uint8)
W = Weight(torch.zeros(130, 100, dtype=torch.uint8), torch.ones(2, 1))
BLOCKS = {"dy": Scaled(DY, torch.ones(2, 3)), "weight": W}
OF_BLOCKS = {
    **{f"in blocks, {what}": r._replace(change=BLOCKS | r.change) for what, r in MASKS.items()},
    "scales of dy": Refusal(
        BLOCKS | {"dy": Scaled(DY, torch.ones(1))},
        ValueError,
        r"dy_scale_inv must be float32 \[2, 3\], found torch.float32 \[1\]",
    ),
    "scales of another block": Refusal(
        BLOCKS | {"weight": W._replace(scale_inv=torch.ones(1, 1))},
        ValueError,
        r"weight_scale_inv must be float32 \[2, 1\], found torch.float32 \[1, 1\]",
    ),
    "blocks of dy alone": Refusal(
        BLOCKS | {"weight": W._replace(scale_inv=torch.ones(1))},
        ValueError,
        r"weight_scale_inv must be float32 \[2, 1\], found torch.float32 \[1\]",
    ),
    "weight": Refusal(
        BLOCKS | {"weight": Weight(torch.zeros(5, 6, dtype=torch.uint8), torch.ones(1, 1))},
        ValueError,
        r"weight must be \[130, K\], found \[5, 6\]",
    ),
    "adapters": Refusal(
        {"lora_A": torch.zeros(2, 4, 100)},
        ValueError,
        r"lora_A \[2, 4, 100\] has 2 adapters, which must divide the rows, found 3",
    ),
}  # fmt: skip
CONTRACTS = (
    Contract(
        ops.fp8_grad_input,
        {
            **IN_BLOCKS,
            "fp8": Case(Grad(32, 16, 3, p=0.5)),
            "fp16, e4m3": Case(Grad(32, 48, 3, dtype=FP16, a=FP16, fp8=E4M3)),
            "base only": Case(Grad(32, 16, 0)),
            "several": Case(Grad(32, 128, 5, p=0.0, adapters=2), 256),
            "few rows of several": Case(Grad(32, 128, 3, adapters=3), 6, why_not="multiple of 128 for each"),
            "plain": Case(plain, why_not=PLAIN),
            "odd sizes": Case(Grad(24, 10, 3), why_not="N = 10 and K = 24"),
            "fp32": Case(partial(changed, dtype=lambda _: FP32), why_not="float32"),
            "col0": Case(partial(changed, dropout=lambda d: d._replace(col0=4)), why_not="col0 = 4"),
            "column by column": Case(
                partial(changed, dy=lambda x: x._replace(data=x.data.t().contiguous().t())), why_not="strides"
            ),
            "ds": Case(partial(changed, ds=lambda t: t.to(FP16)), why_not="ds is torch.float16"),
        },
        bound,
        SHAPES,
        {
            "dy": Scaled(torch.zeros(3, 16)),
            "fp8_dtype": E5M2,
            "weight": Weight(torch.zeros(16, 100)),
            "ds": torch.zeros(3, 4),
            "lora_A": torch.zeros(4, 100),
            "dropout": None,
            "out_dtype": BF16,
            "split": True,
        },
        {**MASKS, **OF_BLOCKS},
    ),
)  # fmt: skip
