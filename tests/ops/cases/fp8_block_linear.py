# SPDX-License-Identifier: Apache-2.0
"""fp8_block_linear: cases, and a bound from float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.numerics.segments import rows_times
from lorakernels.ops import Scaled, SideBySide, Up, Weight
from lorakernels.ops.hardware import SEVERAL
from lorakernels.ops.register import Op
from tests.ops.contract import (
    BF16,
    E4M3,
    FP16,
    FP32,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Made,
    Refusal,
    near,
    rounded_again,
)


def scales(m: Made, *shape: int) -> Tensor:
    """From 1/4 to 4, so that a scale of another block is far off."""
    return 4.0 ** (2 * m.rand(*shape) - 1)


def blocks(size: int) -> int:
    return -(-size // 128)


def wide_rows(x: Scaled, fp8: torch.dtype = E4M3) -> Tensor:
    """float64 [M, K], one element after the other by its own index."""
    assert x.scale_inv is not None
    of = torch.arange(x.data.shape[1], device=x.data.device) // 128
    return x.data.view(fp8).double() * x.scale_inv.double()[of].t()


def wide_weight(weight: Weight) -> Tensor:
    """float64 [N, K]."""
    assert weight.scale_inv is not None
    rows, cols = (torch.arange(n, device=weight.data.device) // 128 for n in weight.data.shape)
    return weight.data.view(E4M3).double() * weight.scale_inv.double()[rows][:, cols]


def near_block_gemm(
    op: Op[..., Any, Any], call: Call, exact: Tensor, size: Tensor, depth: int
) -> Checked:
    """One rounding at the store, and fp32 sums of `depth` products.

    On a GPU each block's sum of 128 products stays on the FP8 tensor cores, which keep 13 bits below the largest term
    (DeepSeek-V3 report, 3.3.2, found 14). Four additions of 32 products lose 2⁻¹¹ of the largest sum of a block at
    most, and the magnitudes of a block's products bound that. `size` is their sum over all blocks. A cut product loses
    2⁻¹³ of the largest of its block, which is within the same magnitudes, for each of 128.

    PyTorch's way rounds both operands to 16 bits, which `rounded_again` has where a kernel of ours comes before it.
    """
    found = call.results[0]
    lost = 0.0
    if found.is_cuda:
        of_torch = op.implementations[0].name == "torch"
        lost = 3 * torch.finfo(BF16).eps / 2 if of_torch else 2.0**-10
    return near("y", found, exact, size, depth + 4, coarse=rounded_again(call, BF16) + lost)


class Linear(NamedTuple):
    """Makes y's operands. Rank 0: no adapter."""

    n: int
    k: int
    rank: int
    bias: torch.dtype | None = FP32
    b: torch.dtype = FP32
    out: torch.dtype = BF16
    scaling: float = 2.0
    residual: bool = False
    adapters: int = 0
    diagonal: tuple[tuple[int, int], ...] = ()  # (N_i, R_i) on B's diagonal: N and R together

    def __call__(self, m: Made) -> Arguments:
        n, k, rank, bias, b, out, scaling, has_residual, adapters, diagonal = self
        x = Scaled(m.fp8(m.rows, k), scales(m, blocks(k), m.rows))
        weight = Weight(m.fp8(n, k), scales(m, blocks(n), blocks(k)) / k**0.5)
        up = None
        if rank:
            each = (adapters,) if adapters else ()
            lora_B = (m.randn(*each, n, rank) / rank**0.5).to(b)
            if diagonal:
                lora_B *= torch.block_diag(*(m.one.expand(block) for block in diagonal))
            up = Up(lora_B, m.randn(m.rows, rank, dtype=out), scaling)
        given = None if bias is None else m.randn(n, dtype=bias)
        residual = m.randn(m.rows, n, dtype=out) if has_residual else None
        side = (SideBySide(*map(list, zip(*diagonal, strict=True))),) if diagonal else ()
        return x, weight, given, up, out, residual, *side


def bound(call: Call) -> Iterator[Checked]:
    """`near_block_gemm`; B is rounded to s's dtype, and every term is added in fp32."""
    x, weight, bias, up, _, residual, *_ = call.before
    d, w = wide_rows(x), wide_weight(weight).t()
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
    yield near_block_gemm(ops.fp8_block_linear, call, exact, size, depth)


BYTES = torch.zeros(4, 130, dtype=torch.uint8)
W = Weight(torch.zeros(5, 130, dtype=torch.uint8), torch.ones(1, 2))
CONTRACTS = (
    Contract(
        ops.fp8_block_linear,
        {
            "blocks": Case(Linear(256, 512, 3), 8),
            "part of a block, residual": Case(Linear(144, 208, 0, bias=None, residual=True)),
            "fp16": Case(Linear(16, 48, 5, b=FP16, out=FP16)),
            "diagonal": Case(Linear(144, 208, 8, diagonal=((16, 3), (128, 5))), 20),
            "fp32, odd sizes": Case(Linear(131, 130, 3, out=FP32), why_not="multiples of 16"),
            "several": Case(Linear(144, 208, 3, residual=True, adapters=2), 6, SEVERAL, is_traced=True),
        },
        bound,
        {
            "512x512x512": Case(Linear(512, 512, 16), 512),
            "300x272x1536": Case(Linear(272, 1536, 16, residual=True), 300),
            "one row": Case(Linear(16, 16, 1, bias=BF16, scaling=0.5), 1),
            "ragged": Case(Linear(272, 528, 60, residual=True), 300),
            "rank 300": Case(Linear(1024, 1024, 300), 65),
            "q, k, v": Case(Linear(10240, 272, 192, diagonal=((8192, 64), (1024, 64), (1024, 64))), 2000),
            "diagonal, ragged": Case(
                Linear(1328, 144, 116, diagonal=((640, 48), (16, 0), (672, 68)), residual=True), 300
            ),
            "SmolLM2's down": Case(Linear(576, 1536, 16, bias=None), 777),
            "no adapter": Case(Linear(8208, 1040, 0, bias=FP16, out=FP16), 1000),
            "8 adapters": Case(Linear(1040, 528, 17, adapters=8), 1000, SEVERAL),
            "3 adapters, odd sizes": Case(Linear(131, 130, 3, out=FP32, adapters=3), 9, SEVERAL),
        },
        {
            "x": Scaled(BYTES, torch.ones(2, 4)),
            "weight": W,
            "bias": None,
            "up": None,
            "out_dtype": FP32,
            "residual": None,
        },
        {
            "a diagonal of other sizes": Refusal(
                {"up": Up(torch.ones(5, 3), torch.ones(4, 3), 1.0), "side": SideBySide([2, 2], [1, 2])},
                ValueError,
                r"sum to lora_B's \[5, 3\], found \[2, 2\] and \[1, 2\]",
            ),
            "scales of rows": Refusal(
                {"x": Scaled(BYTES, torch.ones(4, 2))},
                ValueError,
                r"x_scale_inv must be float32 \[2, 4\], found torch.float32 \[4, 2\]",
            ),
            "scales of another block": Refusal(
                {"weight": W._replace(scale_inv=torch.ones(1, 3))},
                ValueError,
                r"weight_scale_inv must be float32 \[1, 2\], found torch.float32 \[1, 3\]",
            ),
            "weight": Refusal(
                {"weight": Weight(torch.zeros(5, 6, dtype=torch.uint8), torch.ones(1, 1))},
                ValueError,
                r"weight must be \[N, 130\], found \[5, 6\]",
            ),
            "residual": Refusal(
                {"residual": torch.ones(4, 6)}, ValueError, r"residual must be \[4, 5\], found \[4, 6\]"
            ),
            "bias": Refusal({"bias": torch.ones(4)}, ValueError, r"bias must be \[5\], found \[4\]"),
            "lora_B": Refusal(
                {"up": Up(torch.ones(5, 2), torch.ones(4, 3), 1.0)},
                ValueError,
                r"lora_B must be \[5, 3\], found \[5, 2\]",
            ),
            "adapters": Refusal(
                {"up": Up(torch.ones(3, 5, 2), torch.ones(4, 2), 1.0)},
                ValueError,
                r"lora_B \[3, 5, 2\] has 3 adapters, which must divide the rows, found 4",
            ),
        },
    ),
)  # fmt: skip
