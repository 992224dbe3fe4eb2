# SPDX-License-Identifier: Apache-2.0
"""What is the same in two runs whose sums have another order, as those of one process and of several ranks have.

Trained parameters are not. AdamW's first steps are lr · sign(g): where g is as small as the rounding of its sum, the
element ends up to 2 · lr away. What the optimizer was given by the same parameters is a sum, whose error has a bound.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lorakernels.train.optimizer.optimizers import Updater, numbers
from lorakernels.train.options.options import FinetuneOptions
from tests.fusion.fused_models import FP32, difference

# Over FP8, one other last bit may turn one rounding, by 2^-3 of an element. All that turn in a tensor move its norm by
# less than 2^-3. They are few of all roundings, which together move the losses of these runs by 1.5e-3.
TURNED_GRADIENTS, TURNED_LOSSES = 2.0**-3, 1e-3


class KeepingUpdater(Updater):
    """Writes each step's gradients, clipped, into the run's folder: `gradients<rank>-<step of this process>.pt`."""

    def __init__(self, trained: Any, options: Any, *more: Any) -> None:
        super().__init__(trained, options, *more)
        self.trained, self.folder, self.steps = trained, Path(options.output), 0

    def step(self, finite: Tensor) -> None:
        self.steps += 1
        kept = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        torch.save(kept, self.folder / f"gradients{os.environ['RANK']}-{self.steps}.pt")
        super().step(finite)


def gradients(run: Path, step: int) -> dict[str, list[Tensor]]:
    """{name: the gradient on each rank that has one}."""
    found: dict[str, list[Tensor]] = {}
    for path in sorted(run.glob(f"gradients*-{step}.pt")):
        for name, gradient in torch.load(path).items():
            found.setdefault(name, []).append(gradient)
    return found


def put_together(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """Of what all ranks have alike, or have in parts."""
    if parts[0].shape == shape:
        assert all(torch.equal(parts[0], other) for other in parts)
        return parts[0]
    (dim,) = (d for d, size in enumerate(shape) if parts[0].shape[d] != size)
    return torch.cat(parts, dim)


def check_gradients(run: Path, step: int, one: Path, step_of_one: int, fp8: bool) -> None:
    """Those of `run`, by the same parameters, are those of one process, or of ranks that have whole ones."""
    found, expected = gradients(run, step), gradients(one, step_of_one)
    assert found.keys() == expected.keys() and found
    far = {
        n: difference(put_together(found[n], x.shape), x.double())
        for n, (x, *_) in expected.items()
    }
    worst = max(far, key=far.__getitem__)
    assert far[worst] <= (TURNED_GRADIENTS if fp8 else 2 * FP32), (worst, far[worst])


def check_losses(found: list[float], expected: list[float], fp8: bool, untrained: int = 2) -> None:
    """Of evaluations and steps, of which the first `untrained` see the parameters as they were.

    Later, one element that AdamW moves to the other side changes a loss of 5.5 by 2 · lr · |its gradient|. These runs
    have lr 1e-2 and norms of 3 over 5,000 elements, so that a usual one does so by 2e-4 of it. Other rows, or half the
    lr, change losses by 3e-3.
    """
    assert len(found) == len(expected) > untrained
    first, later = (TURNED_LOSSES, TURNED_LOSSES) if fp8 else (2 * FP32, 2e-4)
    np.testing.assert_allclose(found[:untrained], expected[:untrained], rtol=first)
    np.testing.assert_allclose(found, expected, rtol=later)


def check_moments(run: Path, one: Path, **options: Any) -> None:
    """The optimizer's state after two steps is that of whole tensors, and of the gradients that the ranks gave it.

    A moment is rounded up to three times a step.
    """
    state = torch.load(run / "checkpoints/step-00000002/state/optimizer.pt")["state"]
    shapes = {name: x.shape for name, (x,) in gradients(one, 1).items()}
    steps = [
        {name: put_together(parts, shapes[name]).double() for name, parts in found.items()}
        for found in (gradients(run, 1), gradients(run, 2))
    ]
    made = FinetuneOptions(**options)
    trained = {name: nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}
    for name, number in numbers(trained, made).items():
        one_step, next_step = (step[name] for step in steps)
        a, b = made.beta1, made.beta2
        expected = {
            "exp_avg": (1 - a) * (a * one_step + next_step),
            "exp_avg_sq": (1 - b) * (b * one_step**2 + next_step**2),
            "momentum_buffer": a * one_step + next_step,
        }
        kept = {key: x for key, x in state[number].items() if key in expected}
        assert kept, state[number].keys()
        for key, moment in kept.items():
            assert difference(moment, expected[key]) <= 6 * 2.0**-24, (name, key)
