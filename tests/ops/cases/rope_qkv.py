# SPDX-License-Identifier: Apache-2.0
"""RoPE's three ops: cases for every way attention may leave its gradients, bounds from the formula."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels import ops
from tests.ops.contract import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Large,
    Made,
    Refusal,
    near,
    quantized_in_blocks,
    rounded_again,
    same,
)


class Heads(NamedTuple):
    """T tokens of each sequence, H and Hk heads of D columns; `own`: angles for every token, not for T positions."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    own: bool = False

    def __str__(self) -> str:
        t, h, hk, d, own = self
        return f"T{t} H{h} Hk{hk} D{d}{' own angles' if own else ''}"


LAYOUTS = {
    "tokens outside": lambda d: d.transpose(1, 2).contiguous().transpose(1, 2),
    "heads outside": lambda d: d.contiguous(),
    "one of three": lambda d: torch.stack((d, d, d), 3)[:, :, :, 1],
    "padded": lambda d: torch.nn.functional.pad(d, (1, 8))[..., 1:-8],
}  # fmt: skip


def angles(heads: Heads, dtype: torch.dtype, m: Made) -> tuple[Tensor, Tensor]:
    """Of the two halves of a head, which differ, as they may."""
    rows = heads.tokens * (m.rows if heads.own else 1)
    angle = 6.3 * m.rand(rows, heads.dim)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def forward(heads: Heads, dtype: torch.dtype, angle_dtype: torch.dtype, m: Made) -> Arguments:
    """M sequences."""
    width = (heads.heads + 2 * heads.kv_heads) * heads.dim
    qkv = m.randn(m.rows * heads.tokens, width, dtype=dtype)
    return qkv, *angles(heads, angle_dtype, m), heads.heads, heads.kv_heads


def across(forward: Arguments) -> Arguments:
    """qkv column by column."""
    qkv, *others = forward
    return qkv.t().contiguous().t(), *others


def backward(heads: Heads, dtype: torch.dtype, layouts: str, m: Made) -> Arguments:
    """`layouts`: of dq, dk and dv, or one for all."""
    names = layouts.split(", ") * (1 if "," in layouts else 3)
    counts = heads.heads, heads.kv_heads, heads.kv_heads
    parts = [
        LAYOUTS[name](m.randn(m.rows, count, heads.tokens, heads.dim, dtype=dtype))
        for name, count in zip(names, counts, strict=True)
    ]
    multiplier = torch.tensor([1.0, 0.37, 2.5], device=m.device)
    return *parts, *angles(heads, dtype, m), multiplier


def rows_of(x: Tensor, *angles: Tensor) -> list[Tensor]:
    """Both angles in float64 for the rows of x [M, heads, D]."""
    row = torch.arange(len(x), device=x.device) % len(angles[0])
    return [t.double()[row].unsqueeze(1) for t in angles]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(value, size) in float64 of x [M, heads, D], turned as Transformers' apply_rotary_pos_emb does."""
    c, s = rows_of(x, cos, sin)
    x1, x2 = x.double().chunk(2, -1)
    straight, rotated = x.double() * c, torch.cat((-x2, x1), -1) * s
    return straight + rotated, straight.abs() + rotated.abs()


def turned_back(d: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`turned`'s transpose."""
    c, s = rows_of(d, cos, sin)
    y1, y2 = (d.double() * s).chunk(2, -1)
    straight, rotated = d.double() * c, torch.cat((y2, -y1), -1)
    return straight + rotated, straight.abs() + rotated.abs()


def bound(call: Call) -> Iterator[Checked]:
    """One rounding at the store, and two products and a sum in fp32: 4. v stays as it is."""
    before, cos, sin, heads, kv_heads = call.before
    count = heads + kv_heads
    split = (len(before), count + kv_heads, cos.shape[1])
    old, new = before.view(split), call.after[0].view(split)
    value, size = turned(old[:, :count], cos, sin)
    yield near("q, k", new[:, :count], value, size, 4, rounded_again(call, before.dtype))
    yield same("v", new[:, count:], old[:, count:])


def bound_backward(call: Call) -> Iterator[Checked]:
    """As forward, and a product with the multiplier."""
    dq, dk, dv, cos, sin, multiplier = call.before
    rows, dim = dq.shape[0] * dq.shape[2], dq.shape[3]
    flat = [d.transpose(1, 2).reshape(rows, d.shape[1], dim) for d in (dq, dk, dv)]
    parts = [*(turned_back(d, cos, sin) for d in flat[:2]), (flat[2].double(), flat[2].abs())]
    factors = multiplier.double()
    value, size = (
        torch.cat([part[i] * m for part, m in zip(parts, factors, strict=True)], 1).flatten(1)
        for i in range(2)
    )
    yield near("dqkv", call.results[0], value, size, 4, rounded_again(call, dq.dtype))


def in_blocks(
    heads: Heads,
    dtype: torch.dtype,
    fp8: torch.dtype,
    power: bool,
    m: Made,
    layouts: str = "tokens outside",
) -> Arguments:
    return *backward(heads, dtype, layouts, m), fp8, power


def bound_quantize(call: Call) -> Iterator[Checked]:
    """dqkv as without bytes; these bit for bit, given dqkv."""
    *before, fp8, power = call.before
    dqkv, *found = call.results
    yield from bound_backward(call._replace(before=tuple(before), results=(dqkv,)))
    yield from quantized_in_blocks("d8", dqkv, (found[0], found[1]), fp8, power)


def large(device: torch.device | str) -> Large:
    heads = Heads(1, 64, 8, 128)
    qkv = torch.zeros(2**18, 80 * 128, dtype=FP16, device=device)
    qkv[-1].normal_()
    turn = *angles(heads, FP16, Made(device, 1)), heads.heads, heads.kv_heads
    return Large((qkv, *turn), (qkv[-1:].clone(), *turn))


SMALL = Heads(5, 2, 1, 4)
EDGES = [
    (1, Heads(1, 1, 1, 2)),
    (2, Heads(7, 5, 2, 24)),
    (3, Heads(33, 32, 8, 128)),
    (2, Heads(65, 64, 8, 128, True)),
    (1, Heads(19, 24, 24, 96)),
    (2, Heads(16, 9, 3, 256)),
]  # fmt: skip
ODD, LLAMA = EDGES[1][1], EDGES[2][1]
FORWARD = Contract(
    ops.rope_qkv_,
    {
        "sequences": Case(partial(forward, SMALL, FP32, FP32)),
        "column by column": Case(lambda m: across(forward(SMALL, BF16, FP32, m)), why_not="qkv must be contiguous"),
    },
    bound,
    {
        **{f"B{b} {heads}": Case(partial(forward, heads, BF16, BF16), b) for b, heads in EDGES},
        **{
            f"B2 {ODD} {x} {angle}": Case(partial(forward, ODD, x, angle), 2)
            for x, angle in ((BF16, FP32), (FP16, FP16), (FP32, FP32))
        },
        "B1 fp16": Case(partial(forward, EDGES[0][1], FP16, FP16), 1),
    },
    {"qkv": torch.ones(4, 24), "cos": torch.ones(2, 8), "sin": torch.ones(2, 8), "num_heads": 1, "num_kv_heads": 1},
    {
        "heads": Refusal({"num_heads": 5}, ValueError, "found 24 for num_heads = 5, num_kv_heads = 1"),
        "tokens": Refusal(
            {"cos": torch.ones(3, 8)}, ValueError, r"cos must be \[T, 8\] .* divides the 4 tokens, found \[3, 8\]"
        ),
        "sin": Refusal({"sin": torch.ones(1, 8)}, ValueError, r"sin must be like cos, torch.float32 \(2, 8\)"),
        "odd D": Refusal(
            {"qkv": torch.ones(4, 9), "cos": torch.ones(2, 3), "sin": torch.ones(2, 3)},
            ValueError,
            "D must be even, found 3",
        ),
    },
    large,
)  # fmt: skip
GRAD = torch.ones(1, 2, 4, 8)
BACKWARD = Contract(
    ops.rope_qkv_backward,
    {
        "sequences": Case(partial(backward, SMALL, BF16, "tokens outside")),
        "layouts differ": Case(partial(backward, SMALL, FP32, "tokens outside, heads outside, padded")),
    },
    bound_backward,
    {
        **{
            f"B{b} {heads} {layout}": Case(partial(backward, heads, BF16, layout), b)
            for b, heads in EDGES[1:3]
            for layout in LAYOUTS
        },
        **{
            f"B{b} {heads} heads outside": Case(partial(backward, heads, BF16, "heads outside"), b)
            for b, heads in (EDGES[0], *EDGES[3:])
        },
        **{f"B2 {ODD} {dtype}": Case(partial(backward, ODD, dtype, "tokens outside"), 2) for dtype in (FP16, FP32)},
        "B3, layouts differ": Case(partial(backward, LLAMA, BF16, "tokens outside, heads outside, padded"), 3),
    },
    {
        "dq": GRAD,
        "dk": GRAD,
        "dv": GRAD,
        "cos": torch.ones(4, 8),
        "sin": torch.ones(4, 8),
        "multiplier": torch.ones(3),
    },
    {
        "a stride that it would misread": Refusal(
            {"dk": GRAD.mT.contiguous().mT}, ValueError, "dk must have a contiguous last dimension"
        ),
        "multiplier": Refusal({"multiplier": torch.ones(2)}, ValueError, r"multiplier must be \[3\]"),
    },
)  # fmt: skip
WHOLE = [
    (2, Heads(5, 4, 2, 64)),
    (1, Heads(9, 3, 1, 128)),
    (3, Heads(33, 32, 8, 128)),
    (2, Heads(16, 9, 3, 256)),
    (2, Heads(7, 12, 4, 32)),
    (2, Heads(5, 16, 8, 16)),
]  # fmt: skip
ACROSS = [
    EDGES[1],
    (1, Heads(7, 8, 8, 96)),
    (1, Heads(7, 32, 32, 8)),
    (1, Heads(3, 2, 1, 64)),
    (1, Heads(3, 1, 1, 512)),
]
QUANTIZE = Contract(
    ops.rope_qkv_backward_quantize,
    {
        "two heads in a block": Case(partial(in_blocks, WHOLE[0][1], FP32, E4M3, False), 2),
        "a head in a block": Case(partial(in_blocks, WHOLE[1][1], FP16, E5M2, True), 2),
        "a head in two blocks": Case(partial(in_blocks, Heads(3, 2, 1, 256), FP32, E5M2, True), 2),
        "a block of q and k": Case(partial(in_blocks, SMALL, FP32, E4M3, False), 3),
    },
    bound_quantize,
    {
        **{
            f"B{b} {heads} {layout}": Case(partial(in_blocks, heads, BF16, E4M3, False, layouts=layout), b)
            for b, heads in WHOLE
            for layout in LAYOUTS
        },
        **{
            f"B{b} {heads} {dtype}": Case(partial(in_blocks, heads, dtype, E5M2, dtype == FP16), b)
            for b, heads in WHOLE[:2] + WHOLE[4:]
            for dtype in (FP16, FP32)
        },
        **{f"B{b} {heads} apart": Case(partial(in_blocks, heads, BF16, E4M3, True), b) for b, heads in ACROSS},
    },
    {**BACKWARD.valid, "fp8_dtype": E4M3, "power_of_two": False},
    {
        "fp8_dtype": Refusal({"fp8_dtype": FP16}, TypeError, "fp8_dtype must be float8_e4m3fn or float8_e5m2, found"),
        "multiplier": Refusal({"multiplier": torch.ones(2)}, ValueError, r"multiplier must be \[3\]"),
    },
)  # fmt: skip
CONTRACTS = (FORWARD, BACKWARD, QUANTIZE)
