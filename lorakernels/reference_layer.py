# SPDX-License-Identifier: Apache-2.0
"""A decoder layer's ops between its GEMMs and a model's loss, in plain PyTorch; the conventions are reference.py's.

    RMSNorm   rstd = 1 / √(mean(x²) + ε)        normed = weight ⊙ (x · rstd)
              dx = dresidual + rstd · (g − h · mean(g ⊙ h)),   g = dnormed ⊙ weight,   h = x · rstd
              dweight = Σ_rows dnormed ⊙ h
    SwiGLU    act = silu(gate) ⊙ up         silu(g) = g σ(g)
              dup = dact ⊙ silu(gate)       dgate = dact ⊙ up ⊙ σ (1 + gate (1 − σ))

    x, normed [M, K]   gate_up [M, 2F] = gate | up   act [M, F]

fp32 arithmetic, one rounding when a result is stored; RMSNorm rounds h as well before it multiplies by the weight, as
Transformers' LlamaRMSNorm does. What is quantized is the result as stored: x8 is `reference.quantize` of normed, a8 of
act, d8 of dgate_up, bit for bit, whether that is kept or not.

gate_up may be kept in e4m3 until backward: 256 columns of a row of gate and those of up share a scale, that of their
amax, so that one pass over them computes act and leaves their bytes as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import checks_layer
from lorakernels.reference import (
    E4M3,
    FP8_MAX,
    quantize,
    quantize_fp8,
    scale_of,
    scale_that_tells,
)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    state: Tensor | None,
    column: int,
    delayed: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normed [M, K] or empty unless `keep`, x8 [M, K] and scale_inv [1] or empty without a state, rstd fp32 [M]).

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    checks_layer.rms_norm(x, weight, state)
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    h = (wide * rstd).to(x.dtype)
    normed = (weight.float() * h.float()).to(x.dtype)
    x8, scale_inv = quantize(normed, state, column, delayed, E4M3)
    return normed if keep else x.new_empty(0), x8, scale_inv, rstd.view(-1)


def rms_norm_backward(
    dnormed: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dresidual: Tensor | None,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    """(dx [M, K] in x's dtype, dweight fp32 [K] or empty).

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    checks_layer.rms_norm_backward(dnormed, x, weight, rstd, dresidual)
    wide = dnormed.float()
    h = x.float() * rstd.view(-1, 1)
    g = wide * weight.float()
    dx = rstd.view(-1, 1) * (g - h * (g * h).mean(1, keepdim=True))
    if dresidual is not None:
        dx = dx + dresidual.float()
    dweight = (wide * h).sum(0) if weight_grad else torch.empty(0, device=x.device)
    return dx.to(x.dtype), dweight


def swiglu_quantize(
    gate_up: Tensor,
    gate_up_scale_inv: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    keep: bool,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(act [M, F] or empty unless `keep`, a8 [M, F] and scale_inv [1] or empty without a state).

    gate_up is in act's dtype, or e4m3 bytes as `swiglu_quantize_and_pack` returns them: act is in `out_dtype` then.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    dtype = checks_layer.swiglu(gate_up, gate_up_scale_inv, state, out_dtype)
    gate, up = _gate_up(gate_up, gate_up_scale_inv)
    act = (torch.nn.functional.silu(gate) * up).to(dtype)
    a8, scale_inv = quantize(act, state, column, delayed, E4M3)
    return act if keep else act.new_empty(0), a8, scale_inv


def swiglu_quantize_and_pack(
    gate_up: Tensor, state: Tensor | None, column: int, delayed: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `swiglu_quantize` returns of a plain gate_up, and gate_up in e4m3: bytes [M, 2F] and their scale_inv.

    scale_inv is fp32 [M, ⌈F / 256⌉]: one for 256 columns of a row of gate and those of up.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    results = swiglu_quantize(gate_up, None, state, column, delayed, keep)
    rows, scales = checks_layer.packed_scales(*gate_up.shape)
    width, padded = gate_up.shape[1] // 2, scales * checks_layer.PACKED_COLUMNS
    values = gate_up.new_zeros(rows, 2, padded)
    values[:, :, :width] = gate_up.reshape(rows, 2, width)
    values = values.view(rows, 2, scales, checks_layer.PACKED_COLUMNS)
    scale = scale_of(values.abs().amax((1, 3)).float(), FP8_MAX[E4M3])
    bytes_ = quantize_fp8(values, scale[:, None, :, None], E4M3).view(torch.uint8)
    packed = bytes_.view(rows, 2, padded)[:, :, :width].reshape(gate_up.shape)
    return *results, packed, torch.ones_like(scale) / scale


def swiglu_quantize_grad(
    dact: Tensor,
    gate_up: Tensor,
    gate_up_scale_inv: Tensor | None,
    multiplier: Tensor,
    state_dy: Tensor | None,
    column: int,
    delayed: bool,
    fp8_dtype: torch.dtype,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dgate_up [M, 2F] or empty unless `keep`, d8 [M, 2F] and scale_inv [1] or empty without a state).

    dgate_up, in dact's dtype, is dgate · multiplier[0] | dup · multiplier[1].

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    checks_layer.swiglu_grad(dact, gate_up, gate_up_scale_inv, multiplier, state_dy)
    gate, up = _gate_up(gate_up, gate_up_scale_inv)
    wide, sigmoid = dact.float(), torch.sigmoid(gate)
    dgate = wide * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = wide * (gate * sigmoid)
    dgate_up = torch.cat((dgate * multiplier[0], dup * multiplier[1]), 1).to(dact.dtype)
    d8, scale_inv = quantize(dgate_up, state_dy, column, delayed, fp8_dtype)
    scale_inv = scale_that_tells(dgate_up, scale_inv)
    return dgate_up if keep else dact.new_empty(0), d8, scale_inv


def _gate_up(gate_up: Tensor, scale_inv: Tensor | None) -> tuple[Tensor, Tensor]:
    """gate and up in fp32 [M, F]."""
    if scale_inv is None:
        gate, up = gate_up.float().chunk(2, 1)
        return gate, up
    gate, up = gate_up.view(E4M3).float().chunk(2, 1)
    factor = scale_inv.repeat_interleave(checks_layer.PACKED_COLUMNS, 1)[:, : gate.shape[1]]
    return gate * factor, up * factor
