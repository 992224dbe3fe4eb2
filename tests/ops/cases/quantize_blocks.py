# SPDX-License-Identifier: Apache-2.0
"""quantize_blocks: cases, and bytes and scales bit for bit, one block after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from lorakernels import ops
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
    same,
    same_bytes,
)


class Rows(NamedTuple):
    """x [M, K]: rows of very different sizes, one of zeros, one so small that its scale leaves fp32's range."""

    k: int
    dtype: torch.dtype = BF16
    fp8: torch.dtype = E4M3
    power_of_two: bool = False

    def __call__(self, m: Made) -> Arguments:
        sizes = torch.tensor([1.0, 1e4, 1e-3, 0.0, 3.0, 1e-38, 0.1], device=m.device)
        rows = sizes.repeat(m.rows // len(sizes) + 1)[: m.rows, None]
        x = (m.randn(m.rows, self.k) * rows).to(self.dtype)
        return x, self.fp8, self.power_of_two


def bound(call: Call) -> Iterator[Checked]:
    """Bit for bit what the recipe says of each block by itself: fp8_max / amax, rounded once, or the power below."""
    x, fp8, power_of_two = call.before
    x8, scale_inv = call.results
    most = torch.finfo(fp8).max
    for number, block in enumerate(x.float().split(128, 1)):
        amax = block.abs().amax(1)
        usable = amax.isfinite() & (amax > 0)
        scale = (torch.full_like(amax, most) / amax).clamp(max=torch.finfo(FP32).max)
        scale = torch.where(usable, scale, 1.0)
        if power_of_two:
            mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
            scale = torch.ldexp(torch.ones_like(mantissa), (exponent - 1).clamp(max=126))
        columns = slice(128 * number, 128 * number + block.shape[1])
        expected = (block * scale[:, None]).clamp(-most, most).to(fp8).view(torch.uint8)
        yield same_bytes(f"x8 of block {number}", x8[:, columns], expected, fp8)
        inverse = torch.where(amax.isfinite(), 1 / scale, torch.nan)
        yield same(f"scale_inv of block {number}", scale_inv[number], inverse)


X = torch.ones(3, 130)
CONTRACTS = (
    Contract(
        ops.quantize_blocks,
        {
            "K not a multiple": Case(Rows(200)),
            "less than a block": Case(Rows(24, FP16, E5M2)),
            "powers of two": Case(Rows(256, FP32, power_of_two=True)),
            "e5m2 powers of two": Case(Rows(136, BF16, E5M2, power_of_two=True)),
        },
        bound,
        {
            "one row": Case(Rows(128), 1),
            "4100x520": Case(Rows(520, FP16), 4100),
            "300x8192": Case(Rows(8192, BF16, E5M2), 300),
            "777x2064": Case(Rows(2064, BF16, E4M3, power_of_two=True), 777),
        },
        {"x": X, "fp8_dtype": E4M3, "power_of_two": False},
        {
            "x": Refusal({"x": torch.ones(4)}, ValueError, r"x must be a matrix, found \(4,\)"),
            "dtype": Refusal({"x": X.double()}, TypeError, "x must be float32, bfloat16 or float16, found .*64"),
            "fp8_dtype": Refusal(
                {"fp8_dtype": FP16}, TypeError, "fp8_dtype must be float8_e4m3fn or float8_e5m2, found torch.float16"
            ),
        },
    ),
)  # fmt: skip
