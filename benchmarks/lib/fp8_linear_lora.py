# SPDX-License-Identifier: Apache-2.0
"""y = x8 W8ᵀ + bias + scaling · s Bᵀ by cuBLASLt and PyTorch, and how far a y is from float64's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.lib.op_checks import relative_error
from lorakernels import reference

CHECKED_ROWS = 64


@dataclass
class Inputs:
    x: Tensor
    x_scale_inv: Tensor
    weight: Tensor
    weight_scale_inv: Tensor
    bias: Tensor
    s: Tensor
    lora_B: Tensor
    scaling: float = 2.0
    out_dtype: torch.dtype = torch.bfloat16

    def all(self) -> tuple:  # type: ignore[type-arg]
        return tuple(vars(self).values())

    def base(self) -> tuple:  # type: ignore[type-arg]
        return *self.all()[:4], None, None, None, 1.0, self.out_dtype


def make_inputs(shape: str, rank: int, device: torch.device) -> Inputs:
    m, n, k = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    one = torch.ones(1, device=device)
    x, weight = (normal(*size).to(reference.E4M3).view(torch.uint8) for size in ((m, k), (n, k)))
    bias, s = normal(n).bfloat16(), normal(m, rank).bfloat16()
    return Inputs(x, one / 8, weight, one / k**0.5, bias, s, normal(n, rank) / rank**0.5)


def exact(i: Inputs, rows: int, lora: bool) -> Tensor:
    """float64, of the first `rows` rows."""
    x, w = i.x[:rows].view(reference.E4M3).double(), i.weight.view(reference.E4M3).double()
    y = (x @ w.t()) * i.x_scale_inv.double() * i.weight_scale_inv.double()
    if lora:
        y += i.scaling * (i.s[:rows].double() @ i.lora_B.to(i.s.dtype).double().t())
        y += i.bias.double()
    return y


def base_only(i: Inputs, bias: Tensor | None = None) -> Tensor:
    return torch._scaled_mm(
        i.x.view(reference.E4M3),
        i.weight.view(reference.E4M3).t(),
        scale_a=i.x_scale_inv,
        scale_b=i.weight_scale_inv,
        bias=bias,
        out_dtype=i.out_dtype,
        use_fast_accum=True,
    )


def pytorch(i: Inputs) -> Tensor:
    y = base_only(i, i.bias)
    return y.addmm_(i.s, i.lora_B.to(i.s.dtype).t(), alpha=i.scaling)


def error(y: Tensor, i: Inputs, lora: bool) -> float:
    expected = exact(i, min(CHECKED_ROWS, y.shape[0]), lora)
    return relative_error(y, expected)
