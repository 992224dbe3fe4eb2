# SPDX-License-Identifier: Apache-2.0
"""float64 references and error measures shared by the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels import LoRALinear, reference

EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def rel_error(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖ in float64; 0 if both are empty or zero."""
    found, exact = found.detach().double().cpu(), exact.detach().double().cpu()
    assert found.shape == exact.shape, (found.shape, exact.shape)
    norm = exact.norm()
    return float((found - exact).norm() / norm) if norm > 0 else float(found.norm())


@dataclass
class Exact:
    """y, dx, dA, dB, dbias in float64 for given x, W, x̂ (what dA reads) and dŷ (what the base's dgrad reads)."""

    y: Tensor
    dx: Tensor
    dA: Tensor
    dB: Tensor
    dbias: Tensor


def exact_lora(layer: LoRALinear, x: Tensor, dy: Tensor, keep: Tensor | None, p: float) -> Exact:
    """design.md §2 in float64 on the values the kernels see: x and dy pass through FP8 where the base reads them."""
    x, dy = x.detach().flatten(0, -2), dy.detach().flatten(0, -2)
    w = layer.dequantized_weight().double()
    dtype = x.dtype
    a, b = (t.detach().to(dtype).double() for t in (layer.lora_A, layer.lora_B))
    factor = 1.0 if keep is None else reference.keep_scale(p)
    mask = torch.ones_like(x, dtype=torch.bool) if keep is None else keep
    x8, dy8 = x.double(), dy.double()
    if layer.fp8_state is not None:
        x8 = through_fp8(x, torch.float8_e4m3fn)
        dy8 = through_fp8(dy, layer.fp8_state.recipe.backward_dtype)
    s = torch.where(mask, x.double(), 0.0) * factor @ a.t()
    ds = layer.scaling * dy.double() @ b
    y = x8 @ w.t() + layer.scaling * s @ b.t()
    if layer.bias is not None:
        y = y + layer.bias.detach().double()
    dx = dy8 @ w + torch.where(mask, ds @ a, 0.0) * factor
    dA = ds.t() @ (torch.where(mask, x8, 0.0) * factor)
    return Exact(y, dx, dA, layer.scaling * dy.double().t() @ s, dy.double().sum(0))


def through_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x quantized with its own amax and back, in float64."""
    scale = reference.scale_of(reference.amax_of(x), reference.FP8_MAX[dtype])
    return reference.quantize_fp8(x, scale, dtype).double() / scale.double()
