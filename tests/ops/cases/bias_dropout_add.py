# SPDX-License-Identifier: Apache-2.0
"""bias_dropout_add, in place and backward: cases, and bounds from float64 under the reference's mask."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.numerics.dropout import dropout_keep, drops, keep_scale
from lorakernels.ops import Dropout
from tests.ops.contract import (
    BF16,
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
)


def exact_branch(x: Tensor, dropout: Dropout | None) -> Tensor:
    """mask ⊙ x / (1 − p) in float64."""
    if dropout is None:
        return x.double()
    return torch.where(dropout_keep(dropout, *x.shape), x.double(), 0.0) * keep_scale(dropout.p)


def forward(
    cols: int,
    dtype: torch.dtype,
    bias: torch.dtype | None,
    residual: bool,
    origin: tuple[int, int] | None,
    m: Made,
) -> Arguments:
    """`origin`: row0 and col0 of the mask's window; None: no dropout."""
    x, add = m.randn(m.rows, cols, dtype=dtype), m.randn(m.rows, cols, dtype=dtype)
    given = None if bias is None else m.randn(cols, dtype=bias)
    dropout = None if origin is None else m.dropout(0.3, *origin)
    return x, given, add if residual else None, dropout


def bound(call: Call) -> Iterator[Checked]:
    """One rounding at the store; the sum with the bias, the product with 1 / (1 − p) and the last sum before it: 4."""
    x, bias, residual, dropout = call.before
    branch = x.double() if bias is None else x.double() + bias.double()
    size = x.double().abs() if bias is None else x.double().abs() + bias.double().abs()
    value, size = exact_branch(branch, dropout), exact_branch(size, dropout)
    if residual is not None:
        value, size = value + residual.double(), size + residual.double().abs()
    found = call.results[0] if call.results else call.after[2]
    yield near("out", found, value, size, 4)


def backward(
    cols: int, dtype: torch.dtype, bias: torch.dtype | None, origin: tuple[int, int] | None, m: Made
) -> Arguments:
    dropout = None if origin is None else m.dropout(0.3, *origin)
    return m.randn(m.rows, cols, dtype=dtype), dropout, bias


def bound_backward(call: Call) -> Iterator[Checked]:
    """dx: one rounding and a product before it. dbias: a sum of M terms of dx before it is rounded."""
    dout, dropout, bias_dtype = call.before
    dx, dbias = call.results
    value = exact_branch(dout, dropout)
    yield near("dx", dx, *([value, value.abs()] if drops(dropout) else [value.new_empty(0)] * 2), 2)
    terms = value if bias_dtype is not None else value.new_empty(len(dout), 0)
    yield near("dbias", dbias, terms.sum(0), terms.abs().sum(0), 2 + len(dout))


def large(device: torch.device | str) -> Large:
    x = torch.zeros(2**17 + 1, 2**14, dtype=BF16, device=device)
    x[-1].normal_()
    made = Made(device, 1)
    calls = ((t, None, None, made.dropout(0.3, x.shape[0] - t.shape[0])) for t in (x, x[-1:]))
    return Large(*calls)


WHOLE = (0, 0)
X = torch.ones(4, 6)
VALID = {"x": X, "bias": torch.ones(6), "residual": X, "dropout": None}
SLOT = torch.tensor([5, 9])
REFUSALS = {
    "x": Refusal({"x": X.int()}, TypeError, "x must be float32, bfloat16 or float16, found torch.int32"),
    "bias": Refusal({"bias": torch.ones(5)}, ValueError, r"bias must have shape \[6\], found \(5,\)"),
    "residual": Refusal(
        {"residual": torch.ones(1, 6)}, ValueError, r"residual must have x's shape \(4, 6\), found \(1, 6\)"
    ),
    "p": Refusal({"dropout": Dropout(SLOT, 1.0, 0)}, ValueError, r"p must be in \[0, 1\), found 1.0"),
    "slot": Refusal({"dropout": Dropout(SLOT.float(), 0.1, 0)}, ValueError, r"slot must be int64 \[2\] on cpu"),
}  # fmt: skip
CONTRACTS = (
    Contract(
        ops.bias_dropout_add,
        {
            "shard": Case(partial(forward, 24, FP32, FP32, True, (2, 3))),
            "bare": Case(partial(forward, 24, BF16, None, False, None)),
        },
        bound,
        {
            **{
                f"{m}x{n} {dtype}": Case(partial(forward, n, dtype, FP32, True, WHOLE), m)
                for m, n in ((1, 1), (130, 513), (1000, 24))
                for dtype in (FP32, BF16, FP16)
            },
            "64x512 shard": Case(partial(forward, 512, BF16, BF16, True, (5, 16)), 64),
            "2050x8": Case(partial(forward, 8, FP16, None, True, WHOLE), 2050),
        },
        VALID,
        REFUSALS,
        large,
    ),
    Contract(
        ops.bias_dropout_add_,
        {"no bias": Case(partial(forward, 24, FP32, None, True, WHOLE))},
        bound,
        {"130x513": Case(partial(forward, 513, BF16, FP32, True, (1, 7)), 130)},
        VALID,
        REFUSALS,
    ),
    Contract(
        ops.bias_dropout_add_backward,
        {
            "bias": Case(partial(backward, 24, FP32, BF16, WHOLE)),
            "no mask": Case(partial(backward, 24, BF16, FP32, None)),
        },
        bound_backward,
        {
            f"{m}x{n} {dtype}": Case(partial(backward, n, dtype, bias, (1, 7)), m)
            for m, n in ((1, 1), (130, 513), (2050, 8))
            for dtype, bias in ((FP32, FP32), (BF16, None), (FP16, BF16))
        },
        {"dout": X, "dropout": None, "bias_dtype": None},
        {"slot": REFUSALS["slot"]},
    ),
)  # fmt: skip
