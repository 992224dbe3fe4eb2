# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that move keys, values and their gradients between a row's order and its chunks by rank.

A row of S tokens is 2n chunks of C. Rank r of n has chunks r and 2n − 1 − r (parallel/context/attention.py).

    side_by_side    k, v [B, Hk, 2C, D] of a rank → [B, 2C, 2 Hk, D]
    in_order        the [B, 2C, 2 Hk, D] of every rank, in peer memory → [B, S, 2 Hk, D]
    layered         gradients of some ranges of the keys, added in fp32 → [n, B, 2C, 2 Hk, D], by rank

Each element is read once and written once. torch's ops read and wrote keys and values five times, and gradients ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels.triton.launch import on_device
from lorakernels.kernels.triton.sum_rows import MOST_PARTS

MOST_RANGES = 4  # a rank's two chunks, what lies before both, and between them
_ELEMENTS = 4096  # of a program that has tokens of a head
_COPIED = (
    8192  # of a program of `in_order`: four loads of 16 bytes in flight for each of its threads
)
_WARPS = 8


class KeyGradients(NamedTuple):
    """dk, dv [B, Hk, T, D] of the keys and values from token `begin` of each row on. Columns lie side by side."""

    begin: int
    dk: Tensor
    dv: Tensor


@triton.jit(do_not_specialize=["T"])
def _side_by_side_kernel(  # type: ignore[no-untyped-def]
    out, k, v, T, k_batch, k_head, k_token, v_batch, v_head, v_token,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    place, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    inside = (token < T)[:, None] & (column < D)[None, :]
    if place < HEADS:
        k += batch * k_batch + place * k_head
        x = tl.load(k + token[:, None] * k_token + column[None, :], inside)
    else:
        v += batch * v_batch + (place - HEADS) * v_head
        x = tl.load(v + token[:, None] * v_token + column[None, :], inside)
    row = (batch * T + token) * (2 * HEADS) + place
    tl.store(out + row[:, None] * D + column[None, :], x, inside)


def side_by_side(k: Tensor, v: Tensor, out: Tensor) -> None:
    """`out`, contiguous [B, T, 2 Hk, D], becomes k and v [B, Hk, T, D]. Columns lie side by side."""
    batch, heads, tokens, dim = k.shape
    if out.numel() == 0:
        return
    block, tile_tokens = _tile(dim)
    with on_device(out):
        _side_by_side_kernel[(2 * heads, triton.cdiv(tokens, tile_tokens), batch)](
            out,
            k,
            v,
            tokens,
            *k.stride()[:3],
            *v.stride()[:3],
            HEADS=heads,
            D=dim,
            BLOCK=block,
            TOKENS=tile_tokens,
            num_warps=_WARPS,
        )


@triton.jit(do_not_specialize=["rank"])
def _in_order_kernel(  # type: ignore[no-untyped-def]
    out, p0, p1, p2, p3, p4, p5, p6, p7, rank, chunk,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program copies BLOCK of the `chunk` elements of one chunk.

    Neighbours copy from all ranks, the next one first: no link idles while the own chunks are copied.
    """
    turn = tl.program_id(0) % (2 * RANKS)
    owner = (rank + 1 + turn // 2) % RANKS
    tail = turn % 2
    inner = (tl.program_id(0) // (2 * RANKS)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = inner < chunk
    batch = tl.program_id(1).to(tl.int64)
    offset = (2 * batch + tail) * chunk + inner
    x = tl.zeros((BLOCK,), out.dtype.element_ty)
    if owner == 0:
        x = tl.load(p0 + offset, inside)
    if RANKS > 1 and owner == 1:
        x = tl.load(p1 + offset, inside)
    if RANKS > 2 and owner == 2:
        x = tl.load(p2 + offset, inside)
    if RANKS > 3 and owner == 3:
        x = tl.load(p3 + offset, inside)
    if RANKS > 4 and owner == 4:
        x = tl.load(p4 + offset, inside)
    if RANKS > 5 and owner == 5:
        x = tl.load(p5 + offset, inside)
    if RANKS > 6 and owner == 6:
        x = tl.load(p6 + offset, inside)
    if RANKS > 7 and owner == 7:
        x = tl.load(p7 + offset, inside)
    number = tl.where(tail == 1, 2 * RANKS - 1 - owner, owner)
    tl.store(out + (2 * RANKS * batch + number) * chunk + inner, x, inside)


def in_order(there: Sequence[Tensor], rank: int) -> Tensor:
    """[B, S, …] in a row's order, from every rank's contiguous [B, 2C, …]. `rank` is the reading rank."""
    ranks, local = len(there), there[rank]
    out = local.new_empty((local.shape[0], ranks * local.shape[1], *local.shape[2:]))
    if out.numel() == 0:
        return out
    pointers = [*there, *[there[0]] * (MOST_PARTS - ranks)]  # the rest is not read
    chunk = local[0].numel() // 2
    with on_device(out):
        _in_order_kernel[(2 * ranks * triton.cdiv(chunk, _COPIED), local.shape[0])](
            out, *pointers, rank, chunk, RANKS=ranks, BLOCK=_COPIED, num_warps=_WARPS
        )
    return out


@triton.jit
def _added(  # type: ignore[no-untyped-def]
    total, dk, dv, first, last, batch_stride, head_stride, token_stride,
    number, C, batch, place, token, column, inside, HEADS: tl.constexpr,
):  # fmt: skip
    """`total` and the chunk `number` of a range from chunk `first` to before chunk `last`, if it is in it."""
    if (first <= number) & (number < last):
        row = token + (number - first).to(tl.int64) * C
        offset = batch * batch_stride + row[:, None] * token_stride + column[None, :]
        if place < HEADS:
            total += tl.load(dk + offset + place * head_stride, inside, other=0.0).to(tl.float32)
        else:
            of_v = (place - HEADS) * head_stride
            total += tl.load(dv + offset + of_v, inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["C", "B", "f0", "l0", "f1", "l1", "f2", "l2", "f3", "l3"])
def _layered_kernel(  # type: ignore[no-untyped-def]
    out,
    dk0, dv0, f0, l0, b0, h0, t0, dk1, dv1, f1, l1, b1, h1, t1,
    dk2, dv2, f2, l2, b2, h2, t2, dk3, dv3, f3, l3, b3, h3, t3,
    C, B,
    CHUNKS: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A program has TOKENS tokens of one head of k, or of v, in one chunk."""
    place = tl.program_id(0).to(tl.int64)
    number = tl.program_id(2) % CHUNKS
    batch = (tl.program_id(2) // CHUNKS).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    inside = (token < C)[:, None] & (column < D)[None, :]
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    total = _added(
        total, dk0, dv0, f0, l0, b0, h0, t0,
        number, C, batch, place, token, column, inside, HEADS,
    )  # fmt: skip
    if PARTS > 1:
        total = _added(
            total, dk1, dv1, f1, l1, b1, h1, t1,
            number, C, batch, place, token, column, inside, HEADS,
        )  # fmt: skip
    if PARTS > 2:
        total = _added(
            total, dk2, dv2, f2, l2, b2, h2, t2,
            number, C, batch, place, token, column, inside, HEADS,
        )  # fmt: skip
    if PARTS > 3:
        total = _added(
            total, dk3, dv3, f3, l3, b3, h3, t3,
            number, C, batch, place, token, column, inside, HEADS,
        )  # fmt: skip
    tail = number >= CHUNKS // 2
    owner = tl.where(tail, CHUNKS - 1 - number, number).to(tl.int64)
    row = ((owner * B + batch) * 2 + tail.to(tl.int64)) * C + token
    offset = (row * (2 * HEADS) + place)[:, None] * D + column[None, :]
    tl.store(out + offset, total, inside)


def layered(parts: Sequence[KeyGradients], out: Tensor) -> None:
    """`out`, contiguous fp32 [n, B, 2C, 2 Hk, D], becomes the sum of `parts` in their order, by rank, and 0 elsewhere.

    Each part has whole chunks. There are at most MOST_RANGES.
    """
    ranks, batch, tokens, places, dim = out.shape
    size = tokens // 2
    if out.numel() == 0:
        return
    arguments: list[Tensor | int] = []
    for begin, dk, dv in parts:
        if dk.stride() != dv.stride() or dk.stride(3) != 1:
            dk, dv = dk.contiguous(), dv.contiguous()
        first = begin // size
        arguments += [dk, dv, first, first + dk.shape[2] // size, *dk.stride()[:3]]
    arguments += arguments[:7] * (MOST_RANGES - len(parts))  # not read
    block, tile_tokens = _tile(dim)
    with on_device(out):
        _layered_kernel[(places, triton.cdiv(size, tile_tokens), batch * 2 * ranks)](
            out,
            *arguments,
            size,
            batch,
            CHUNKS=2 * ranks,
            PARTS=len(parts),
            HEADS=places // 2,
            D=dim,
            BLOCK=block,
            TOKENS=tile_tokens,
            num_warps=_WARPS,
        )


def _tile(dim: int) -> tuple[int, int]:
    """Columns and tokens of a program."""
    block = triton.next_power_of_2(dim)
    return block, max(1, _ELEMENTS // block)
