# SPDX-License-Identifier: Apache-2.0
"""float64 references and error measures shared by the tests."""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import LoRALinear
from lorakernels.numerics.blocks import dequantize_rows, quantize_rows
from lorakernels.numerics.dropout import keep_scale
from lorakernels.numerics.fp8 import FP8_MAX, amax_of, quantize_fp8, scale_of

EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def error_in_eps(found: Tensor, exact: Tensor, size: Tensor, eps: float) -> float:
    """‖found − exact‖ ÷ (eps · ‖size‖), `size` being the sum of the magnitudes that were added up; 0 if all is zero."""
    assert found.shape == exact.shape, (found.shape, exact.shape)
    error = (found.detach().double().cpu() - exact.cpu()).norm()
    norm = size.cpu().norm() * eps
    return float(error / norm) if norm > 0 else float(error)


def exact_lora(
    layer: LoRALinear, x: Tensor, dy: Tensor, keep: Tensor | None, p: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """{name: (value, size)} of y, dx, dA, dB, dbias in float64, by the formulas of autograd/linear/lora_linear.py.

    They take the values that the kernels see.

    x and dy pass through FP8 with the layer's own scales where the base (and dA) read them. `size` is the
    same formula with the magnitudes of everything that was rounded before, plus the value: rounding s by
    half an eps moves y by at most eps/2 · |s||B|, however much of y cancels. A sum of n terms in fp32 errs by up to
    n 2^-24 of their magnitudes, which `size` holds in units of the least eps that a test takes, EPS + 1e-5.
    """
    x, dy = x.detach().flatten(0, -2), dy.detach().flatten(0, -2)
    w = layer.dequantized_weight().double()
    a, b = (t.detach().to(x.dtype).double() for t in (layer.lora_A, layer.lora_B))
    factor = 1.0 if keep is None else keep_scale(p)
    mask = torch.ones_like(x, dtype=torch.bool) if keep is None else keep
    x8, dy8, dy = x.double(), dy.double(), dy.double()
    state, column = layer.fp8_state, layer.column
    if state is not None:
        x8 = through_fp8(x, torch.float8_e4m3fn, state.forward[-1, column])
        dy8 = through_fp8(dy, state.recipe.backward_dtype, state.backward[-1, column])
    if (blocks := layer.block_scaling) is not None:
        how = blocks.power_2_scale
        x8 = dequantize_rows(quantize_rows(x, torch.float8_e4m3fn, how)).double()
        fmt = blocks.backward_dtype
        dy8 = dequantize_rows(quantize_rows(dy.to(x.dtype), fmt, how), fmt).double()
    xd, xd8 = (torch.where(mask, t, 0.0) * factor for t in (x.double(), x8))
    s, ds = xd @ a.t(), layer.scaling * dy @ b
    unit = 2.0**-24 / (EPS[x.dtype] + 1e-5)
    over_k, over_n = unit * x.shape[1], unit * dy.shape[1]
    branch = torch.where(mask, ds @ a, 0.0) * factor
    bias = 0.0 if layer.bias is None else layer.bias.detach().double()
    scaling = abs(layer.scaling)
    size_s = s.abs() + over_k * (xd.abs() @ a.abs().t())
    size_ds = ds.abs() + over_n * (scaling * dy.abs() @ b.abs())
    size_y = scaling * size_s @ b.abs().t() + over_k * (x8.abs() @ w.abs().t())
    size_dx = torch.where(mask, size_ds @ a.abs(), 0.0) * factor + over_n * (dy8.abs() @ w.abs())
    values = {
        "y": (x8 @ w.t() + layer.scaling * s @ b.t() + bias, size_y),
        "dx": (dy8 @ w + branch, size_dx),
        "dA": (ds.t() @ xd8, size_ds.t() @ xd8.abs()),
        "dB": (layer.scaling * dy.t() @ s, scaling * dy.abs().t() @ size_s),
        "dbias": (dy.sum(0), dy.abs().sum(0)),
    }
    return {name: (value, value.abs() + rounded) for name, (value, rounded) in values.items()}


def through_fp8(x: Tensor, dtype: torch.dtype, scale: Tensor | float = 0.0) -> Tensor:
    """x quantized and back, in float64; with scale 0 by its own amax, as before a first update."""
    scale = torch.as_tensor(scale, device=x.device)
    if float(scale) == 0.0:
        scale = scale_of(amax_of(x), FP8_MAX[dtype])
    return quantize_fp8(x, scale, dtype).double() / scale.double()
