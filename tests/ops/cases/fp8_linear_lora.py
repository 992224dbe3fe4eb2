# SPDX-License-Identifier: Apache-2.0
"""fp8_linear_lora: cases, and a bound from float64."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from lorakernels import ops
from lorakernels.numerics.segments import rows_times
from lorakernels.ops import Scaled, SideBySide, Up, Weight
from lorakernels.ops.hardware import PLAIN, SEVERAL
from tests.ops.contract import (
    BF16,
    FP16,
    FP32,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Made,
    Refusal,
    blocks_of,
    near_gemm,
    wide,
)


class Linear(NamedTuple):
    """Makes y's operands: its entries are of order 1 to 10, its parts of like size. Rank 0: no adapter.

    `in_blocks`: each block of 128 has a scale.
    """

    n: int
    k: int
    rank: int
    bias: torch.dtype | None = FP32
    b: torch.dtype = FP32
    out: torch.dtype = BF16
    scaling: float = 2.0
    by_row: bool = False
    residual: bool = False
    split: bool = False
    adapters: int = 0
    diagonal: tuple[tuple[int, int], ...] = ()  # (N_i, R_i) on B's diagonal: N and R together
    in_blocks: bool = False

    def __call__(self, m: Made) -> Arguments:
        n, k, rank, bias, b, out, scaling, by_row, *_ = self
        x = Scaled(m.fp8(m.rows, k), m.one * 1.5)
        weight = Weight(m.fp8(n, k), (m.rand(n if by_row else 1) + 0.5) / k**0.5)
        if self.in_blocks:
            x = x._replace(scale_inv=m.scales(blocks_of(k), m.rows))
            weight = weight._replace(scale_inv=m.scales(blocks_of(n), blocks_of(k)) / k**0.5)
        up = None
        if rank:
            each = (self.adapters,) if self.adapters else ()
            lora_B = (m.randn(*each, n, rank) / rank**0.5).to(b)
            if self.diagonal:
                lora_B *= torch.block_diag(*(m.one.expand(block) for block in self.diagonal))
            up = Up(lora_B, m.randn(m.rows, rank, dtype=out), scaling)
        given = None if bias is None else m.randn(n, dtype=bias)
        residual = m.randn(m.rows, n, dtype=out) if self.residual else None
        side = (SideBySide(*map(list, zip(*self.diagonal, strict=True))),) if self.diagonal else ()
        return x, weight, given, up, out, self.split, residual, *side


def diagonal(k: int, *each: tuple[int, int], **more: Any) -> Linear:
    """Of several projections."""
    return Linear(sum(n for n, _ in each), k, sum(r for _, r in each), diagonal=each, **more)


in_blocks = partial(Linear, in_blocks=True)


def plain(m: Made) -> Arguments:
    return Scaled(m.randn(m.rows, 24)), Weight(m.randn(10, 24)), None, None, FP32, False, None


def bound(call: Call) -> Iterator[Checked]:
    """`near_gemm`; B is rounded to s's dtype, and every term is added in fp32."""
    x, weight, bias, up, _, split, residual, *_ = call.before
    d, w = wide(x), wide(Weight(weight.data, weight.scale_inv)).t()
    exact, size = d @ w, d.abs() @ w.abs()
    depth = x.data.shape[1]
    if up is not None and up.s is not None:
        s, b = up.s.double(), up.lora_B.to(up.s.dtype).double().mT
        exact = exact + up.scaling * rows_times(s, b)
        size = size + abs(up.scaling) * rows_times(s.abs(), b.abs())
        depth += b.shape[-2]
    for term in (bias, residual):
        if term is not None:
            exact, size = exact + term.double(), size + term.double().abs()
    yield near_gemm(call, (d, w), exact, size, depth, split)


IN_BLOCKS = {
    "in blocks": Case(in_blocks(256, 512, 3), 8),
    "in blocks, part of one, residual": Case(in_blocks(144, 208, 0, bias=None, residual=True)),
    "in blocks, fp16": Case(in_blocks(16, 48, 5, b=FP16, out=FP16)),
    "in blocks, diagonal": Case(diagonal(208, (16, 3), (128, 5), in_blocks=True), 20),
    "in blocks, fp32, odd sizes": Case(in_blocks(131, 130, 3, out=FP32), why_not="multiples of 16"),
    "in blocks, several": Case(in_blocks(144, 208, 3, residual=True, adapters=2), 6, SEVERAL, is_traced=True),
}  # fmt: skip
SHAPES_IN_BLOCKS = {
    "in blocks, 512x512x512": Case(in_blocks(512, 512, 16), 512),
    "in blocks, 300x272x1536": Case(in_blocks(272, 1536, 16, residual=True), 300),
    "in blocks, one row": Case(in_blocks(16, 16, 1, bias=BF16, scaling=0.5), 1),
    "in blocks, ragged": Case(in_blocks(272, 528, 60, residual=True), 300),
    "in blocks, rank 300": Case(in_blocks(1024, 1024, 300), 65),
    "in blocks, q, k, v": Case(diagonal(272, (8192, 64), (1024, 64), (1024, 64), in_blocks=True), 2000),
    "in blocks, diagonal, ragged": Case(
        diagonal(144, (640, 48), (16, 0), (672, 68), residual=True, in_blocks=True), 300
    ),
    "in blocks, SmolLM2's down": Case(in_blocks(576, 1536, 16, bias=None), 777),
    "in blocks, no adapter": Case(in_blocks(8208, 1040, 0, bias=FP16, out=FP16), 1000),
    "in blocks, 8 adapters": Case(in_blocks(1040, 528, 17, adapters=8), 1000, SEVERAL),
    "in blocks, 3 adapters, odd sizes": Case(in_blocks(131, 130, 3, out=FP32, adapters=3), 9, SEVERAL),
}  # fmt: skip
SQUARE = torch.ones(4, 6)
TERMS = {
    **{
        f"blocks {rows} and {ranks}": Refusal(
            {"up": Up(torch.ones(5, 3), torch.ones(4, 3), 1.0), "side": SideBySide(rows, ranks)},
            ValueError,
            re.escape(f"none negative, and sum to lora_B's [5, 3], found {rows} and {ranks}"),
        )
        for rows, ranks in (([2, 2], [1, 2]), ([2, 3], [1, 1]), ([5], [1, 2]), ([6, -1], [1, 2]))
    },
    "blocks of no adapter": Refusal(
        {"side": SideBySide([2, 3], [1, 2])}, ValueError, "of one adapter's lora_B, which is not given"
    ),
    "residual": Refusal({"residual": SQUARE}, ValueError, r"residual must be \[4, 5\], found \[4, 6\]"),
    "bias": Refusal({"bias": torch.ones(4)}, ValueError, r"bias must be \[5\], found \[4\]"),
    "lora_B": Refusal(
        {"up": Up(torch.ones(5, 2), torch.ones(4, 3), 1.0)}, ValueError, r"lora_B must be \[5, 3\], found \[5, 2\]"
    ),
    "adapters": Refusal(
        {"up": Up(torch.ones(3, 5, 2), torch.ones(4, 2), 1.0)},
        ValueError,
        r"lora_B \[3, 5, 2\] has 3 adapters, which must divide the rows, found 4",
    ),
}  # fmt: skip
BYTES, SCALES = torch.zeros(4, 130, dtype=torch.uint8), torch.ones(2, 4)
W = Weight(torch.zeros(5, 130, dtype=torch.uint8), torch.ones(1, 2))
BLOCKS = {"x": Scaled(BYTES, SCALES), "weight": W}
REFUSALS = {
    **TERMS,
    **{f"in blocks, {what}": r._replace(change=BLOCKS | r.change) for what, r in TERMS.items()},
    "scales": Refusal(
        {"weight": Weight(torch.ones(5, 6), torch.ones(3))},
        ValueError,
        r"weight_scale_inv must be \[1\] or \[5\], found \[3\]",
    ),
    "scales of rows": Refusal(
        BLOCKS | {"x": Scaled(BYTES, torch.ones(4, 2))},
        ValueError,
        r"x_scale_inv must be float32 \[2, 4\], found torch.float32 \[4, 2\]",
    ),
    "scales of another block": Refusal(
        BLOCKS | {"weight": W._replace(scale_inv=torch.ones(1, 3))},
        ValueError,
        r"weight_scale_inv must be float32 \[1, 2\], found torch.float32 \[1, 3\]",
    ),
    "blocks of x alone": Refusal(
        BLOCKS | {"weight": W._replace(scale_inv=torch.ones(1))},
        ValueError,
        r"weight_scale_inv must be float32 \[1, 2\], found torch.float32 \[1\]",
    ),
    "blocks of the weight alone": Refusal(
        BLOCKS | {"x": Scaled(BYTES)}, ValueError, r"x_scale_inv must be float32 \[2, 4\], found None"
    ),
    "weight": Refusal(
        BLOCKS | {"weight": Weight(torch.zeros(5, 6, dtype=torch.uint8), torch.ones(1, 1))},
        ValueError,
        r"weight must be \[N, 130\], found \[5, 6\]",
    ),
}  # fmt: skip
CONTRACTS = (
    Contract(
        ops.fp8_linear_lora,
        {
            "fp8": Case(Linear(16, 32, 3)),
            "scales, residual": Case(Linear(16, 32, 0, bias=None, by_row=True, residual=True)),
            "fp16, split": Case(Linear(16, 48, 5, b=FP16, out=FP16, split=True)),
            "several": Case(Linear(16, 32, 5, residual=True, by_row=True, adapters=2), 256),
            "few rows of several": Case(Linear(16, 32, 3, adapters=3), 6, why_not="multiple of 128 for each"),
            **IN_BLOCKS,
            "diagonal": Case(diagonal(32, (16, 3), (8, 0), (24, 5)), 20),
            "diagonal, plain": Case(diagonal(24, (10, 3), (8, 2)), why_not="N = 18 and K = 24"),
            "plain": Case(plain, why_not=PLAIN),
            "odd sizes": Case(Linear(10, 24, 3), why_not="N = 10 and K = 24"),
            "fp32": Case(Linear(16, 32, 3, out=FP32), why_not="out_dtype"),
        },
        bound,
        {
            "512x512x512": Case(Linear(512, 512, 16), 512),
            "one row": Case(Linear(16, 16, 1, bias=BF16, scaling=0.5), 1),
            "ragged": Case(Linear(272, 528, 60, by_row=True, residual=True), 300),
            "rank 300, split": Case(Linear(1024, 1024, 300, split=True), 65),
            "no adapter": Case(Linear(8208, 1040, 0, bias=FP16, out=FP16), 1000),
            **{
                f"{j} adapters, {m} rows, r{r}": Case(Linear(n, k, r, residual=bool(r % 2), adapters=j), m)
                for j, m, n, k, r in ((1, 128, 16, 16, 1), (3, 768, 1040, 272, 48), (8, 4096, 4096, 1024, 17))
            },
            # one step of ranks, and several; blocks that end inside of a tile, or lack; five, which csrc does not take
            **{
                f"{m} rows, diagonal {each}{' split' if split else ''}": Case(diagonal(k, *each, split=split), m)
                for m, k, each in (
                    (300, 144, ((640, 48), (16, 0), (400, 48), (272, 20))),
                    (2000, 256, ((8192, 64), (1024, 64), (1024, 64))),
                    (2100, 144, ((4136, 64), (4072, 64))),
                    (1000, 80, ((1024, 0), (2048, 128), (1024, 200))),
                    (130, 48, ((16, 8), (16, 8), (16, 8), (16, 8), (16, 8))),
                )
                for split in (False, True)
            },
            **SHAPES_IN_BLOCKS,
            "diagonal in fp16 with a residual": Case(
                diagonal(160, (2048, 72), (2064, 56), b=FP16, out=FP16, residual=True, by_row=True), 1030
            ),
            "a tiny scaling": Case(Linear(64, 96, 4, scaling=1e-30), 40),
        },
        {
            "x": Scaled(SQUARE),
            "weight": Weight(torch.ones(5, 6)),
            "bias": None,
            "up": None,
            "out_dtype": FP32,
            "split": False,
            "residual": None,
        },
        REFUSALS,
    ),
)  # fmt: skip
