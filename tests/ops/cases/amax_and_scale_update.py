# SPDX-License-Identifier: Apache-2.0
"""amax_and_scale_update: cases, and the recipe once more, column by column, in Python's own numbers.

tests/csrc/test_amax_and_scale_update.py has the hard amaxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.numerics.fp8 import FLT_MAX
from tests.ops.contract import (
    FP32_UNIT,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Made,
    Refusal,
    same,
)

MAXIMA = (448.0, 57344.0)


def made(given: bool, gated: bool, margin: int, most_recent: bool, m: Made) -> Arguments:
    """M tensors with a history of 4, the first without a new amax."""
    states = [m.rand(5, m.rows) for _ in range(2)]
    current = m.rand(2 * m.rows) if given else None
    for row in [current] if given else [state[0] for state in states]:
        row[:1] = 0.0
    return *states, current, gated, *MAXIMA, margin, most_recent


def column_after(
    column: list[float], new: float, fp8_max: float, most_recent: bool
) -> tuple[list[float], float]:
    """(its history, its scale) of history and scale before, and a current amax that is not 0."""
    *history, scale = column
    older = [amax for amax in history[1:] if math.isfinite(amax)]
    amax = new if most_recent else max(new, *older, 0.0)
    if math.isfinite(new) and amax > 0:
        scale = min(fp8_max / amax, FLT_MAX)
    return [0.0, *history[2:], new] if len(history) > 1 else [0.0], scale


def bound(call: Call) -> Iterator[Checked]:
    """Histories are bits; a scale is one quotient, rounded once."""
    *states, current, gated, max_x, max_dy, margin, most_recent = call.before
    news = torch.cat([state[0] for state in states]) if current is None else current
    is_open = not gated or not bool((news.view(2, -1)[1] <= 0).all())
    for name, before, after, new, most in zip(
        ("forward", "backward"), states, call.after, news.view(2, -1), (max_x, max_dy), strict=False
    ):
        columns = before.t().double().tolist()
        for i, amax in enumerate(new.double().tolist()):
            if amax != 0 and is_open:
                history, scale = column_after(columns[i], amax, most * 2.0**-margin, most_recent)
                columns[i] = [*history, scale]
        expected = (
            torch.tensor(columns, dtype=torch.float64, device=before.device)
            .view(-1, len(before))
            .t()
        )
        yield same(f"{name}'s histories", after[:-1], expected[:-1].float())
        yield Checked(f"{name}'s scales", after[-1], expected[-1], FP32_UNIT * expected[-1].abs())


def refused(state: Tensor, message: str) -> Refusal:
    return Refusal({"forward": state, "backward": state}, ValueError, message)


STATE = torch.ones(3, 2)
CONTRACTS = (
    Contract(
        ops.amax_and_scale_update,
        {"gated": Case(partial(made, False, True, 0, False)), "given": Case(partial(made, True, False, 1, True))},
        bound,
        {"1000 tensors": Case(partial(made, True, True, 0, False), 1000)},
        {
            "forward": STATE,
            "backward": STATE,
            "current": None,
            "gated": False,
            "fp8_max_forward": MAXIMA[0],
            "fp8_max_backward": MAXIMA[1],
            "margin": 0,
            "most_recent": False,
        },
        {
            "no history": refused(STATE[:1], "forward must be float32 .* at least 1, found"),
            "dtype": refused(STATE.double(), "forward must be float32 .* found torch.float64"),
            "strides": refused(STATE.t().contiguous().t(), "forward must be contiguous"),
            "two shapes": Refusal({"backward": torch.ones(3, 3)}, ValueError, "must have one shape"),
            "current": Refusal({"current": torch.ones(3)}, ValueError, r"current must be float32 \(4,\)"),
        },
    ),
)  # fmt: skip
