# SPDX-License-Identifier: Apache-2.0
"""The learning rate: linear warm-up, then a cosine down to a share of the peak. It depends on the step alone."""

from __future__ import annotations

import math


def warmup_steps(warmup: float, steps: int) -> int:
    """Number of warm-up steps. ``warmup`` is a share of all steps if below 1, else a number of steps."""
    return round(warmup * steps) if warmup < 1 else int(warmup)


def learning_rate(step: int, *, peak: float, steps: int, warmup: int, floor: float) -> float:
    """The learning rate of the 0-based ``step``.

    It is peak · (step + 1) / warmup during the warm-up, then a cosine that ends at floor · peak on the last step.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup + 1) / max(1, steps - warmup))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
