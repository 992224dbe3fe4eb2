# SPDX-License-Identifier: Apache-2.0
"""rms_norm_quantize and rms_norm_backward: cases, and bounds from the formulas of ops/rms_norm.py in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from lorakernels import ops
from lorakernels.kernels.tune_layer import MAX_NORM_COLUMNS
from lorakernels.ops import Scaling
from tests.ops.contract import (
    BF16,
    E4M3,
    FP16,
    FP32,
    STATES,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Large,
    Made,
    Refusal,
    near,
    near_fp8,
    quantized,
    quantized_in_blocks,
    rounded_again,
    same,
)

EPS = 1e-5


def forward(
    k: int,
    dtype: torch.dtype,
    weight: torch.dtype,
    kind: str,
    keep: bool,
    m: Made,
    power: bool | None = None,
) -> Arguments:
    x, w = m.randn(m.rows, k, dtype=dtype), (0.5 + m.rand(k)).to(weight)
    return x, w, EPS, m.scaling(kind), keep, power


def in_blocks(k: int, dtype: torch.dtype, keep: bool, power: bool) -> Any:
    return partial(forward, k, dtype, dtype, "none", keep, power=power)


def bound(call: Call) -> Iterator[Checked]:
    """rstd: an approximate rsqrt (2⁻²²) and fp32 sums of K squares, all positive: 16 roundings.

    The rest is bit for bit: normed given rstd, x8 and the amax given normed. Where that was not kept, or PyTorch rounds
    on its own, h and normed are each rounded once.
    """
    (x, weight, eps, before, keep, power), after = call.before, call.after[3]
    normed, x8, scale_inv, rstd = call.results
    exact = (x.double().square().mean(1) + eps).rsqrt()
    yield near("rstd", rstd, exact, exact, 16)
    h = x.float() * rstd.view(-1, 1)
    stored = (weight.float() * h.to(x.dtype).float()).to(x.dtype)
    if call.roundings == 1:
        yield same("normed", normed, stored if keep else x.new_empty(0))
        if power is None:
            yield from quantized("x8", stored, (x8, scale_inv), (before, after), E4M3)
        else:
            yield from quantized_in_blocks("x8", stored, (x8, scale_inv), E4M3, power)
        return
    wide = x.double() * exact.view(-1, 1) * weight.double()
    if keep:
        yield near("normed", normed, wide, wide.abs(), 32, rounded_again(call, x.dtype))
    yield near_fp8("x8", (x8, scale_inv), wide, E4M3)


def backward(
    k: int, dtype: torch.dtype, weight: torch.dtype, residual: bool, trained: bool, m: Made
) -> Arguments:
    dnormed, x = m.randn(m.rows, k, dtype=dtype), m.randn(m.rows, k, dtype=dtype)
    rstd = (x.double().square().mean(1) + EPS).rsqrt().float()
    dresidual = m.randn(m.rows, k, dtype=dtype) if residual else None
    return dnormed, x, (0.5 + m.rand(k)).to(weight), rstd, dresidual, trained


def bound_backward(call: Call) -> Iterator[Checked]:
    """dx: one rounding at the store; fp32's in h, two products and a mean of K terms: 16. dweight: a sum of M terms."""
    *operands, dresidual, trained = call.before
    dnormed, x, weight, rstd = (t.double() for t in operands)
    r = rstd.view(-1, 1)
    h, g = x * r, dnormed * weight
    exact = r * (g - h * (g * h).mean(1, keepdim=True))
    size = r * (g.abs() + h.abs() * (g * h).abs().mean(1, keepdim=True))
    if dresidual is not None:
        exact, size = exact + dresidual.double(), size + dresidual.double().abs()
    yield near("dx", call.results[0], exact, size, 16, rounded_again(call, call.before[1].dtype))
    terms = dnormed * h if trained else dnormed.new_empty(0, 0)
    yield near("dweight", call.results[1], terms.sum(0), terms.abs().sum(0), 16)


def turned(make: Any, i: int, m: Made) -> Arguments:
    """Argument `i` of `make` column by column."""
    arguments = [*make(m)]
    arguments[i] = arguments[i].t().contiguous().t()
    return tuple(arguments)


def large(device: torch.device | str) -> Large:
    x = torch.zeros(2**17 + 1, 2**14, dtype=FP16, device=device)
    x[-1] = torch.randn(2**14, device=device).half()
    weight, made = torch.ones(2**14, dtype=FP16, device=device), Made(device, 1)
    calls = ((t, weight, EPS, made.scaling(), False) for t in (x, x[-1:]))
    return Large(*calls)


SIZES = [(1, 8), (3, 257), (300, 640), (33, 2048), (5, 5120), (2, 16384), (3, 20000)]
MIXES = [(BF16, FP32), (FP16, FP16), (FP32, BF16)]
TOO_WIDE = partial(forward, MAX_NORM_COLUMNS + 1, FP32, FP32, "unset", True)
SQUARE = torch.ones(4, 6)
FORWARD = Contract(
    ops.rms_norm_quantize,
    {
        "fp8": Case(partial(forward, 24, FP32, FP32, "kept", True)),
        "x8 only": Case(partial(forward, 24, BF16, BF16, "eval", False)),
        "plain": Case(partial(forward, 24, FP16, FP16, "none", True)),
        "blocks": Case(in_blocks(300, FP32, True, False)),
        "blocks, x8 only": Case(in_blocks(256, FP16, False, True)),
        "column by column": Case(
            partial(turned, partial(forward, 24, FP32, FP32, "unset", True), 0), 6, "x must be contiguous", True
        ),
    },
    bound,
    {
        # every shape, every mix of dtypes, every state; a combination is compiled for itself
        **{f"{m}x{k}": Case(partial(forward, k, BF16, BF16, "unset", True), m) for m, k in SIZES},
        **{f"300x640 {x} {w}": Case(partial(forward, 640, x, w, "kept", True), 300) for x, w in MIXES},
        **{
            f"33x2048 {kind} {'all' if keep else 'x8'}": Case(partial(forward, 2048, BF16, BF16, kind, keep), 33)
            for kind in STATES
            for keep in (True, False)
        },
        **{
            f"9x300 {dtype} {kind}": Case(partial(forward, 300, dtype, dtype, kind, True), 9)
            for dtype in (FP16, FP32)
            for kind in STATES
        },
        **{f"{m}x{k} blocks": Case(in_blocks(k, BF16, True, False), m) for m, k in SIZES},
        **{f"33x2048 {dtype} blocks, powers": Case(in_blocks(2048, dtype, False, True), 33) for dtype in (BF16, FP32)},
        "too wide": Case(TOO_WIDE, 2, "is above"),
        "too wide in blocks": Case(in_blocks(MAX_NORM_COLUMNS + 1, FP32, True, False), 2, "is above"),
    },
    {"x": SQUARE, "weight": torch.ones(6), "eps": EPS, "scaling": None, "keep": True},
    {
        "a vector": Refusal({"x": torch.ones(6)}, ValueError, r"x must be a matrix, found \(6,\)"),
        "integers": Refusal({"x": SQUARE.int()}, TypeError, "x must be .* found torch.int32"),
        "weight": Refusal({"weight": torch.ones(5)}, ValueError, r"weight must be \[6\] .* found \[5\]"),
        "state": Refusal(
            {"scaling": Scaling(torch.ones(4), 0, True)}, ValueError, r"state must be float32 \[history length \+ 1"
        ),
        "two recipes": Refusal(
            {"scaling": Scaling(torch.ones(2, 3), 1, True), "power_of_two": False},
            ValueError,
            "scaling must be None with power_of_two = False, where each 1 × 128 .*, found column 1",
        ),
    },
    large,
)  # fmt: skip
BACKWARD = Contract(
    ops.rms_norm_backward,
    {
        "trained": Case(partial(backward, 24, FP32, FP32, True, True)),
        "frozen": Case(partial(backward, 24, BF16, BF16, False, False)),
        "column by column": Case(
            partial(turned, partial(backward, 40, FP32, FP32, False, True), 0), 6, "dnormed must be contiguous", True
        ),
    },
    bound_backward,
    {
        **{
            f"{m}x{k} {'residual' if has else 'alone'}": Case(partial(backward, k, BF16, BF16, has, True), m)
            for m, k in SIZES
            for has in (True, False)
        },
        **{f"300x640 {x} {w}": Case(partial(backward, 640, x, w, True, True), 300) for x, w in MIXES},
        **{
            f"{m}x{k} {dtype} {has}": Case(partial(backward, k, dtype, dtype, bool(has), True), m)
            for m, k in ((1, 8), (37, 300))
            for dtype in (FP16, FP32)
            for has in ("residual", "")
        },
        "too wide": Case(partial(backward, MAX_NORM_COLUMNS + 1, FP32, FP32, True, True), 2, "is above"),
    },
    {
        "dnormed": SQUARE,
        "x": SQUARE,
        "weight": SQUARE[0],
        "rstd": torch.ones(4),
        "dresidual": SQUARE,
        "weight_grad": True,
    },
    {
        "dresidual": Refusal({"dresidual": torch.ones(6)}, ValueError, r"dresidual must be like x, \(4, 6\)"),
        "dnormed": Refusal({"dnormed": SQUARE.half()}, ValueError, "found .* torch.float16"),
        "rows of rstd": Refusal({"rstd": torch.ones(6)}, ValueError, r"rstd must be \[4\] .* found \[6\]"),
        "dtype of rstd": Refusal(
            {"rstd": torch.ones(4).half()}, TypeError, "rstd must be torch.float32, found .*float16"
        ),
    },
)  # fmt: skip
CONTRACTS = (FORWARD, BACKWARD)
