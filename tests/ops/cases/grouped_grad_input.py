# SPDX-License-Identifier: Apache-2.0
"""grouped_grad_input: cases, and a bound from float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from lorakernels import ops
from lorakernels.ops import Scaled, Weight
from tests.ops.cases.grouped_quantize_lora_down import NONE
from tests.ops.contract import (
    BF16,
    E4M3,
    E5M2,
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
    near_gemm,
    wide,
)


class Grad(NamedTuple):
    """Operands of dx [M, K], a contraction over N, of three groups. Rank 0: no adapter."""

    k: int
    n: int
    rank: int
    a: torch.dtype = BF16
    fp8: torch.dtype = E5M2
    split: bool = True
    out: torch.dtype = BF16

    def __call__(self, m: Made) -> Arguments:
        k, n, rank, a, fp8, split, out = self
        dy = Scaled(m.fp8(m.rows, n, dtype=fp8), (m.rand(3) + 0.1) / n**0.5)
        weight = Weight(m.fp8(3, n, k), m.rand(3) + 0.1)
        ds = m.randn(m.rows, rank, dtype=out) if rank else None
        lora_A = m.randn(3, rank, k, dtype=a) if rank else None
        return dy, fp8, weight, m.groups()[0], ds, lora_A, out, split


def bound(call: Call) -> Iterator[Checked]:
    """`near_gemm` of each block of rows; A is rounded to ds's dtype."""
    dy, fp8, weight, groups, ds, lora_A, _, split = call.before
    for i, g in enumerate(groups.group_of.tolist()):
        own = slice(128 * i, 128 * i + 128)
        d = wide(Scaled(dy.data[own], dy.scale_inv[g : g + 1]), fp8)
        w = wide(Weight(weight.data[g], weight.scale_inv[g : g + 1]))
        exact, size = d @ w, d.abs() @ w.abs()
        depth = dy.data.shape[1]
        if ds is not None:
            s, a = ds[own].double(), lora_A[g].to(ds.dtype).double()
            exact, size, depth = exact + s @ a, size + s.abs() @ a.abs(), depth + len(a)
        of_block = call._replace(results=(call.results[0][own],))
        yield near_gemm(of_block, (d, w), exact, size, depth, split)._replace(name="dx")


CONTRACTS = (
    Contract(
        ops.grouped_grad_input,
        {
            "fp8": Case(Grad(32, 128, 3), 256),
            "fast, e4m3, fp32 A": Case(Grad(48, 128, 16, a=FP32, fp8=E4M3, split=False), 256),
            "base only": Case(Grad(32, 128, 0), 256),
            "N % 128": Case(Grad(32, 48, 3), 256, why_not="N = 48 must be a multiple of 128"),
            "fp16": Case(Grad(32, 128, 3, out=FP16), 256, why_not="out_dtype is torch.float16"),
        },
        bound,
        {
            "2048x528 over 4096": Case(Grad(528, 4096, 16), 2048),
            "rank 100": Case(Grad(2048, 384, 100), 1024),
            "fast, rank 64": Case(Grad(1040, 1024, 64, split=False), 512),
        },
        {
            "dy": Scaled(torch.zeros(0, 128, dtype=UINT8), torch.ones(3)),
            "fp8_dtype": E5M2,
            "weight": Weight(torch.zeros(3, 128, 16, dtype=UINT8), torch.ones(3)),
            "groups": NONE,
            "ds": None,
            "lora_A": None,
            "out_dtype": BF16,
            "split": True,
        },
        {
            "no scale": Refusal(
                {"dy": Scaled(torch.zeros(0, 128, dtype=UINT8), torch.ones(2))},
                ValueError,
                r"dy_scale_inv must be \[3\] on cpu, found \[2\]",
            ),
            "weight": Refusal(
                {"weight": Weight(torch.zeros(3, 64, 16, dtype=UINT8), torch.ones(3))},
                ValueError,
                r"weight must be \[3, 128, …\] on cpu, found \[3, 64, 16\]",
            ),
            "lora_A": Refusal(
                {"ds": torch.zeros(0, 2), "lora_A": torch.zeros(3, 4, 16)},
                ValueError,
                r"lora_A must be \[3, 2, 16\] on cpu, found \[3, 4, 16\]",
            ),
        },
    ),
)  # fmt: skip
