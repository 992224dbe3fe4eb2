# SPDX-License-Identifier: Apache-2.0
"""The learning rate, by default a linear warm-up and then a cosine down to a share of the peak.

It depends on the number of the step alone, so a run that resumes or goes back needs no state of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from lorakernels.train.errors import OptionError, require
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.options.running import OWN_SCHEDULE

Schedule = Callable[[int], float]  # of the 0-based step


def warmup_steps(warmup: float, steps: int) -> int:
    """Number of warm-up steps. ``warmup`` is a share of all steps if below 1, else a number of steps."""
    return round(warmup * steps) if warmup < 1 else int(warmup)


def make_schedule(options: FinetuneOptions, steps: int) -> Schedule:
    """The learning rate of each of `steps` steps.

    Raises:
        OptionError: transformers' scheduler does not take the arguments.
    """
    warmup = warmup_steps(options.warmup, steps)
    if options.lr_scheduler_type != OWN_SCHEDULE:
        return _of_transformers(options, steps, warmup)
    return lambda step: learning_rate(
        step, peak=options.lr, steps=steps, warmup=warmup, floor=options.min_lr_ratio
    )


def _of_transformers(options: FinetuneOptions, steps: int, warmup: int) -> Schedule:
    """The function of the step that transformers' scheduler is made of. Step s has what its Trainer takes there."""
    optimization = require("transformers.optimization")
    nothing = torch.optim.SGD([torch.zeros(1)], lr=options.lr)  # polynomial reads lr here
    name = options.lr_scheduler_type
    try:
        scheduler = optimization.get_scheduler(
            name, nothing, warmup, steps, options.scheduler_arguments()
        )
        factor = scheduler.lr_lambdas[0]
        for step in (0, warmup, steps // 2, steps - 1):  # a wrong value is found where it is used
            float(factor(step))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise OptionError(
            f"lr_scheduler_kwargs does not suit lr_scheduler_type {name}: {error}"
        ) from error
    return lambda step: options.lr * factor(step)


def learning_rate(step: int, *, peak: float, steps: int, warmup: int, floor: float) -> float:
    """The learning rate of the 0-based ``step``.

    It is peak · (step + 1) / warmup during the warm-up, then a cosine that ends at floor · peak on the last step.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup + 1) / max(1, steps - warmup))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
