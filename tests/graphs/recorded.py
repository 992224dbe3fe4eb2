# SPDX-License-Identifier: Apache-2.0
"""Layers whose order is recorded, and what the recorder's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lorakernels.graphs import (
    OrderRecorder,
)

HOOKS = [
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
]


class Block(nn.Module):
    """x + dropout(tanh(x W)): saves an input, an output and a mask."""

    def __init__(self, width: int = 4, p: float = 0.1) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


def blocks(count: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(count))


def chain(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


@contextmanager
def recording(layers: nn.ModuleList, microbatches: int = 1) -> Iterator[OrderRecorder]:
    with OrderRecorder(len(layers), microbatches).attach(list(layers)) as recorder:
        yield recorder


def gradients(layers: nn.ModuleList, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Two microbatches in flight, the later one going back first."""
    layers.zero_grad()
    torch.manual_seed(1)
    device = next(layers.parameters()).device
    inputs = [torch.randn(3, 4, device=device, requires_grad=True) for _ in range(2)]
    outputs = [run(x) for x in inputs]
    for y in reversed(outputs):
        y.square().sum().backward()
    grads = [x.grad for x in inputs] + [p.grad.clone() for p in layers.parameters()]
    return [*outputs, *grads]
