# SPDX-License-Identifier: Apache-2.0
"""fp8_block_grad_input: cases, and a bound from float64 under the reference's mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from lorakernels import ops
from lorakernels.numerics.segments import rows_times
from lorakernels.ops import Dropout, Scaled, Weight
from lorakernels.ops.hardware import SEVERAL
from tests.ops.cases.bias_dropout_add import exact_branch
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
    """Makes the operands of dx [M, K], a contraction over N. Rank 0: no adapter."""

    k: int
    n: int
    rank: int
    p: float = 0.1
    dtype: torch.dtype = BF16
    a: torch.dtype = FP32
    fp8: torch.dtype = E5M2
    adapters: int = 0

    def __call__(self, m: Made) -> Arguments:
        k, n, rank, p, dtype, a, fp8, adapters = self
        each = (adapters,) if adapters else ()
        dy = Scaled(m.fp8(m.rows, n, dtype=fp8), m.scales(blocks_of(n), m.rows) / n**0.5)
        weight = Weight(m.fp8(n, k), m.scales(blocks_of(n), blocks_of(k)))
        ds = m.randn(m.rows, rank, dtype=dtype) if rank else None
        lora_A = m.randn(*each, rank, k, dtype=a) if rank else None
        return dy, fp8, weight, ds, lora_A, m.dropout(p) if p else None, dtype


def bound(call: Call) -> Iterator[Checked]:
    """`near_gemm`; A is rounded to ds's dtype. Without ds or A there is no branch."""
    dy, fp8, weight, ds, lora_A, dropout, _ = call.before
    d, w = wide(dy, fp8), wide(weight)
    exact, size = d @ w, d.abs() @ w.abs()
    depth = dy.data.shape[1]
    if ds is not None and lora_A is not None:
        s, a = ds.double(), lora_A.to(ds.dtype).double()
        exact = exact + exact_branch(rows_times(s, a), dropout)
        size = size + exact_branch(rows_times(s.abs(), a.abs()), dropout)
        depth += a.shape[-2]
    yield near_gemm(call, (d, w), exact, size, depth, True)._replace(name="dx")


DY = torch.zeros(3, 130, dtype=torch.uint8)
W = Weight(torch.zeros(130, 100, dtype=torch.uint8), torch.ones(2, 1))
CONTRACTS = (
    Contract(
        ops.fp8_block_grad_input,
        {
            "blocks": Case(Grad(256, 512, 3, p=0.5), 8),
            "part of a block, e4m3": Case(Grad(208, 144, 3, dtype=FP16, a=FP16, fp8=E4M3)),
            "base only": Case(Grad(32, 16, 0)),
            "fp32, odd sizes": Case(Grad(131, 130, 3, dtype=FP32), why_not="multiples of 16"),
            "several": Case(Grad(208, 144, 3, adapters=2), 6, SEVERAL, is_traced=True),
        },
        bound,
        {
            "512x512x512": Case(Grad(512, 512, 16), 512),
            "300x272x1536": Case(Grad(272, 1536, 16, fp8=E4M3), 300),
            "one row": Case(Grad(16, 16, 1), 1),
            "SmolLM2's down": Case(Grad(1536, 576, 16, p=0.0), 777),
            "bf16 A": Case(Grad(1040, 2064, 7, a=BF16), 777),
            "fp16, p 0.9": Case(Grad(2064, 272, 33, p=0.9, dtype=FP16), 4100),
            "e4m3": Case(Grad(4112, 1040, 64, fp8=E4M3), 300),
            "8 adapters": Case(Grad(1040, 528, 17, p=0.0, adapters=8), 1000, SEVERAL),
            "3 adapters, odd sizes": Case(Grad(131, 130, 3, dtype=FP32, adapters=3), 9, SEVERAL),
        },
        {
            "dy": Scaled(DY, torch.ones(2, 3)),
            "fp8_dtype": E5M2,
            "weight": W,
            "ds": torch.zeros(3, 4),
            "lora_A": torch.zeros(4, 100),
            "dropout": None,
            "out_dtype": FP32,
        },
        {
            "scales of dy": Refusal(
                {"dy": Scaled(DY, torch.ones(1))},
                ValueError,
                r"dy_scale_inv must be float32 \[2, 3\], found torch.float32 \[1\]",
            ),
            "scales of another block": Refusal(
                {"weight": W._replace(scale_inv=torch.ones(1, 1))},
                ValueError,
                r"weight_scale_inv must be float32 \[2, 1\], found torch.float32 \[1, 1\]",
            ),
            "weight": Refusal(
                {"weight": Weight(torch.zeros(5, 6, dtype=torch.uint8), torch.ones(1, 1))},
                ValueError,
                r"weight must be \[130, K\], found \[5, 6\]",
            ),
            "adapters": Refusal(
                {"lora_A": torch.zeros(2, 4, 100)},
                ValueError,
                r"lora_A \[2, 4, 100\] has 2 adapters, which must divide the rows, found 3",
            ),
            "slot": Refusal(
                {"dropout": Dropout(torch.tensor([5]), 0.1, 0)},
                ValueError,
                r"slot must be int64 \[2\] on cpu, found torch.int64 \[1\]",
            ),
        },
    ),
)  # fmt: skip
