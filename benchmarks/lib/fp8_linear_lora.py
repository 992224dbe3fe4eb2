# SPDX-License-Identifier: Apache-2.0
"""y = x8 W8ᵀ + bias + scaling · s Bᵀ by cuBLASLt and PyTorch, and how far a y is from float64's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.lib.op_checks import exact_result, head, relative_error
from lorakernels.numerics.fp8 import E4M3
from lorakernels.values import Scaled, Up, Weight

CHECKED_ROWS = 64


@dataclass
class Inputs:
    x: Scaled
    weight: Weight
    bias: Tensor
    up: Up
    out_dtype: torch.dtype = torch.bfloat16


def make_inputs(shape: str, rank: int, device: torch.device) -> Inputs:
    m, n, k = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    one = torch.ones(1, device=device)
    x, weight = (normal(*size).to(E4M3).view(torch.uint8) for size in ((m, k), (n, k)))
    bias, s = normal(n).bfloat16(), normal(m, rank).bfloat16()
    up = Up(normal(n, rank) / rank**0.5, s, 2.0)
    return Inputs(Scaled(x, one / 8), Weight(weight, one / k**0.5), bias, up)


def exact(i: Inputs, rows: int, lora: bool) -> Tensor:
    """float64, of the first `rows` rows."""
    x, s = head((i.x, i.up.s), rows)
    terms = (i.bias, i.up._replace(s=s)) if lora else (None, None)
    return exact_result("fp8_linear_lora", (x, i.weight, *terms, i.out_dtype, False, None))


def base_only(i: Inputs, bias: Tensor | None = None) -> Tensor:
    assert i.x.scale_inv is not None and i.weight.scale_inv is not None
    return torch._scaled_mm(
        i.x.data.view(E4M3),
        i.weight.data.view(E4M3).t(),
        scale_a=i.x.scale_inv,
        scale_b=i.weight.scale_inv,
        bias=bias,
        out_dtype=i.out_dtype,
        use_fast_accum=True,
    )


def pytorch(i: Inputs) -> Tensor:
    y = base_only(i, i.bias)
    lora_B, s, scaling = i.up
    assert s is not None
    return y.addmm_(s, lora_B.to(s.dtype).t(), alpha=scaling)


def error(y: Tensor, i: Inputs, lora: bool) -> float:
    expected = exact(i, min(CHECKED_ROWS, y.shape[0]), lora)
    return relative_error(y, expected)
