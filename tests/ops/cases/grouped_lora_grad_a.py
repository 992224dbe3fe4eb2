# SPDX-License-Identifier: Apache-2.0
"""grouped_lora_grad_a: cases, and a bound from float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from lorakernels import ops
from lorakernels.numerics.groups import spans
from lorakernels.ops import Scaled
from tests.ops.cases.grouped_quantize_lora_down import NONE
from tests.ops.cases.lora_grad_a import bytes_of
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
    near,
    wide,
)


class GradA(NamedTuple):
    """ds [M, R] and x [M, K] of three groups."""

    k: int
    rank: int
    dtype: torch.dtype = BF16
    out: torch.dtype = FP32

    def __call__(self, m: Made) -> Arguments:
        x = Scaled(bytes_of(m.rows, self.k, m), m.rand(3) + 0.1)
        return m.randn(m.rows, self.rank, dtype=self.dtype), x, m.groups()[0], self.out


def bound(call: Call) -> Iterator[Checked]:
    """One rounding at the store; fp32 sums of a group's products, and one factor."""
    ds, x, groups, _ = call.before
    for g, own in spans(groups):
        d = ds[own].double().t()
        part = wide(Scaled(x.data[own], x.scale_inv[g : g + 1]))
        size = d.abs() @ part.abs()
        yield near("dA", call.results[0][g], d @ part, size, 2 * (part.shape[0] + 2))


CONTRACTS = (
    Contract(
        ops.grouped_lora_grad_a,
        {
            "fp8": Case(GradA(48, 3), 256),
            "fp16": Case(GradA(80, 16, FP16, FP16), 256),
            "fp32": Case(GradA(48, 3, FP32), 256, why_not="ds is torch.float32"),
        },
        bound,
        {
            "1024x1000 r16": Case(GradA(1000, 16, out=BF16), 1024),
            "512x528 r128": Case(GradA(528, 128), 512),
        },
        {
            "ds": torch.zeros(0, 2),
            "x": Scaled(torch.zeros(0, 8, dtype=UINT8), torch.ones(3)),
            "groups": NONE,
            "out_dtype": FP32,
        },
        {
            "x": Refusal(
                {"x": Scaled(torch.zeros(5, 8, dtype=UINT8), torch.ones(3))},
                ValueError,
                r"x must be \[0, K\], found \[5, 8\]",
            ),
            "scales": Refusal(
                {"x": Scaled(torch.zeros(0, 8, dtype=UINT8), torch.ones(2))},
                ValueError,
                r"x_scale_inv must be \[3\] on cpu, found \[2\]",
            ),
        },
    ),
)
