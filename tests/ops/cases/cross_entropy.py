# SPDX-License-Identifier: Apache-2.0
"""cross_entropy_ and cross_entropy_fp8: cases, and a bound from log-softmax in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.ops.cross_entropy import BLOCK
from tests.ops.contract import (
    BF16,
    E5M2,
    FP8_STEP,
    FP16,
    FP32,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Made,
    Refusal,
    rounded_again,
    same,
)

IGNORE = -100


def made(
    v: int, dtype: torch.dtype, factor: float | None, gradient: bool, m: Made, hard: bool = True
) -> Arguments:
    """Logits of order 5. `hard` labels: last, ignored (its row NaN), first, out of range both ways, then any."""
    logits = 5 * m.randn(m.rows, v)
    labels = torch.randint(0, v, (m.rows,), device=m.device)
    if v > 20:
        logits[:1, : v // 2] = -float("inf")
        labels[:1] = v - 1
    if hard:
        special = [v - 1, IGNORE, 0, v, -1][: m.rows]
        labels[: len(special)] = torch.tensor(special, device=m.device)
        logits[1:2] = float("nan")
    scale = None if factor is None else torch.full((), factor, device=m.device)
    return logits.to(dtype), labels, scale, IGNORE, gradient


def made_fp8(v: int, dtype: torch.dtype, m: Made, hard: bool = True) -> Arguments:
    logits, labels, *_ = made(v, dtype, None, True, m, hard)
    return logits, labels, IGNORE


def bound(call: Call) -> Iterator[Checked]:
    """losses: exp and log in fp32, sums of V terms by halves, a few ulps of the largest term, 25 or so.

    dz: one rounding at the store, and as much of the probabilities. Logits are untouched without a gradient. A label
    that is no column makes its row NaN; an ignored row is 0, whatever it holds.
    """
    logits, _, factor, _, gradient = call.before
    most = 1.0 if factor is None else factor.double()
    losses, dz = exact(logits, call.before[1], most)
    yield near_losses(call, losses)
    found = call.after[0]
    if not gradient:
        yield same("logits", found, logits)
        return
    info = torch.finfo(logits.dtype)
    allowed = (info.eps + 2e-5) * dz.abs() + info.smallest_normal + 1e-7 * most
    yield Checked("dz", found, dz, allowed + rounded_again(call, logits.dtype) * most)


def bound_fp8(call: Call) -> Iterator[Checked]:
    """One rounding to e5m2 of dz times its largest number, and fp32's before: the probabilities' 2e-5 of themselves
    and 1e-7 of 1. Logits are left alone."""
    losses, dz = exact(*call.before[:2])
    yield near_losses(call, losses)
    most, (step, least) = torch.finfo(E5M2).max, FP8_STEP[E5M2]
    scaled = dz * most
    allowed = (step / 2 + 2e-5) * scaled.abs() + least / 2 + 1e-7 * most
    yield Checked("dz8", call.results[1].view(E5M2).float(), scaled, allowed)
    yield same("logits", call.after[0], call.before[0])


def near_losses(call: Call, exact: Tensor) -> Checked:
    return Checked("losses", call.results[0], exact, 2e-6 * exact.abs() + 1e-5)


def exact(logits: Tensor, labels: Tensor, factor: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """(losses [M], factor · (softmax − onehot) [M, V]) in float64. Where a label is no column they are NaN, in an
    ignored row 0, whatever the row or the factor holds."""
    wide, ignored = logits.double(), (labels == IGNORE)[:, None]
    known = ((labels >= 0) & (labels < wide.shape[1]))[:, None]
    hot = torch.zeros_like(wide).scatter_(1, labels.where(known[:, 0], 0)[:, None], 1.0)
    losses = (-wide.log_softmax(1)).where(hot > 0, 0.0).sum(1, keepdim=True)
    both = (losses, factor * (wide.softmax(1) - hot))
    losses, dz = (t.where(known, torch.nan).where(~ignored, 0.0) for t in both)
    return losses[:, 0], dz


SQUARE = torch.ones(3, 5)
CONTRACTS = (
    Contract(
        ops.cross_entropy_,
        {
            "gradient": Case(partial(made, 24, FP32, 0.5, True, hard=False)),
            "losses only": Case(partial(made, 24, BF16, None, False, hard=False)),
            "hard labels": Case(partial(made, 24, FP16, 0.5, True), is_traced=False),
            "float64": Case(partial(made, 24, torch.float64, None, True, hard=False), why_not="logits are float64"),
        },
        bound,
        {
            **{
                f"{m}x{v} {dtype}": Case(partial(made, v, dtype, factor, True), m)
                for m, v in ((1, 1), (3, 33), (65, 8192), (17, 8193), (130, 32000), (40, 128256), (5, 262144))
                for dtype, factor in ((BF16, None), (FP16, 3.0), (FP32, 1e-3))
            },
            "6x75": Case(partial(made, 75, FP32, 0.25, True), 6),
            "9 rows, three blocks": Case(partial(made, 2 * BLOCK + 3, FP32, None, True), 9),
            "losses only, two blocks": Case(partial(made, BLOCK + 1, FP16, None, False), 9),
        },
        {
            "logits": SQUARE,
            "labels": torch.zeros(3, dtype=torch.int64),
            "factor": None,
            "ignore_index": IGNORE,
            "gradient": True,
        },
        {
            "a vector": Refusal({"logits": SQUARE[0]}, ValueError, r"logits must be \[M, V\]"),
            "integers": Refusal({"logits": SQUARE.int()}, TypeError, "logits must be floating"),
            "labels": Refusal({"labels": torch.zeros(3)}, ValueError, r"labels must be int64 \[3\], found"),
            "factor": Refusal({"factor": torch.ones(2)}, ValueError, "one fp32 value, found"),
        },
    ),
    Contract(
        ops.cross_entropy_fp8,
        {
            "gradient": Case(partial(made_fp8, 24, FP32, hard=False)),
            "hard labels": Case(partial(made_fp8, 24, BF16), is_traced=False),
            "float64": Case(partial(made_fp8, 24, torch.float64, hard=False), why_not="logits are float64"),
        },
        bound_fp8,
        {
            f"{m}x{v} {dtype}": Case(partial(made_fp8, v, dtype), m)
            for m, v, dtype in (
                (1, 1, BF16), (3, 33, FP32), (65, BLOCK, BF16), (17, 8193, FP16), (40, 128256, BF16), (5, 262144, FP32),
            )
        },
        {"logits": SQUARE, "labels": torch.zeros(3, dtype=torch.int64), "ignore_index": IGNORE},
        {
            "a vector": Refusal({"logits": SQUARE[0]}, ValueError, r"logits must be \[M, V\]"),
            "labels": Refusal({"labels": torch.zeros(3)}, ValueError, r"labels must be int64 \[3\], found"),
        },
    ),
)  # fmt: skip
