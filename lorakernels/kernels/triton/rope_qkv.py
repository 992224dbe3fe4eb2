# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels behind ops/rope_qkv.py: a program turns some heads of one token, both halves of each in registers.

The backward kernel takes no part in early launches. Attention's backward in front of it lets no kernel start early. Its
own many short programs take longer while those of the next kernel wait on the GPU (docs/facts.md, H17).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels import tune_layer as tune
from lorakernels.kernels.triton import quantize
from lorakernels.kernels.triton.launch import launch
from lorakernels.kernels.triton.quantize import (
    Quantized,
    begin,
    encode,
    narrowed,
    quantized,
    scale_of_block,
    spread,
)
from lorakernels.numerics.blocks import BLOCK as SCALED
from lorakernels.numerics.fp8 import E4M3

_SCALED = tl.constexpr(SCALED)  # columns of a block


@triton.jit
def _angles(
    cos: tl.tensor, sin: tl.tensor, row: tl.tensor, HALF: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """cos and sin of both halves, fp32 [1, BLOCK] each."""
    i = tl.arange(0, BLOCK)
    offset = tl.cast(row, tl.int64) * (2 * HALF) + i
    c1 = tl.load(cos + offset, i < HALF, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos + HALF + offset, i < HALF, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + offset, i < HALF, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin + HALF + offset, i < HALF, other=0.0).to(tl.float32)[None, :]
    return c1, c2, s1, s2


@triton.jit(do_not_specialize=["T"])
def _rope_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    stride: tl.tensor,
    T: tl.tensor,
    TURNED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin(False, False, OVERLAP)
    c1, c2, s1, s2 = _angles(cos, sin, tl.program_id(0) % T, HALF, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, BLOCK)
    inside = (head < TURNED)[:, None] & (i < HALF)[None, :]
    pair = qkv + row * stride + (head[:, None] * (2 * HALF) + i[None, :])
    x1 = tl.load(pair, inside, other=0.0).to(tl.float32)
    x2 = tl.load(pair + HALF, inside, other=0.0).to(tl.float32)
    tl.store(pair, (x1 * c1 - x2 * s1).to(qkv.dtype.element_ty), inside)
    tl.store(pair + HALF, (x2 * c2 + x1 * s2).to(qkv.dtype.element_ty), inside)


def rope_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    config: tune.HeadConfig | None = None,
) -> None:
    """`ops.rope_qkv_` of what its `why_not_triton` has nothing against."""
    turned = num_heads + num_kv_heads
    half = cos.shape[1] // 2
    block = triton.next_power_of_2(half)
    config = config or tune.rope_config(block, triton.next_power_of_2(turned))
    early = quantize.overlaps(qkv.device)
    launch(
        _rope_kernel,
        (qkv.shape[0], triton.cdiv(turned, config.heads)),
        qkv,
        cos,
        sin,
        qkv.stride(0),
        cos.shape[0],
        TURNED=turned,
        HALF=half,
        BLOCK=block,
        HEADS=config.heads,
        OVERLAP=early,
        num_warps=config.num_warps,
        **quantize.launch_options(early),
    )


@triton.jit
def _turn_back(
    to: tl.tensor,
    d: tl.tensor,
    head_stride: tl.tensor,
    first: tl.tensor,
    factor: tl.tensor,
    c1: tl.tensor,
    c2: tl.tensor,
    s1: tl.tensor,
    s2: tl.tensor,
    to8: tl.tensor,
    scale_inv: tl.tensor,
    M: tl.tensor,
    COUNT: tl.constexpr,
    TURN: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    E5M2: tl.constexpr,
    FP8_MAX: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """Heads first … first + HEADS of the COUNT that d [heads, D] has, times factor, to the same heads of `to`.

    IN_BLOCKS: their bytes go to `to8`, and the scale_inv of each 128 columns to `scale_inv`, M apart.
    """
    head = first + tl.arange(0, HEADS)
    i = tl.arange(0, BLOCK)
    inside = (head < COUNT)[:, None] & (i < HALF)[None, :]
    source = d + head.to(tl.int64)[:, None] * head_stride + i[None, :]
    d1 = tl.load(source, inside, other=0.0).to(tl.float32)
    d2 = tl.load(source + HALF, inside, other=0.0).to(tl.float32)
    if TURN:
        x1 = d1 * c1 + d2 * s2
        x2 = d2 * c2 - d1 * s1
    else:
        x1 = d1
        x2 = d2
    offset = head[:, None] * (2 * HALF) + i[None, :]
    n1 = narrowed(x1 * factor, to.dtype.element_ty, NATIVE)
    n2 = narrowed(x2 * factor, to.dtype.element_ty, NATIVE)
    tl.store(to + offset, n1, inside)
    tl.store(to + offset + HALF, n2, inside)
    if IN_BLOCKS:
        x1 = n1.to(tl.float32)
        x2 = n2.to(tl.float32)
        bits1 = tl.max(tl.abs(x1).to(tl.int32, bitcast=True), 1)
        bits2 = tl.max(tl.abs(x2).to(tl.int32, bitcast=True), 1)
        if HALF == _SCALED:
            scale1, inverse1 = scale_of_block(bits1, FP8_MAX, POWER_OF_TWO)
            scale2, inverse2 = scale_of_block(bits2, FP8_MAX, POWER_OF_TWO)
            block_at = scale_inv + (2 * head) * M
            tl.store(block_at, inverse1, head < COUNT)
            tl.store(block_at + M, inverse2, head < COUNT)
        else:
            TOGETHER: tl.constexpr = _SCALED // (2 * HALF)  # heads of a block
            bits = tl.reshape(tl.maximum(bits1, bits2), (HEADS // TOGETHER, TOGETHER))
            scale, inverse = scale_of_block(tl.max(bits, 1), FP8_MAX, POWER_OF_TWO)
            scale1 = spread(scale, HEADS, TOGETHER)
            scale2 = scale1
            block = first // TOGETHER + tl.arange(0, HEADS // TOGETHER)
            tl.store(scale_inv + block * M, inverse, block < COUNT // TOGETHER)
        tl.store(to8 + offset, encode(x1 * scale1[:, None], E5M2, NATIVE), inside)
        tl.store(to8 + offset + HALF, encode(x2 * scale2[:, None], E5M2, NATIVE), inside)


@triton.jit(do_not_specialize=["M", "T", "T_angles"])
def _rope_backward_kernel(
    dqkv: tl.tensor,
    dq: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    multiplier: tl.tensor,
    d8: tl.tensor,
    scale_inv: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    T_angles: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    q_token: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_token: tl.tensor,
    v_batch: tl.tensor,
    v_head: tl.tensor,
    v_token: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    E5M2: tl.constexpr,
    FP8_MAX: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    # divided in 32 bits: in 64 it takes a subroutine
    batch = tl.cast(tl.program_id(0) // T, tl.int64)
    token = tl.cast(tl.program_id(0) % T, tl.int64)
    c1, c2, s1, s2 = _angles(cos, sin, tl.program_id(0) % T_angles, HALF, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    offset = row * ((Q_HEADS + 2 * KV_HEADS) * 2 * HALF)
    M_wide = tl.cast(M, tl.int64)
    scaled = scale_inv + row
    q_blocks: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    kv_blocks: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    block = tl.program_id(1)
    if block < q_blocks:
        d = dq + batch * q_batch + token * q_token
        m = tl.load(multiplier)
        first = block * HEADS
        _turn_back(
            dqkv + offset, d, q_head, first, m, c1, c2, s1, s2, d8 + offset, scaled, M_wide,
            Q_HEADS, True, HALF, BLOCK, HEADS, IN_BLOCKS, POWER_OF_TWO, E5M2, FP8_MAX, NATIVE,
        )  # fmt: skip
    elif block < q_blocks + kv_blocks:
        d = dk + batch * k_batch + token * k_token
        m = tl.load(multiplier + 1)
        offset += Q_HEADS * 2 * HALF
        scaled += Q_HEADS * 2 * HALF // _SCALED * M_wide
        first = (block - q_blocks) * HEADS
        _turn_back(
            dqkv + offset, d, k_head, first, m, c1, c2, s1, s2, d8 + offset, scaled, M_wide,
            KV_HEADS, True, HALF, BLOCK, HEADS, IN_BLOCKS, POWER_OF_TWO, E5M2, FP8_MAX, NATIVE,
        )  # fmt: skip
    else:
        d = dv + batch * v_batch + token * v_token
        m = tl.load(multiplier + 2)
        offset += (Q_HEADS + KV_HEADS) * 2 * HALF
        scaled += (Q_HEADS + KV_HEADS) * 2 * HALF // _SCALED * M_wide
        first = (block - q_blocks - kv_blocks) * HEADS
        _turn_back(
            dqkv + offset, d, v_head, first, m, c1, c2, s1, s2, d8 + offset, scaled, M_wide,
            KV_HEADS, False, HALF, BLOCK, HEADS, IN_BLOCKS, POWER_OF_TWO, E5M2, FP8_MAX, NATIVE,
        )  # fmt: skip


def rope_qkv_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    multiplier: Tensor,
    config: tune.HeadConfig | None = None,
) -> Tensor:
    """`ops.rope_qkv_backward` of what its `why_not_triton_backward` has nothing against."""
    rows, cols = dq.shape[0] * dq.shape[2], (dq.shape[1] + 2 * dk.shape[1]) * dq.shape[3]
    dqkv = dq.new_empty(rows, cols)
    target = quantized((rows, cols), dq, None, E4M3)
    _launch_backward(dqkv, target, (dq, dk, dv), (cos, sin), multiplier, config)
    return dqkv


def rope_qkv_backward_quantize(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    multiplier: Tensor,
    fp8_dtype: torch.dtype,
    power_of_two: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.rope_qkv_backward_quantize` of what its `why_not_triton_quantize` has nothing against."""
    rows, cols = dq.shape[0] * dq.shape[2], (dq.shape[1] + 2 * dk.shape[1]) * dq.shape[3]
    dqkv = dq.new_empty(rows, cols)
    target = quantized((rows, cols), dq, None, fp8_dtype, power_of_two)
    _launch_backward(dqkv, target, (dq, dk, dv), (cos, sin), multiplier)
    return dqkv, target.x8, target.scale_inv


def has_whole_blocks(dim: int, q_heads: int, kv_heads: int) -> bool:
    """Whether each program's heads of D = `dim` columns, and each of q, k and v, are whole blocks of 128 columns."""
    if dim & (dim - 1) or dim > 2 * SCALED or q_heads * dim % SCALED or kv_heads * dim % SCALED:
        return False
    block = triton.next_power_of_2(dim // 2)
    config = tune.rope_backward_config(block, triton.next_power_of_2(q_heads))
    return config.heads * dim % SCALED == 0


def _launch_backward(
    dqkv: Tensor,
    target: Quantized,
    gradients: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    multiplier: Tensor,
    config: tune.HeadConfig | None = None,
) -> None:
    dq, dk, dv = gradients
    (_, q_heads, tokens, dim), kv_heads = dq.shape, dk.shape[1]
    block = triton.next_power_of_2(dim // 2)
    config = config or tune.rope_backward_config(block, triton.next_power_of_2(q_heads))
    blocks = triton.cdiv(q_heads, config.heads) + 2 * triton.cdiv(kv_heads, config.heads)
    constants = ("IN_BLOCKS", "POWER_OF_TWO", "E5M2", "FP8_MAX", "NATIVE")
    launch(
        _rope_backward_kernel,
        (dqkv.shape[0], blocks),
        dqkv,
        *gradients,
        *angles,
        multiplier,
        target.x8,
        target.scale_inv,
        dqkv.shape[0],
        tokens,
        angles[0].shape[0],
        *dq.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK=block,
        HEADS=config.heads,
        num_warps=config.num_warps,
        **{name: target.constants[name] for name in constants},
    )
