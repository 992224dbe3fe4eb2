# SPDX-License-Identifier: Apache-2.0
"""FP8 operands multiplied in bf16 and fp16, without FP8 tensor cores: against float64, and when it is taken."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.numerics.fp8 import FP8_MAX, amax_of, quantize_fp8, scale_of
from lorakernels.numerics.products import dequantized_grad_input, dequantized_linear
from lorakernels.values import Scaled, Up, Weight

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.bfloat16: 0.0, torch.float16: 2.0**-25}  # half of a subnormal's step
dtypes = pytest.mark.parametrize("dtype", [*ROUNDING], ids=str)


def quantized(rows: int, columns: int, dtype: torch.dtype, size: float) -> tuple[Tensor, Tensor]:
    x = size * torch.randn(rows, columns)
    scale = scale_of(amax_of(x), FP8_MAX[dtype])
    return quantize_fp8(x, scale, dtype).view(torch.uint8), 1.0 / scale


def exact(x: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    return x.view(dtype).double() * scale_inv.double().view(-1, 1)


def check(y: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    """|y − a b| ≤ (2 u + u²) |a| |b| for the operands' rounding, K 2⁻²⁴ |a| |b| for fp32 sums, u |y| for the store."""
    assert y.dtype == dtype and y.shape == (a.shape[0], b.shape[1])
    u, tiny, k = ROUNDING[dtype], SMALLEST[dtype], a.shape[1]
    size = a.abs() @ b.abs()
    bound = (2 * u + u * u + (k + 2) * 2.0**-24) * size + 2 * u * (a @ b).abs()
    bound += tiny * (a.abs().sum(1, keepdim=True) + b.abs().sum(0) + 2)
    error = (y.double() - a @ b).abs()
    assert bool((error <= bound).all()), float((error / bound).max())


@dtypes
@pytest.mark.parametrize("by_row", [False, True], ids=["one scale", "a scale a row"])
@pytest.mark.parametrize("sizes", [(5, 17, 33), (64, 48, 512), (0, 16, 16)], ids=str)
def test_linear(dtype, by_row, sizes):
    m, n, k = sizes
    (x, sx), (w, sw) = quantized(m, k, E4M3, 3.0), quantized(n, k, E4M3, 0.02)
    if by_row:
        sw = sw * torch.rand(n).add(0.5)
    y = dequantized_linear(Scaled(x, sx), Weight(w, sw), dtype)
    check(y, exact(x, sx, E4M3), exact(w, sw, E4M3).t(), dtype)


@dtypes
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("sizes", [(5, 17, 33), (64, 512, 48)], ids=str)
def test_grad_input(dtype, fp8_dtype, sizes):
    m, n, k = sizes
    (dy, sdy), (w, sw) = quantized(m, n, fp8_dtype, 0.5), quantized(n, k, E4M3, 0.02)
    dx = dequantized_grad_input(Scaled(dy, sdy), fp8_dtype, Weight(w, sw), dtype)
    check(dx, exact(dy, sdy, fp8_dtype), exact(w, sw, E4M3), dtype)


@pytest.mark.parametrize(
    ("capability", "dtype", "taken"),
    [
        ((8, 0), torch.bfloat16, True),
        ((8, 0), torch.float16, True),
        ((8, 0), torch.float32, False),
        ((7, 5), torch.bfloat16, False),
    ],
    ids=["A100 bf16", "A100 fp16", "A100 fp32", "no bf16 tensor cores"],
)
def test_the_ops_take_it_by_capability(monkeypatch, capability, dtype, taken):
    """With the capability of a GPU that is not here: what both ops run on CUDA, and the rest of y and dx."""
    for op in (ops.fp8_linear_lora, ops.fp8_grad_input):
        module = sys.modules[op.reference.__module__]
        monkeypatch.setattr(module, "capability_of", lambda device: capability)
    x, weight = (Scaled(*quantized(7, 32, E4M3, 3.0)), Weight(*quantized(16, 32, E4M3, 0.1)))
    s, lora_b, bias = torch.randn(7, 4).to(dtype), torch.randn(16, 4), torch.randn(16)
    dy, lora_a = Scaled(*quantized(7, 16, E5M2, 0.5)), torch.randn(4, 32)
    calls = {
        ops.fp8_linear_lora: (x, weight, bias, Up(lora_b, s, 0.5), dtype),
        ops.fp8_grad_input: (dy, E5M2, weight, s, lora_a, None, dtype),
    }
    # four roundings of y and dx, one after each term, and those of the operands
    u = ROUNDING.get(dtype, 2.0**-20)
    for op, arguments in calls.items():
        assert op.takes(*arguments).name == ("dequantized" if taken else "torch")
        found, wanted = op.run(*arguments), op.by_reference(*arguments)
        off = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
        assert off <= 8 * u
