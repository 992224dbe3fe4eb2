# SPDX-License-Identifier: Apache-2.0
"""The history of a run's held-out losses, and whether they end the run. Every checkpoint holds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lorakernels.train.options.running import RunningOptions


@dataclass
class Evaluations:
    """Held-out losses in nats per token; None where nothing was measured.

    Attributes:
        first_eval: loss before the first step.
        last_eval, last_eval_step: the newest loss and its step.
        best_eval, best_step: the lowest loss that has a checkpoint of its own, and its step.
        lowest: the lowest loss after a step.
        without_gain: evaluations since one was lower than the lowest before it by more than early stopping's threshold.
    """

    first_eval: float | None = None
    last_eval: float | None = None
    last_eval_step: int = 0
    best_eval: float | None = None
    best_step: int | None = None
    lowest: float | None = None
    without_gain: int = 0

    @classmethod
    def of(cls, trainer: Mapping[str, Any]) -> Evaluations:
        """Read from a checkpoint's trainer.json. An older one lacks some entries."""
        names = [item.name for item in fields(cls)]
        return cls(**{name: trainer[name] for name in names if name in trainer})

    def note(self, loss: float | None, step: int, options: RunningOptions) -> bool:
        """Take the held-out loss after `step` steps. Returns whether it is the best one and shall be kept."""
        self.last_eval, self.last_eval_step = loss, step
        if loss is None or not math.isfinite(loss):
            self.without_gain += 1
            return False
        gain = math.inf if self.lowest is None else self.lowest - loss
        self.lowest = loss if self.lowest is None else min(self.lowest, loss)
        self.without_gain = 0 if gain > options.early_stopping_threshold else self.without_gain + 1
        better = self.best_eval is None or loss < self.best_eval
        if better and options.load_best_model_at_end:
            self.best_eval, self.best_step = loss, step
            return True
        return False

    def reached_target(self, options: RunningOptions) -> bool:
        target = options.target_loss
        return target is not None and self.lowest is not None and self.lowest <= target

    def why_over(self, options: RunningOptions) -> str | None:
        """Why the run ends before its last step; None if it goes on."""
        if self.reached_target(options):
            return (
                f"held-out loss {self.lowest:.4f} is not above target_loss {options.target_loss:g}"
            )
        patience = options.early_stopping_patience
        if patience and self.without_gain >= patience:
            gain = f"lower than the lowest by more than {options.early_stopping_threshold:g}"
            what = "finite" if self.lowest is None else gain
            return f"held-out loss was not {what} in {self.without_gain} evaluations"
        return None
