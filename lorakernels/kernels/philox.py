# SPDX-License-Identifier: Apache-2.0
"""The dropout mask inside Triton kernels: csrc/device/philox.h's rule, bit for bit.

    keep[row, col] = lane ≥ threshold        threshold = round(65536 p), a run-time argument
    lane           = 16 bits, number col % 8, of Philox4x32-10(counter = (row, col // 8, offset, site), key)

slot points to int64 [2] = (key, offset) in device memory. One draw serves 8 neighbouring columns, so a tile is drawn by
groups of 8: rows [R], groups [G] → four words [R, G] → keep [R, 8 G], all in registers. In a kernel:

    key0, key1, offset = load_slot(slot)                          # once, before the loop
    w0, w1, w2, w3 = dropout_words(row, group, key0, key1, offset, site)
    keep = dropout_keep(w0, w1, w2, w3, threshold)                # columns 8 group … 8 group + 7

keep has the layout of a tile whose threads load 16 bytes of bf16 each: `tl.where(keep, x, 0.0)` then moves nothing
through shared memory. Tiles of other widths per thread are converted.

Rows and groups are logical, those of the whole tensor. A shard whose first column col0 is no multiple of 8 starts its
tiles at group col0 // 8, which is col0 % 8 columns before its own first one, and masks what lies outside of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

_FACTOR0 = tl.constexpr(0xD2511F53)
_FACTOR1 = tl.constexpr(0xCD9E8D57)
_KEY0_STEP = tl.constexpr(0x9E3779B9)
_KEY1_STEP = tl.constexpr(0xBB67AE85)


@triton.jit
def _mul_hi_lo(a: tl.tensor, b: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """High and low word of a · b. sm_90: one IMAD.WIDE.U32, where umulhi and a product are IMAD.HI.U32 and IMAD."""
    product = a.to(tl.uint64) * b
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox4x32_10(
    c0: tl.tensor, c1: tl.tensor, c2: tl.tensor, c3: tl.tensor, k0: tl.tensor, k1: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Four words from uint32 counter and key (Salmon et al., SC'11). Shapes broadcast, round by round: what rows,
    groups or the whole tile have in common is computed once for each thread."""
    for _ in tl.static_range(10):
        hi0, lo0 = _mul_hi_lo(c0, _FACTOR0)
        hi1, lo1 = _mul_hi_lo(c2, _FACTOR1)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        # 32-bit additions once compiled; in 64 bits, Triton's debug mode sees no overflow in them
        k0 = (k0.to(tl.uint64) + _KEY0_STEP).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + _KEY1_STEP).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def load_slot(slot: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """uint32 scalars: low and high word of the key, low word of the offset."""
    key = tl.load(slot)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32), tl.load(slot + 1).to(tl.uint32)


@triton.jit
def dropout_words(
    row: tl.tensor,
    group: tl.tensor,
    key0: tl.tensor,
    key1: tl.tensor,
    offset: tl.tensor,
    site: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Four uint32 words [R, G] for logical rows [R] and groups of 8 columns [G], of any integer type."""
    row_word = row.to(tl.uint32)[:, None]  # [R, 1]
    group_word = group.to(tl.uint32)[None, :]  # [1, G]
    return philox4x32_10(row_word, group_word, offset, tl.cast(site, tl.uint32), key0, key1)


@triton.jit
def dropout_keep(
    w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, w3: tl.tensor, threshold: tl.tensor
) -> tl.tensor:
    """Words [R, G] → bool [R, 8 G]: which elements survive."""
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [R, G, 2, 2]: word 2 i + j at [i, j]
    lanes = tl.join(words & 0xFFFF, words >> 16)  # [R, G, 2, 2, 2]
    return tl.reshape(lanes, [w0.shape[0], w0.shape[1] * 8]) >= tl.cast(threshold, tl.uint32)
