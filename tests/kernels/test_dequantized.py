# SPDX-License-Identifier: Apache-2.0
"""FP8 operands multiplied in bf16 and fp16, without FP8 tensor cores: against float64, and when it is taken."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from lorakernels import reference
from lorakernels.kernels import dequantized

# the package's attributes of these names are the functions
fp8_linear_lora = importlib.import_module("lorakernels.kernels.fp8_linear_lora")
fp8_grad_input = importlib.import_module("lorakernels.kernels.fp8_grad_input")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.bfloat16: 0.0, torch.float16: 2.0**-25}  # half of a subnormal's step
dtypes = pytest.mark.parametrize("dtype", [*ROUNDING], ids=str)


def quantized(rows: int, columns: int, dtype: torch.dtype, size: float) -> tuple[Tensor, Tensor]:
    x = size * torch.randn(rows, columns)
    scale = reference.scale_of(reference.amax_of(x), reference.FP8_MAX[dtype])
    return reference.quantize_fp8(x, scale, dtype).view(torch.uint8), 1.0 / scale


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
    y = dequantized.linear(x, sx, w, sw, dtype)
    check(y, exact(x, sx, E4M3), exact(w, sw, E4M3).t(), dtype)


@dtypes
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("sizes", [(5, 17, 33), (64, 512, 48)], ids=str)
def test_grad_input(dtype, fp8_dtype, sizes):
    m, n, k = sizes
    (dy, sdy), (w, sw) = quantized(m, n, fp8_dtype, 0.5), quantized(n, k, E4M3, 0.02)
    dx = dequantized.grad_input(dy, sdy, fp8_dtype, w, sw, dtype)
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
    """With the capability of a GPU that is not here: what the CUDA side of both ops calls, and the rest of y and dx."""
    calls: list[str] = []
    for name in ("linear", "grad_input"):
        real = getattr(dequantized, name)

        def counted(*args, real=real, name=name):
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(dequantized, name, counted)
    for module in (fp8_linear_lora, fp8_grad_input):
        monkeypatch.setattr(module, "capability_of", lambda device: capability)
    monkeypatch.setattr("lorakernels.kernels.ladder.capability_of", lambda device: capability)
    (x, sx), (w, sw) = quantized(7, 32, E4M3, 3.0), quantized(16, 32, E4M3, 0.1)
    s, lora_b, bias = torch.randn(7, 4).to(dtype), torch.randn(16, 4), torch.randn(16)
    forward = (x, sx, w, sw, bias, s, lora_b, 0.5, dtype)
    y = fp8_linear_lora.fp8_linear_lora(*forward)
    expected = reference.fp8_linear_lora(*forward)
    (dy, sdy), lora_a = quantized(7, 16, E5M2, 0.5), torch.randn(4, 32)
    backward = (dy, sdy, E5M2, w, sw, None, s, lora_a, None, 0.0, 0, dtype)
    dx = fp8_grad_input.fp8_grad_input(*backward)
    assert calls == (["linear", "grad_input"] if taken else [])
    # four roundings of y and dx, one after each term, and those of the operands
    u = ROUNDING.get(dtype, 2.0**-20)
    for found, wanted in ((y, expected), (dx, reference.fp8_grad_input(*backward))):
        off = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
        assert off <= 8 * u
