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
    quantized_in_blocks,
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
    """Bit for bit."""
    x, fp8, power_of_two = call.before
    yield from quantized_in_blocks("x8", x, (call.results[0], call.results[1]), fp8, power_of_two)


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
