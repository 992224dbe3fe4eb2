# SPDX-License-Identifier: Apache-2.0
"""q, k and v to e4m3 bytes with one scale each, and back (numerics/fp8_attention.py has the formulas).

    amax of each      reads 2 bytes an element, writes 3 numbers
    q8, k8, v8        reads 2 bytes an element and writes 1, all three tensors in one matrix [B T, H + 2 Hk, D]
    q̂, k̂, v̂ or ô     reads 1 byte an element and writes 2

No number reaches the host, so that a captured graph serves all of them. A program takes some tokens of one head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels.triton.launch import launch
from lorakernels.kernels.triton.quantize import (
    decode_e4m3,
    encode,
    is_native,
    magnitude_bits,
    raise_amax,
)
from lorakernels.numerics import fp8_attention as numerics

TOKENS = 64  # of a program
WARPS = 4

_INF = tl.constexpr(0x7F800000)
_OF_P, _TO_P = tl.constexpr(numerics.OF_P), tl.constexpr(numerics.TO_P)
_TO_OUT, _OF_OUT = tl.constexpr(numerics.TO_OUT), tl.constexpr(numerics.OF_OUT)
_P_SCALE = tl.constexpr(numerics.P_SCALE)
_LEAST, _MOST = tl.constexpr(numerics.LEAST), tl.constexpr(numerics.MOST)


@triton.jit
def _power(bits: tl.tensor) -> tl.tensor:
    """log₂ of `power_of_two_scale` of an amax's bits: 448 is 1.75 · 2⁸."""
    usable = (bits > 0) & (bits < _INF)
    exponent = 8 - ((bits >> 23) - 127) - tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
    # the exponent of a subnormal is below -126, and the clamp makes it the same
    return tl.where(usable, tl.minimum(tl.maximum(exponent, _LEAST), _MOST), 0)


@triton.jit
def _two_to(power: tl.tensor) -> tl.tensor:
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _read(
    x: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
) -> tl.tensor:
    """fp32 [TOKENS, D] of x [B, H, T, D]: one head of the tokens `row`."""
    batch, token = (row // T).to(tl.int64), (row % T).to(tl.int64)
    offset = batch * batch_stride + token * token_stride + tl.cast(head, tl.int64) * head_stride
    i = tl.arange(0, D)
    return tl.load(x + offset[:, None] + i[None, :], inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def _head_of_three(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    q_token: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_token: tl.tensor,
    v_batch: tl.tensor,
    v_head: tl.tensor,
    v_token: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    T: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    head = tl.program_id(1)
    if head < HEADS:
        x = _read(q, q_batch, q_head, q_token, head, row, inside, T, D)
    elif head < HEADS + KV_HEADS:
        x = _read(k, k_batch, k_head, k_token, head - HEADS, row, inside, T, D)
    else:
        x = _read(v, v_batch, v_head, v_token, head - HEADS - KV_HEADS, row, inside, T, D)
    return x


@triton.jit(do_not_specialize=["M", "T"])
def _amax_kernel(
    amaxes: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    q_token: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_token: tl.tensor,
    v_batch: tl.tensor,
    v_head: tl.tensor,
    v_token: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    x = _head_of_three(
        q, k, v, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
        row, row < M, T, HEADS, KV_HEADS, D,
    )  # fmt: skip
    head = tl.program_id(1)
    which = tl.where(head < HEADS, 0, tl.where(head < HEADS + KV_HEADS, 1, 2))
    raise_amax(amaxes + which, magnitude_bits(tl.reshape(tl.abs(x), (TOKENS * D,))))


@triton.jit(do_not_specialize=["M", "T"])
def _quantize_kernel(
    data: tl.tensor,
    factors: tl.tensor,
    amaxes: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    q_token: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_token: tl.tensor,
    v_batch: tl.tensor,
    v_head: tl.tensor,
    v_token: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = row < M
    x = _head_of_three(
        q, k, v, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
        row, inside, T, HEADS, KV_HEADS, D,
    )  # fmt: skip
    head = tl.program_id(1)
    which = tl.where(head < HEADS, 0, tl.where(head < HEADS + KV_HEADS, 1, 2))
    bits = tl.load(amaxes.to(tl.pointer_type(tl.int32), bitcast=True) + which)
    offset = row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D) + head * D
    x8 = encode(x * _two_to(_power(bits)), False, NATIVE)
    tl.store(data + offset[:, None] + tl.arange(0, D)[None, :], x8, inside[:, None])
    if (tl.program_id(0) == 0) & (head == 0):
        i = tl.arange(0, 4)
        three = tl.load(amaxes.to(tl.pointer_type(tl.int32), bitcast=True) + i, i < 3, other=0)
        nan = float("nan")
        tl.store(factors + i * 4, tl.where(three < _INF, _two_to(-_power(three)), nan), i < 3)
        of_v = _power(tl.max(tl.where(i == 2, three, 0), 0))
        tl.store(factors + _OF_P * 4, 1.0 / _P_SCALE)
        tl.store(factors + _TO_P * 4, _P_SCALE)
        tl.store(factors + _TO_OUT * 4, _two_to(of_v))
        tl.store(
            factors + _OF_OUT * 4, tl.where(tl.max(three, 0) < _INF, _two_to(-of_v), float("nan"))
        )


@triton.jit(do_not_specialize=["M"])
def _dequantize_kernel(
    to: tl.tensor,
    data: tl.tensor,
    factors: tl.tensor,
    M: tl.tensor,
    FIRST: tl.constexpr,
    Q_END: tl.constexpr,
    K_END: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    which = FIRST + tl.where(head < Q_END, 0, tl.where(head < K_END, 1, 2))
    offset = row.to(tl.int64) * (HEADS * D) + head * D
    offset = offset[:, None] + tl.arange(0, D)[None, :]
    inside = (row < M)[:, None]
    x = decode_e4m3(tl.load(data + offset, inside, other=0), NATIVE) * tl.load(factors + which * 4)
    tl.store(to + offset, x.to(to.dtype.element_ty), inside)


def quantize_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`numerics.fp8_attention.quantize_heads` of tensors with any strides whose last one is 1. D is a power of two."""
    batch, heads, tokens, dim = q.shape
    kv_heads, m = k.shape[1], batch * tokens
    every = heads + 2 * kv_heads
    data = torch.empty(batch, tokens, every, dim, dtype=torch.uint8, device=q.device)
    factors = torch.empty(numerics.FACTORS, 4, dtype=torch.float32, device=q.device)
    amaxes = torch.zeros(4, dtype=torch.float32, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "D": dim, "TOKENS": TOKENS, "num_warps": WARPS}
    grid = (max(1, triton.cdiv(m, TOKENS)), every)
    launch(_amax_kernel, grid, amaxes, q, k, v, m, tokens, *strides, **sizes)
    launch(
        _quantize_kernel,
        grid,
        data,
        factors,
        amaxes,
        q,
        k,
        v,
        m,
        tokens,
        *strides,
        NATIVE=is_native(q.device),
        **sizes,
    )
    return data, factors


def _dequantized(
    data: Tensor, factors: Tensor, dtype: torch.dtype, which: tuple[int, int, int]
) -> Tensor:
    batch, tokens, every, dim = data.shape
    to = torch.empty(data.shape, dtype=dtype, device=data.device)
    first, q_end, k_end = which
    launch(
        _dequantize_kernel,
        (max(1, triton.cdiv(batch * tokens, TOKENS)), every),
        to,
        data,
        factors,
        batch * tokens,
        FIRST=first,
        Q_END=q_end,
        K_END=k_end,
        HEADS=every,
        D=dim,
        TOKENS=TOKENS,
        NATIVE=is_native(data.device),
        num_warps=WARPS,
    )
    return to


def dequantize_heads(
    data: Tensor, factors: Tensor, heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`numerics.fp8_attention.dequantize_heads`."""
    kv = (data.shape[2] - heads) // 2
    whole = _dequantized(data, factors, dtype, (numerics.OF_Q, heads, heads + kv))
    q, k, v = (part.transpose(1, 2) for part in whole.split([heads, kv, kv], 2))
    return q, k, v


def dequantize_out(o8: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """ô [B, T, H, D] of o8 uint8 [B, T, H, D]."""
    heads = o8.shape[2]
    return _dequantized(o8, factors, dtype, (numerics.OF_OUT, heads, heads))
