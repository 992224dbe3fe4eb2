# SPDX-License-Identifier: Apache-2.0
"""grouped_linear_lora: cases, and a bound from float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from lorakernels import ops
from lorakernels.ops import Scaled, Up, Weight
from tests.ops.cases.grouped_quantize_lora_down import NONE
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
    near_gemm,
    wide,
)


class Linear(NamedTuple):
    """Operands of y [M, N] over K, of three groups. Rank 0: no adapter."""

    n: int
    k: int
    rank: int
    b: torch.dtype = FP32
    out: torch.dtype = BF16

    def __call__(self, m: Made) -> Arguments:
        n, k, rank, b, out = self
        x = Scaled(m.fp8(m.rows, k), (m.rand(3) + 0.1) / k**0.5)
        weight = Weight(m.fp8(3, n, k), m.rand(3) + 0.1)
        up = None
        if rank:
            up = Up(m.randn(3, n, rank, dtype=b), m.randn(m.rows, rank, dtype=out), 0.7)
        return x, weight, m.groups()[0], up, out


def bound(call: Call) -> Iterator[Checked]:
    """`near_gemm` of each block of rows; B is rounded to s's dtype."""
    x, weight, groups, up, _ = call.before
    for i, g in enumerate(groups.group_of.tolist()):
        own = slice(128 * i, 128 * i + 128)
        d = wide(Scaled(x.data[own], x.scale_inv[g : g + 1]))
        w = wide(Weight(weight.data[g], weight.scale_inv[g : g + 1])).t()
        exact, size = d @ w, d.abs() @ w.abs()
        depth = x.data.shape[1]
        if up is not None:
            s, b = up.s[own].double(), up.lora_B[g].to(up.s.dtype).double().t()
            exact, size = exact + up.scaling * s @ b, size + up.scaling * s.abs() @ b.abs()
            depth += len(b)
        of_block = call._replace(results=(call.results[0][own],))
        yield near_gemm(of_block, (d, w), exact, size, depth, False)


CONTRACTS = (
    Contract(
        ops.grouped_linear_lora,
        {
            "fp8": Case(Linear(128, 32, 3), 256),
            "base only": Case(Linear(128, 48, 0), 256),
            "bf16 B": Case(Linear(256, 16, 16, b=BF16), 256),
            "N % 128": Case(Linear(48, 32, 3), 256, why_not="N = 48 must be a multiple of 128"),
            "fp16": Case(Linear(128, 32, 3, out=FP16), 256, why_not="out_dtype is torch.float16"),
        },
        bound,
        {
            "wide": Case(Linear(4096, 528, 16), 2048),
            "wide r64": Case(Linear(4096, 1040, 64), 2048),
            "wide r100": Case(Linear(5120, 256, 100, b=BF16), 2048),
            "small r128": Case(Linear(384, 2048, 128), 256),
        },
        {
            "x": Scaled(torch.zeros(0, 16, dtype=UINT8), torch.ones(3)),
            "weight": Weight(torch.zeros(3, 128, 16, dtype=UINT8), torch.ones(3)),
            "groups": NONE,
            "up": None,
            "out_dtype": BF16,
        },
        {
            "a scale": Refusal(
                {"x": Scaled(torch.zeros(0, 16, dtype=UINT8), torch.ones(1))},
                ValueError,
                r"x_scale_inv must be \[3\] on cpu, found \[1\]",
            ),
            "weight": Refusal(
                {"weight": Weight(torch.zeros(2, 128, 16, dtype=UINT8), torch.ones(3))},
                ValueError,
                r"weight must be \[3, …, 16\] on cpu, found \[2, 128, 16\]",
            ),
            "plain": Refusal(
                {"weight": Weight(torch.zeros(3, 128, 16), torch.ones(3))}, TypeError, "weight must be torch.uint8"
            ),
            "lora_B": Refusal(
                {"up": Up(torch.zeros(3, 100, 2), torch.zeros(0, 2), 1.0)},
                ValueError,
                r"lora_B must be \[3, 128, 2\] on cpu, found \[3, 100, 2\]",
            ),
        },
    ),
)  # fmt: skip
