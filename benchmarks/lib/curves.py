# SPDX-License-Identifier: Apache-2.0
"""Loss curves as quality_ranks.py compares them and as they are drawn."""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 20  # steps


def farthest(losses: Sequence[float], one: Sequence[float]) -> tuple[float, int]:
    """(the largest difference of two smoothed curves relative to `one`, its step)."""
    pairs = zip(smoothed(losses), smoothed(one), strict=True)
    off = [abs(a / b - 1) for a, b in pairs]
    step = max(range(len(off)), key=off.__getitem__)
    return off[step], step


def smoothed(losses: Sequence[float]) -> list[float]:
    """The running mean of WINDOW steps, or of all if there are fewer."""
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    width = min(WINDOW, len(losses))
    return [(sums[i + width] - sums[i]) / width for i in range(len(losses) - width + 1)]
