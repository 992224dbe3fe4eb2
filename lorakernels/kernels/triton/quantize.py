# SPDX-License-Identifier: Apache-2.0
"""Quantizing inside Triton kernels: the rules of `numerics.fp8.quantize`, bit for bit.

The scale is the state's. Where that is still 0, and in eval, it comes from the amax of what the kernel itself computes.
So the same kernel is launched twice. The first launch, with MEASURE, stores nothing but each program's amax. It returns
at once where the state has a scale. The host does not know which of both happens, so that a captured graph serves both.

    first, kept, scale = begin_quantizing(tiles, scale_inv, state, …)
    for tile in tl.range(first, tiles, programs):           # none where there is nothing to measure
        most = magnitude(most, value)
        tl.store(x8 + at, encode(value * scale, E5M2, NATIVE))
    leave_amax(most, kept, state, …)

With OVERLAP (Hopper's programmatic launch, csrc/host/launch.h) a kernel may start before the previous one has ended.
It waits for that end before it reads or writes anything. The MEASURE launch waits first and then lets the second launch
start. The second launch therefore waits for the MEASURE launch alone, and only if it reads its amax. If the state has a
scale, the MEASURE launch writes nothing, and there is nothing to wait for.

An amax is the largest bit pattern of the magnitudes, as an integer: inf is above every number, NaN above inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakernels.device import capability_of, multiprocessors_of
from lorakernels.numerics.blocks import BLOCK, blocks_of
from lorakernels.numerics.fp8 import E4M3, FLT_MAX, FP8_MAX
from lorakernels.values import Scaling

PARTIALS = 512  # programs that measure, at most; a power of two
NATIVE_FP8 = (8, 9)  # first compute capability whose instructions convert to e4m3
PROGRAMMATIC_LAUNCH = (9, 0)
_INF = tl.constexpr(0x7F800000)
_MOST_POWER = tl.constexpr(0x7E800000)  # 2¹²⁶
_BLOCK = tl.constexpr(BLOCK)
_FLT_MAX = tl.constexpr(FLT_MAX)


@triton.jit
def kept_scale(state: tl.tensor, kept_at: tl.tensor, DELAYED: tl.constexpr) -> tl.tensor:
    kept = 0.0
    if DELAYED:
        kept = tl.load(state + kept_at)
    return kept


@triton.jit
def begin(MEASURE: tl.constexpr, QUANTIZE: tl.constexpr, OVERLAP: tl.constexpr) -> None:
    """The first statement of a kernel, in each program. Then all earlier kernels but MEASURE launches have ended."""
    if OVERLAP:
        if MEASURE:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        elif QUANTIZE:  # the MEASURE launch in front has already waited
            tl.extra.cuda.gdc_launch_dependents()
        else:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()


@triton.jit
def scale_of_bits(bits: tl.tensor, FP8_MAX: tl.constexpr) -> tl.tensor:
    """`numerics.fp8.scale_of` an amax's bits."""
    usable = (bits > 0) & (bits < _INF)
    amax = tl.where(usable, bits, 1 << 23).to(tl.float32, bitcast=True)
    fresh = tl.minimum(tl.div_rn(tl.full((), FP8_MAX, tl.float32), amax), _FLT_MAX)
    return tl.where(usable, fresh, 1.0)


@triton.jit
def scale_of_block(
    bits: tl.tensor, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(scale, scale_inv) of `numerics.blocks.quantize_rows`, of the bits of a block's amax."""
    scale = scale_of_bits(bits, FP8_MAX)
    if POWER_OF_TWO:
        power = tl.minimum(scale.to(tl.int32, bitcast=True) & _INF, _MOST_POWER)
        scale = power.to(tl.float32, bitcast=True)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    return scale, tl.where(bits < _INF, inverse, float("nan"))


@triton.jit
def spread(factor: tl.tensor, N: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """[N]: each of [N / COLUMNS] for its COLUMNS columns."""
    return tl.reshape(tl.broadcast_to(factor[:, None], (N // COLUMNS, COLUMNS)), (N,))


@triton.jit
def columns_in_blocks(N: tl.constexpr, PARTS: tl.constexpr) -> tl.tensor:
    """0 … N − 1 as [PARTS · N / 128, 128 / PARTS]: the first part of each block of 128, then the second ones.

    Triton gives a thread 16 bytes of a row of such a tile, and neighbouring rows to neighbouring threads. With 16 bytes
    for each thread and part, a thread has all its numbers in one block, and finds one scale.
    """
    row = tl.arange(0, PARTS * (N // _BLOCK))
    in_part = tl.arange(0, _BLOCK // PARTS)
    block = row % (N // _BLOCK)
    part = row // (N // _BLOCK)
    return (block * _BLOCK + part * (_BLOCK // PARTS))[:, None] + in_part[None, :]


@triton.jit
def by_block(x: tl.tensor) -> tl.tensor:
    """A tile of `columns_in_blocks` as [PARTS, blocks, 128 / PARTS]."""
    PARTS: tl.constexpr = _BLOCK // x.shape[1]
    return tl.reshape(x, (PARTS, x.shape[0] // PARTS, x.shape[1]))


@triton.jit
def amax_of_blocks(x: tl.tensor) -> tl.tensor:
    """The bits of the amax of each block of a tile of `columns_in_blocks`, fp32."""
    return tl.max(tl.max(by_block(tl.abs(x).to(tl.int32, bitcast=True)), 0), 1)


@triton.jit
def for_tile(factor: tl.tensor, x: tl.tensor) -> tl.tensor:
    """`factor` [blocks] for each column of x, a tile of `columns_in_blocks`."""
    factors = tl.broadcast_to(factor[None, :, None], by_block(x).shape)
    return tl.reshape(factors, x.shape)


@triton.jit
def stored_scales(
    bits: tl.tensor,
    scale_inv: tl.tensor,
    step: tl.tensor,
    blocks: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
) -> tl.tensor:
    """The scales of blocks [B] with these amaxes; scale_inv of the first `blocks` go to `scale_inv`, `step` apart."""
    scale, inverse = scale_of_block(bits, FP8_MAX, POWER_OF_TWO)
    block = tl.arange(0, bits.shape[0])
    tl.store(scale_inv + block * step, inverse, block < blocks)
    return scale


@triton.jit
def encode_in_blocks(
    x: tl.tensor,
    scale_inv: tl.tensor,
    step: tl.tensor,
    blocks: tl.tensor,
    E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
) -> tl.tensor:
    """Bytes of fp32 x, [N] or a tile of `columns_in_blocks`. scale_inv goes where `stored_scales` says."""
    if len(x.shape) == 1:
        N: tl.constexpr = x.shape[0]
        magnitudes = tl.abs(x).to(tl.int32, bitcast=True)
        bits = tl.max(tl.reshape(magnitudes, (N // _BLOCK, _BLOCK)), 1)
        scale = stored_scales(bits, scale_inv, step, blocks, FP8_MAX, POWER_OF_TWO)
        return encode(x * spread(scale, N, _BLOCK), E5M2, NATIVE)
    else:
        bits = amax_of_blocks(x)
        scale = stored_scales(bits, scale_inv, step, blocks, FP8_MAX, POWER_OF_TWO)
        return encode(x * for_tile(scale, x), E5M2, NATIVE)


@triton.jit
def scale_to_use(
    kept: tl.tensor,
    partials: tl.tensor,
    measured: tl.tensor,
    FP8_MAX: tl.constexpr,
    PARTIALS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> tl.tensor:
    """`kept` if it is > 0; otherwise `numerics.fp8.scale_of` the amax whose parts `measured` programs left."""
    scale = kept
    if not kept > 0.0:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        i = tl.arange(0, PARTIALS)
        scale = scale_of_bits(tl.max(tl.load(partials + i, i < measured, other=0), 0), FP8_MAX)
    return scale


@triton.jit
def magnitude(most: tl.tensor, value: tl.tensor) -> tl.tensor:
    """Elementwise max of fp32 `most` and |value|; NaN stays."""
    return tl.maximum(most, tl.abs(value.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude_bits(most: tl.tensor) -> tl.tensor:
    """The largest bit pattern of magnitudes [N]."""
    return tl.max(most.to(tl.int32, bitcast=True), 0)


@triton.jit
def raise_amax(amax: tl.tensor, bits: tl.tensor) -> None:
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@triton.jit
def begin_quantizing(
    tiles: tl.tensor,
    scale_inv: tl.tensor,
    state: tl.tensor,
    partials: tl.tensor,
    kept_at: tl.tensor,
    measured: tl.tensor,
    MEASURE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DELAYED: tl.constexpr,
    FP8_MAX: tl.constexpr,
    PARTIALS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Calls `begin`, and returns (first tile of this program, the state's scale, the scale to use). Stores its inverse.

    The state's scale is 0 where it has none. MEASURE: where it has one, the first tile is behind the last.
    """
    first = tl.program_id(0)
    begin(MEASURE, QUANTIZE, OVERLAP)
    kept = kept_scale(state, kept_at, DELAYED)
    scale = 1.0
    if MEASURE:
        if kept > 0.0:
            first = tiles
    elif QUANTIZE:
        scale = scale_to_use(kept, partials, measured, FP8_MAX, PARTIALS, OVERLAP)
        if first == 0:
            tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
    return first, kept, scale


@triton.jit
def leave_amax(
    most: tl.tensor,
    kept: tl.tensor,
    state: tl.tensor,
    partials: tl.tensor,
    amax_at: tl.tensor,
    MEASURE: tl.constexpr,
    DELAYED: tl.constexpr,
) -> None:
    """The last thing in a kernel, of the magnitudes [N] that this program saw."""
    if MEASURE:
        if not kept > 0.0:
            tl.store(partials + tl.program_id(0), magnitude_bits(most))
    elif DELAYED:
        raise_amax(state + amax_at, magnitude_bits(most))


@triton.jit
def narrowed(x: tl.tensor, DTYPE: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """fp32 x to DTYPE, to nearest even. NATIVE: two by an instruction; one by one, sm_90 needs eight times as long."""
    if x.numel < 2:  # a program of one number, for which Triton compiles no instruction of two
        return x.to(DTYPE)
    elif NATIVE and DTYPE == tl.bfloat16:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.bfloat16, is_pure=True, pack=2
        )
    elif NATIVE and DTYPE == tl.float16:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.float16, is_pure=True, pack=2
        )
    else:
        return x.to(DTYPE)


@triton.jit
def encode(x: tl.tensor, E5M2: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """Bytes of fp32 x: round to nearest even, ±max beyond the range, NaN stays NaN.

    NATIVE: by the GPU's instruction. Otherwise by integers: for GPUs without it, and the interpreter, which cuts off.
    """
    if NATIVE:
        if E5M2:
            return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        MANTISSA: tl.constexpr = 2 if E5M2 else 3
        BIAS: tl.constexpr = 15 if E5M2 else 7
        MAX_BITS: tl.constexpr = 0x47600000 if E5M2 else 0x43E00000  # 57344, 448
        SHIFT: tl.constexpr = 23 - MANTISSA
        all_bits = x.to(tl.int32, bitcast=True)
        bits = all_bits & 0x7FFFFFFF
        finite = tl.minimum(bits, MAX_BITS)
        even = (finite >> SHIFT) & 1
        normal = ((finite + even + ((1 << (SHIFT - 1)) - 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
        # below the normals: counted in the format's smallest step, the last bit of this power of two
        step: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
        power = tl.full((), step, tl.int32).to(tl.float32, bitcast=True)
        sum_bits = (finite.to(tl.float32, bitcast=True) + power).to(tl.int32, bitcast=True)
        byte = tl.where(finite >= ((128 - BIAS) << 23), normal, sum_bits - step)
        byte = tl.where(bits > _INF, 0x7F, byte)
        return (byte | ((all_bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(byte: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """fp32 of e4m3 bytes. Not NATIVE: by integers, as `encode`."""
    if NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = byte.to(tl.int32)
        low = bits & 0x7F
        # as an fp32 whose exponent is 120 too small; the product makes subnormals normal
        tiny = (low << 20).to(tl.float32, bitcast=True)
        value = tiny * tl.full((), 0x7B800000, tl.int32).to(tl.float32, bitcast=True)
        value = tl.where(low == 0x7F, float("nan"), value)
        return tl.where(bits > 0x7F, -value, value)


@dataclass(frozen=True)
class Quantized:
    """The tensors into which a kernel writes x8 and scale_inv, and from which it reads the scale.

    `power_of_two`, where it is given, asks for a scale of each 1 × 128. Then nothing is read, and `quantizes` is False.
    """

    x8: Tensor
    scale_inv: Tensor
    state: Tensor  # any tensor where nothing is read
    partials: Tensor
    amax_at: int
    kept_at: int
    quantizes: bool
    delayed: bool
    e5m2: bool
    native: bool
    overlaps: bool
    power_of_two: bool | None = None

    @property
    def in_blocks(self) -> bool:
        return self.power_of_two is not None

    @property
    def options(self) -> dict[str, bool]:
        """The options of a launch, besides num_warps.

        In blocks no MEASURE launch is in front, and programs start when the previous kernel has ended. Those that start
        early may crowd where multiprocessors come free first, and share all tiles there: SwiGLU behind itself took 75
        to 243 µs by its tiles (docs/facts.md, H56).
        """
        return launch_options(self.overlaps and not self.in_blocks)

    @property
    def constants(self) -> dict[str, object]:
        return {
            "QUANTIZE": self.quantizes,
            "DELAYED": self.delayed,
            "E5M2": self.e5m2,
            "NATIVE": self.native,
            "FP8_MAX": FP8_MAX[torch.float8_e5m2 if self.e5m2 else E4M3],
            "PARTIALS": PARTIALS,
            "OVERLAP": self.overlaps,
            "IN_BLOCKS": self.in_blocks,
            "POWER_OF_TWO": bool(self.power_of_two),
        }


def quantized(
    shape: tuple[int, int],
    like: Tensor,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    power_of_two: bool | None = None,
) -> Quantized:
    """Memory for what `numerics.blocks.quantize_by` returns, on the device of `like`."""
    quantizes, device = scaling is not None, like.device
    in_blocks = power_of_two is not None
    sizes = (blocks_of(shape[1]), shape[0]) if in_blocks else 1 if quantizes else 0
    scale_inv = like.new_empty(sizes, dtype=torch.float32)
    state, column, delayed = scaling or (scale_inv, 0, False)
    return Quantized(
        like.new_empty(shape if quantizes or in_blocks else 0, dtype=torch.uint8),
        scale_inv,
        state,
        like.new_empty(PARTIALS if quantizes else 0, dtype=torch.int32),
        column,
        (state.shape[0] - 1) * state.stride(0) + column if quantizes else 0,
        quantizes,
        delayed,
        fp8_dtype == torch.float8_e5m2,
        is_native(device),
        overlaps(device),
        power_of_two,
    )


def is_native(device: torch.device) -> bool:
    return device.type == "cuda" and capability_of(device) >= NATIVE_FP8


def overlaps(device: torch.device) -> bool:
    """Whether a kernel can start before the one in front of it has ended."""
    has_gdc = hasattr(tl.extra.cuda, "gdc_wait")
    return has_gdc and device.type == "cuda" and capability_of(device) >= PROGRAMMATIC_LAUNCH


def launch_options(early: bool) -> dict[str, bool]:
    """The options of a launch that starts `early`. Its kernel calls `begin` with OVERLAP, which is true then."""
    return {"launch_pdl": True} if early else {}


def multiprocessors(device: torch.device) -> int:
    """The GPU's number of multiprocessors; 2 for Triton's interpreter."""
    if device.type != "cuda":
        return 2
    return multiprocessors_of(torch.cuda.current_device() if device.index is None else device.index)


def measuring(tiles: int, device: torch.device) -> int:
    """How many programs take the amax."""
    return max(1, min(tiles, 2 * multiprocessors(device), PARTIALS))
