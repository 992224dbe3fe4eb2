# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels behind ops/swiglu.py: one read, one write, element by element.

A tile is BLOCK columns of one row; where gate_up is read as bytes or packed, a multiple of the columns that share a
scale. Of n programs, each takes every n-th tile and keeps its amax until the end: few atomics meet at one address.

Where blocks of 128 columns get scales, a thread has many numbers of one block, and finds one scale for all of them
(`quantize.columns_in_blocks`). A quotient, its inverse and what they need are some 40 instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels import tune_layer as tune
from lorakernels.kernels.triton import quantize
from lorakernels.kernels.triton.launch import TRITON_DTYPE, launch
from lorakernels.kernels.triton.quantize import (
    Quantized,
    amax_of_blocks,
    begin_quantizing,
    columns_in_blocks,
    decode_e4m3,
    encode,
    encode_in_blocks,
    for_tile,
    leave_amax,
    magnitude,
    narrowed,
    quantized,
    scale_of_bits,
    spread,
)
from lorakernels.numerics.blocks import BLOCK as SCALED
from lorakernels.numerics.fp8 import E4M3, scale_that_tells
from lorakernels.numerics.gate_up import PACKED_COLUMNS, packed_scales
from lorakernels.values import Scaled, Scaling

_SCALED = tl.constexpr(SCALED)  # columns of a block


@triton.jit
def _sigmoid(x: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """1 / (1 + e^−x). NATIVE: four instructions and 0 below 2⁻¹²⁶, where care for subnormal numbers takes eleven."""
    if NATIVE:
        asm: tl.constexpr = """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
        }"""
        return tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _scale_of_both(
    gate: tl.tensor, up: tl.tensor, FP8_MAX: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr
) -> tl.tensor:
    """[BLOCK / PACKED], of the amax of PACKED columns of gate and of up."""
    if len(gate.shape) == 1:
        gate_bits = tl.abs(gate).to(tl.int32, bitcast=True)
        bits = tl.maximum(gate_bits, tl.abs(up).to(tl.int32, bitcast=True))
        bits = tl.reshape(bits, (BLOCK // PACKED, PACKED))
    else:
        bits = tl.maximum(amax_of_blocks(gate), amax_of_blocks(up))
        bits = tl.reshape(bits, (BLOCK // PACKED, PACKED // _SCALED))
    return scale_of_bits(tl.max(bits, 1), FP8_MAX)


@triton.jit
def _for_columns(
    factor: tl.tensor, x: tl.tensor, IN_BLOCKS: tl.constexpr, PACKED: tl.constexpr
) -> tl.tensor:
    """`factor`, one for PACKED columns, for each column of the tile x."""
    if IN_BLOCKS:
        return for_tile(spread(factor, x.numel // _SCALED, PACKED // _SCALED), x)
    else:
        return spread(factor, x.numel, PACKED)


@triton.jit(do_not_specialize=["M", "amax_at", "kept_at", "measured"])
def _swiglu_kernel(
    out: tl.tensor,
    out8: tl.tensor,
    scale_inv: tl.tensor,
    state: tl.tensor,
    partials: tl.tensor,
    dact: tl.tensor,
    gate_up: tl.tensor,
    gate_up_scale_inv: tl.tensor,
    multiplier: tl.tensor,
    packed: tl.tensor,
    packed_scale_inv: tl.tensor,
    M: tl.tensor,
    F: tl.tensor,
    amax_at: tl.tensor,
    kept_at: tl.tensor,
    measured: tl.tensor,
    GRAD: tl.constexpr,
    BYTES: tl.constexpr,
    MEASURE: tl.constexpr,
    PACK: tl.constexpr,
    KEEP: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DELAYED: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    PARTIALS: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PACKED: tl.constexpr,
) -> None:
    """act [M, F] from gate_up [M, 2F]; GRAD: dgate_up [M, 2F] from dact [M, F] as well."""
    VECTOR: tl.constexpr = 16 if BYTES else 128 // DTYPE.primitive_bitwidth
    blocks = tl.cdiv(F, BLOCK)
    scales = tl.cdiv(F, PACKED)
    tiles = M * blocks
    first, kept, scale = begin_quantizing(
        tiles, scale_inv, state, partials, kept_at, measured, MEASURE, QUANTIZE, DELAYED, FP8_MAX, PARTIALS, OVERLAP
    )  # fmt: skip
    if GRAD:
        gate_multiplier = tl.load(multiplier)
        up_multiplier = tl.load(multiplier + 1)
    most = tl.zeros((BLOCK,), tl.float32)
    scaled = tl.cdiv(F, _SCALED)
    M_wide = tl.cast(M, tl.int64)
    of_tile = columns_in_blocks(BLOCK, PARTS) if IN_BLOCKS else tl.arange(0, BLOCK)
    for tile in tl.range(first, tiles, tl.num_programs(0)):
        row = tl.cast(tile // blocks, tl.int64)
        column = tile % blocks * BLOCK + of_tile
        inside = column < F
        narrow = row * F + column
        offset = row * (2 * F) + column
        if IN_BLOCKS:  # so that bytes are stored by the threads that loaded their numbers
            narrow = tl.max_contiguous(narrow, [1, VECTOR])
            offset = tl.max_contiguous(offset, [1, VECTOR])
        gate_in = tl.load(gate_up + offset, inside, other=0)
        up_in = tl.load(gate_up + F + offset, inside, other=0)
        if IN_BLOCKS:
            first_scaled = tile % blocks * (BLOCK // _SCALED)
            more_scaled = scaled - first_scaled
            scaled_at = scale_inv + first_scaled * M_wide + row
        if BYTES or PACK:
            block = tile % blocks * (BLOCK // PACKED) + tl.arange(0, BLOCK // PACKED)
            scale_inside = block < scales
            scale_at = row * scales + block
        if BYTES:
            of_both = tl.load(gate_up_scale_inv + scale_at, scale_inside, other=0.0)
            factor = _for_columns(of_both, gate_in, IN_BLOCKS, PACKED)
        if GRAD:
            d = tl.load(dact + narrow, inside, other=0.0).to(tl.float32)
        if BYTES:
            gate = decode_e4m3(gate_in, NATIVE) * factor
            up = decode_e4m3(up_in, NATIVE) * factor
        else:
            gate = gate_in.to(tl.float32)
            up = up_in.to(tl.float32)
        sigmoid = _sigmoid(gate, NATIVE)
        silu = gate * sigmoid
        if GRAD:
            dsilu = sigmoid + silu * (1.0 - sigmoid)
            a = narrowed(d * gate_multiplier * up * dsilu, DTYPE, NATIVE)
            b = narrowed(d * up_multiplier * silu, DTYPE, NATIVE)
            if QUANTIZE:
                most = magnitude(magnitude(most, a), b)
            if KEEP:
                tl.store(out + offset, a, inside)
                tl.store(out + F + offset, b, inside)
            if QUANTIZE and not MEASURE:
                offset = tl.max_contiguous(offset, VECTOR)
                tl.store(out8 + offset, encode(a.to(tl.float32) * scale, E5M2, NATIVE), inside)
                tl.store(out8 + F + offset, encode(b.to(tl.float32) * scale, E5M2, NATIVE), inside)
            if IN_BLOCKS:  # F is a multiple of 128
                a8 = encode_in_blocks(
                    a.to(tl.float32), scaled_at, M_wide, more_scaled, E5M2, NATIVE, FP8_MAX, POWER_OF_TWO
                )  # fmt: skip
                tl.store(out8 + offset, a8, inside)
                scaled_at += scaled * M_wide
                b8 = encode_in_blocks(
                    b.to(tl.float32), scaled_at, M_wide, more_scaled, E5M2, NATIVE, FP8_MAX, POWER_OF_TWO
                )  # fmt: skip
                tl.store(out8 + F + offset, b8, inside)
        else:
            act = narrowed(silu * up, DTYPE, NATIVE)
            if QUANTIZE:
                most = magnitude(most, act)
            if KEEP:
                tl.store(out + narrow, act, inside)
            if QUANTIZE and not MEASURE:
                narrow = tl.max_contiguous(narrow, VECTOR)
                tl.store(out8 + narrow, encode(act.to(tl.float32) * scale, E5M2, NATIVE), inside)
            if IN_BLOCKS:
                act8 = encode_in_blocks(
                    act.to(tl.float32), scaled_at, M_wide, more_scaled, E5M2, NATIVE, FP8_MAX, POWER_OF_TWO
                )  # fmt: skip
                tl.store(out8 + narrow, act8, inside)
            if PACK:
                if not IN_BLOCKS:
                    offset = tl.max_contiguous(offset, VECTOR)
                fit = _scale_of_both(gate, up, FP8_MAX, BLOCK, PACKED)
                inverse = tl.div_rn(tl.full((), 1.0, tl.float32), fit)
                tl.store(packed_scale_inv + scale_at, inverse, scale_inside)
                factor = _for_columns(fit, gate, IN_BLOCKS, PACKED)
                tl.store(packed + offset, encode(gate * factor, False, NATIVE), inside)
                tl.store(packed + F + offset, encode(up * factor, False, NATIVE), inside)
    leave_amax(most, kept, state, partials, amax_at, MEASURE, DELAYED)


def swiglu_quantize(
    gate_up: Scaled,
    scaling: Scaling | None,
    keep: bool,
    dtype: torch.dtype,
    power_of_two: bool | None = None,
    config: tune.TileConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.swiglu_quantize` of what its `why_not_triton` has nothing against."""
    data = gate_up.data
    shape = (data.shape[0], data.shape[1] // 2)
    act = data.new_empty(shape if keep else 0, dtype=dtype)
    target = quantized(shape, data, scaling, E4M3, power_of_two)
    config = config or tune.swiglu_config(gate_up.scale_inv is not None, target.in_blocks)
    if keep or target.quantizes or target.in_blocks:
        _launch(act, target, None, gate_up, None, dtype, config)
    return act, target.x8, target.scale_inv


def swiglu_quantize_and_pack(
    gate_up: Tensor,
    scaling: Scaling | None,
    keep: bool,
    power_of_two: bool | None = None,
    config: tune.TileConfig = tune.SWIGLU_PACK,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`ops.swiglu_quantize_and_pack` of what its `why_not_triton_and_pack` has nothing against."""
    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    act = gate_up.new_empty(shape if keep else 0)
    target = quantized(shape, gate_up, scaling, E4M3, power_of_two)
    packed = gate_up.new_empty(gate_up.shape, dtype=torch.uint8)
    scale_inv = gate_up.new_empty(packed_scales(*gate_up.shape), dtype=torch.float32)
    pack = Scaled(packed, scale_inv)
    _launch(act, target, None, Scaled(gate_up), None, gate_up.dtype, config, pack)
    return act, target.x8, target.scale_inv, packed, scale_inv


def swiglu_quantize_grad(
    dact: Tensor,
    gate_up: Scaled,
    multiplier: Tensor,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    keep: bool,
    power_of_two: bool | None = None,
    config: tune.TileConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.swiglu_quantize_grad` of what its `why_not_triton_grad` has nothing against."""
    shape = (gate_up.data.shape[0], gate_up.data.shape[1])
    # dgate_up itself may overflow here
    tells = scaling is not None and dact.dtype == torch.float16
    dgate_up = dact.new_empty(shape if keep or tells else 0)
    target = quantized(shape, dact, scaling, fp8_dtype, power_of_two)
    config = config or tune.swiglu_grad_config(keep, target.in_blocks)
    if keep or target.quantizes or target.in_blocks:
        _launch(dgate_up, target, dact, gate_up, multiplier, dact.dtype, config)
    scale_inv = scale_that_tells(dgate_up, target.scale_inv) if tells else target.scale_inv
    return dgate_up if keep else dact.new_empty(0), target.x8, scale_inv


def _launch(
    out: Tensor,
    target: Quantized,
    dact: Tensor | None,
    gate_up: Scaled,
    multiplier: Tensor | None,
    dtype: torch.dtype,
    config: tune.TileConfig,
    pack: Scaled | None = None,
) -> None:
    """`out`: act or dgate_up. `pack`: where gate_up's bytes and their scale_inv go."""
    data, gate_up_scale_inv = gate_up
    if pack is not None or gate_up_scale_inv is not None:
        assert config.block % PACKED_COLUMNS == 0
    packed, packed_scale_inv = (out, out) if pack is None else pack
    vector = 16 // data.element_size()
    rows, cols = data.shape[0], data.shape[1] // 2
    tiles = rows * triton.cdiv(cols, config.block)
    measured = quantize.measuring(tiles, data.device)
    programs = min(tiles, quantize.multiprocessors(data.device) * config.resident)
    for measure in (True, False) if target.quantizes else (False,):
        launch(
            _swiglu_kernel,
            (measured if measure else programs,),
            out,
            target.x8,
            target.scale_inv,
            target.state,
            target.partials,
            out if dact is None else dact,
            data,
            out if gate_up_scale_inv is None else gate_up_scale_inv,
            out if multiplier is None else multiplier,
            packed,
            packed_scale_inv,
            rows,
            cols,
            target.amax_at,
            target.kept_at,
            measured,
            GRAD=dact is not None,
            BYTES=gate_up_scale_inv is not None,
            MEASURE=measure,
            PACK=pack is not None and not measure,
            KEEP=out.numel() > 0 and not measure,
            DTYPE=TRITON_DTYPE[dtype],
            BLOCK=config.block,
            PARTS=tune.parts_of_blocks(config, vector) if target.in_blocks else 1,
            PACKED=PACKED_COLUMNS,
            num_warps=config.num_warps,
            **target.constants,
            **target.options,
        )
