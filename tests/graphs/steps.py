# SPDX-License-Identifier: Apache-2.0
"""Whole steps of training that the tests of StepGraph share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.graphs import StepGraph
from tests.graphs.layers import with_options


class Step:
    """Two microbatches, loss, backward, clipping, AdamW, and a loss scale and a learning rate on the device."""

    def __init__(self, model: nn.Module, device: torch.device, outside: bool = False) -> None:
        self.model, self.outside = model, outside
        self.lr = torch.tensor(1e-2, device=device)
        self.scale = torch.tensor(4.0, device=device)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.lr, capturable=True, foreach=True
        )
        self.calls = 0

    def __call__(self, xs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if not self.outside:
            self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=xs.device)
        for x, target in zip(xs, targets, strict=True):
            loss = (self.model(x) - target).square().mean()
            (loss * self.scale).backward()
            total = total + loss.detach()
        for p in self.model.parameters():
            p.grad.div_(self.scale)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return {"loss": total, "norm": norm}


def graphed(step: Any, device: torch.device, **arguments: Any) -> StepGraph:
    arguments = with_options({"warmup_steps": 2, **arguments}, device)
    return StepGraph(step, modules=[step.model], **arguments)


class Sgd:
    """A step without an optimizer, which the CPU can capture."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.lr = model, torch.tensor(0.1)

    def __call__(self, x: Tensor, half: bool = False) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        loss = self.model(x).square().sum()
        loss.backward()
        with torch.no_grad():
            for p in self.model.parameters():
                p -= self.lr.to(p.device) * p.grad
        return loss.detach()
