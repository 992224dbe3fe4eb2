# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel that joins two attentions of the same queries to different keys, by their logsumexps:

    l = log(exp l₁ + exp l₂)      out = w₁ out₁ + w₂ out₂      wᵢ = exp(lᵢ − l)

out₁, out₂ [B, H, C, D] in 16 bits or fp32, l₁, l₂ fp32 [B, H, C]. out takes the place of out₁, and l that of l₁. All is
computed in fp32, and out is rounded once, where it is stored. torch's ops read and write 22 bytes for each 16-bit
element of out, this kernel 6.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels.triton.launch import on_device

_ELEMENTS = 4096  # of a program: two loads of 16 bytes of each thread, from each of out₁ and out₂
_WARPS = 8


@triton.jit(do_not_specialize=["C", "l1_batch", "l1_head"])
def _merge_kernel(  # type: ignore[no-untyped-def]
    one, l1, two, l2, C,
    one_batch, one_head, one_token, two_batch, two_head, two_token, l1_batch, l1_head,
    D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A program has TOKENS tokens of one head. Programs of a token's heads are neighbours, as their elements are."""
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    there = token < C
    sums = l1 + batch * l1_batch + head * l1_head + token
    a = tl.load(sums, there, other=0.0)
    b = tl.load(l2 + (batch * tl.num_programs(0) + head) * C + token, there, other=0.0)
    most = tl.maximum(a, b)
    ea = tl.exp(a - most)
    eb = tl.exp(b - most)
    total = ea + eb
    inside = there[:, None] & (column < D)[None, :]
    one += batch * one_batch + head * one_head
    two += batch * two_batch + head * two_head
    place = one + token[:, None] * one_token + column[None, :]
    x = tl.load(place, inside, other=0.0).to(tl.float32)
    y = tl.load(two + token[:, None] * two_token + column[None, :], inside, other=0.0)
    merged = x * (ea / total)[:, None] + y.to(tl.float32) * (eb / total)[:, None]
    tl.debug_barrier()  # several threads read a logsumexp
    tl.store(sums, most + tl.log(total), there)
    tl.store(place, merged.to(one.dtype.element_ty), inside)


def merge_attention(one: Tensor, l1: Tensor, two: Tensor, l2: Tensor) -> None:
    """`one` becomes the joined attention, and `l1` its logsumexp.

    Args:
        one, two: [B, H, C, D]. Columns lie side by side.
        l1: fp32 [B, H, C]. Tokens lie side by side.
        l2: the same, contiguous.
    """
    batch, heads, tokens, dim = one.shape
    if one.numel() == 0:
        return
    block = triton.next_power_of_2(dim)
    tile_tokens = max(1, _ELEMENTS // block)
    with on_device(one):
        _merge_kernel[(heads, triton.cdiv(tokens, tile_tokens), batch)](
            one,
            l1,
            two,
            l2,
            tokens,
            *one.stride()[:3],
            *two.stride()[:3],
            *l1.stride()[:2],
            D=dim,
            BLOCK=block,
            TOKENS=tile_tokens,
            num_warps=_WARPS,
        )
