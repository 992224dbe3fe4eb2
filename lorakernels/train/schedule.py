# SPDX-License-Identifier: Apache-2.0
"""Learning rate: linear warm-up, then a cosine down to a share of the peak. A function of the step alone."""

from __future__ import annotations

import math


def warmup_steps(warmup: float, steps: int) -> int:
    """A share of all steps if below 1, else a number of steps."""
    return round(warmup * steps) if warmup < 1 else int(warmup)


def learning_rate(step: int, *, peak: float, steps: int, warmup: int, floor: float) -> float:
    """For 0-based ``step``: peak · (step + 1) / warmup up to the peak, then the cosine to floor · peak at the last."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup + 1) / max(1, steps - warmup))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
