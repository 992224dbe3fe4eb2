# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the decoder layer's kernels between its GEMMs, all bound by bytes: data, chosen by shape alone."""

from __future__ import annotations

from dataclasses import dataclass

MAX_NORM_COLUMNS = 1 << 15  # a row is held in registers


@dataclass(frozen=True)
class RowConfig:
    """A program holds whole rows; `resident` programs per multiprocessor share the rows.

    `prefetch`: it loads its next row while it sums this one.
    """

    num_warps: int
    resident: int
    prefetch: bool


@dataclass(frozen=True)
class TileConfig:
    """A tile is `block` columns of one row; `resident` programs per multiprocessor share the tiles."""

    block: int
    num_warps: int
    resident: int


@dataclass(frozen=True)
class HeadConfig:
    """A program takes `heads` heads of a token, a power of two."""

    heads: int
    num_warps: int


def norm_config(block: int) -> RowConfig:
    """The configuration of rms_norm_quantize for rows of up to `block` columns."""
    if block >= 4096:
        warps = min(32, block // 1024)
        return RowConfig(num_warps=warps, resident=max(1, 16 // warps), prefetch=True)
    warps = max(2, block // 512)
    return RowConfig(num_warps=warps, resident=32 // warps, prefetch=False)


def norm_backward_config(block: int) -> RowConfig:
    """The configuration of rms_norm_backward for rows of up to `block` columns."""
    warps = 4 if block == 4096 else min(32, max(2, block // 512))
    return RowConfig(num_warps=warps, resident=max(1, 32 // warps), prefetch=False)


SWIGLU = TileConfig(block=1024, num_warps=4, resident=12)
SWIGLU_OF_BYTES = TileConfig(block=2048, num_warps=4, resident=12)
SWIGLU_PACK = TileConfig(block=1024, num_warps=1, resident=24)
SWIGLU_IN_BLOCKS = TileConfig(block=512, num_warps=1, resident=32)
SWIGLU_GRAD = TileConfig(block=2048, num_warps=4, resident=8)
SWIGLU_GRAD_KEPT = TileConfig(block=1024, num_warps=4, resident=8)
SWIGLU_GRAD_IN_BLOCKS = TileConfig(block=512, num_warps=1, resident=32)
ROPE_HEADS = 16
ROPE_BACKWARD_HEADS, ROPE_BACKWARD_WARPS = 8, 4


def swiglu_config(of_bytes: bool, in_blocks: bool) -> TileConfig:
    """The configuration of swiglu_quantize; `of_bytes`: gate and up are read in e4m3."""
    if in_blocks:
        return SWIGLU_IN_BLOCKS
    return SWIGLU_OF_BYTES if of_bytes else SWIGLU


def swiglu_grad_config(keep: bool, in_blocks: bool) -> TileConfig:
    """The configuration of swiglu_quantize_grad; `keep`: the gradient is written unquantized as well."""
    if in_blocks:
        return SWIGLU_GRAD_IN_BLOCKS
    return SWIGLU_GRAD_KEPT if keep else SWIGLU_GRAD


def parts_of_blocks(config: TileConfig, vector: int) -> int:
    """How many times `vector` columns of one block of 128 each thread of a tile takes."""
    return max(1, min(128 // vector, config.block // (32 * config.num_warps * vector)))


def rope_config(block: int, most: int) -> HeadConfig:
    """For half heads of up to `block` columns and `most` heads, both powers of two: 16 bytes a thread of each half."""
    heads = min(ROPE_HEADS, most)
    return HeadConfig(heads=heads, num_warps=min(8, max(1, heads * block // 256)))


def rope_backward_config(block: int, most: int) -> HeadConfig:
    """As `rope_config`, for the way back."""
    heads = min(ROPE_BACKWARD_HEADS, most)
    warps = min(ROPE_BACKWARD_WARPS, max(1, heads * block // 128))
    return HeadConfig(heads=heads, num_warps=warps)
