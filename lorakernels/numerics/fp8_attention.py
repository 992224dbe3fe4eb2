# SPDX-License-Identifier: Apache-2.0
"""Causal attention in FP8 forward and 16 bits backward, in plain PyTorch: what kernels/cudnn computes on a GPU.

    q8 = sat(q · s_q)   k8, v8 likewise      s = 2^⌊log₂(448 / amax)⌋ of each tensor, 1 where amax is 0
    P  = exp(S − max S), S = scale q̂ k̂ᵀ     q̂ = q8 / s_q, which bf16 holds exactly, as s is a power of two
    o8 = sat((P8 v8 / Σ P) · s_v / (448 s_v))  P8 = e4m3(448 P)     stats = log Σ exp S
    backward of q̂, k̂, v̂ with ô = o8 / s_v and stats:
    P = exp(S − stats)   dS = P ⊙ (dO v̂ᵀ − Σ dO ⊙ ô)   dq = scale dS k̂   dk = scale dSᵀ q̂   dv = Pᵀ dO

Rows of P sum to 1, so that |o| ≤ max |v̂|: s_v, the scale of v, saturates no element of o. Backward reads the same q̂, k̂
and v̂ as stats belong to. With q, k and v as they were before, the rows of exp(S − stats) would not sum to 1.

Factors are one fp32 tensor [FACTORS, 4] on the device: a factor in the first column, 16 bytes from the next one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.numerics.fp8 import E4M3, FP8_MAX, amax_of, quantize_fp8

# 1 / s of q, k, v and P; P's and o's scale; 1 / s of o
OF_Q, OF_K, OF_V, OF_P, TO_P, TO_OUT, OF_OUT = range(7)
FACTORS = 7
P_SCALE = FP8_MAX[E4M3]  # P is at most 1
LEAST, MOST = -126, 126  # of the exponents of s, so that 1 / s is no subnormal


def power_of_two_scale(amax: Tensor) -> Tensor:
    """fp32: the largest power of two s for which amax · s ≤ 448; 1 where amax is 0, inf or NaN."""
    usable = amax.isfinite() & (amax > 0)
    mantissa, exponent = torch.frexp(torch.where(usable, amax, 1.0))  # amax = m 2^e, ½ ≤ m < 1
    power = 9 - exponent - (mantissa > 0.875).int()  # 448 = 0.875 · 2⁹
    scale = torch.ldexp(torch.ones_like(amax), power.clamp(LEAST, MOST))
    return torch.where(usable, scale, 1.0)


def quantize_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes, factors) of q [B, H, T, D], k and v [B, Hk, T, D]: e4m3 as uint8 [B, T, H + 2 Hk, D], fp32 [FACTORS, 4].

    If one of the amaxes is inf or NaN, 1 / s of that tensor and of o are NaN, since e4m3 has no inf.
    """
    amaxes = [amax_of(x) for x in (q, k, v)]
    scales = [power_of_two_scale(amax) for amax in amaxes]
    finite = [torch.where(amax.isfinite(), 1.0, torch.nan) for amax in amaxes]
    parts = [quantize_fp8(x, s, E4M3) for x, s in zip((q, k, v), scales, strict=True)]
    data = torch.cat([part.view(torch.uint8).transpose(1, 2) for part in parts], 2).contiguous()
    factors = torch.zeros(FACTORS, 4, device=q.device)
    for row, scale, one in zip((OF_Q, OF_K, OF_V), scales, finite, strict=True):
        factors[row, 0] = (one / scale)[0]
    factors[OF_P, 0], factors[TO_P, 0], factors[TO_OUT, 0] = 1 / P_SCALE, P_SCALE, scales[2][0]
    factors[OF_OUT, 0] = (finite[0] * finite[1] * finite[2] / scales[2])[0]
    return data, factors


def dequantize_heads(
    data: Tensor, factors: Tensor, heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q̂ [B, H, T, D], k̂ and v̂ [B, Hk, T, D] of `quantize_heads`' result, as views of one matrix."""
    kv = (data.shape[2] - heads) // 2
    rows = factors.new_tensor([OF_Q] * heads + [OF_K] * kv + [OF_V] * kv).long()
    wide = (data.view(E4M3).float() * factors[rows, 0].view(1, 1, -1, 1)).to(dtype)
    q, k, v = (part.transpose(1, 2) for part in wide.split([heads, kv, kv], 2))
    return q, k, v


def dequantize_out(o8: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """ô [B, T, H, D] of o8 uint8 [B, T, H, D]."""
    return (o8.view(E4M3).float() * factors[OF_OUT, 0]).to(dtype)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """S [B, H, T, T], -inf where a token may not look."""
    scores = q @ _repeated(k, q.shape[1]).transpose(2, 3) * scale
    later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf)


def attention_fp8(data: Tensor, factors: Tensor, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """(o8 as uint8 [B, T, H, D], stats fp32 [B, H, T]) of `quantize_heads`' result."""
    q, k, v = dequantize_heads(data, factors, heads, torch.float32)
    scores = _scores(q, k, scale)
    stats = scores.logsumexp(-1)
    most = scores.amax(-1, keepdim=True)
    p = (scores - most).exp()
    p8 = quantize_fp8(p, factors[TO_P, :1], E4M3).float() * factors[OF_P, 0]
    out = p8 @ _repeated(v, heads) / p.sum(-1, keepdim=True)
    o8 = quantize_fp8(out.transpose(1, 2).contiguous(), factors[TO_OUT, :1], E4M3)
    return o8.view(torch.uint8), stats


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, dout: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [B, H, T, D], dk and dv [B, Hk, T, D], in the dtype of q; all with the tokens in the third place."""
    groups = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1], *q.shape[2:])
    p = (_scores(q, k, scale) - stats[..., None].to(q.dtype)).exp()
    dp = dout @ _repeated(v, q.shape[1]).transpose(2, 3)
    ds = p * (dp - (dout * out).sum(-1, keepdim=True))
    dq = scale * ds @ _repeated(k, q.shape[1])
    dk = (scale * ds.transpose(2, 3) @ q).view(groups).sum(2)
    dv = (p.transpose(2, 3) @ dout).view(groups).sum(2)
    return dq, dk, dv
