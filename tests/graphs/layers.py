# SPDX-License-Identifier: Apache-2.0
"""Layers and loops that the graph tests share, on the CPU's imitated graphs or on a GPU."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.graphs import CudaBackend, GraphManager, GraphOptions
from tests.graphs.fake import FakeBackend

WIDTH = 8


def backend_for(device: torch.device) -> Callable[[], Any]:
    return FakeBackend if device.type == "cpu" else lambda: CudaBackend(device)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Counting(Block):
    """A buffer that every forward changes, and an attribute that does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum())
        self.calls += 1
        return super().forward(x)


class Rotated(Block):
    """Called as transformers calls a decoder layer: side inputs by keyword, constants, a tuple out."""

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        use_cache: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert position_embeddings is not None
        cos, sin = position_embeddings
        y = super().forward(x * cos + x.flip(-1) * sin)
        return (y if attention_mask is None else y * attention_mask), None


class Drop(nn.Module):
    """y = x · mask(state) / (1 − p): dropout whose random state is a tensor, as `PhiloxState` is one. The mask is a
    function of a draw from the CPU generator and of the state, so that a graph draws a new one when the state moves."""

    def __init__(self, state: State, p: float = 0.5) -> None:
        super().__init__()
        self.p, self.state = p, state

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        nonce = int(torch.randint(1 << 20, (), dtype=torch.int64))
        slot = self.state.tensor + nonce
        index = torch.arange(x.numel(), device=x.device).view(x.shape)
        bits = (index * 7919 + slot[0] * 104729 + slot[1] * 1299709) * 2654435761 % 4294967296
        return x * (bits >= self.p * 4294967296) / (1 - self.p)


class State:
    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.tensor([3, 0], device=device)

    def advance(self, steps: int = 1) -> None:
        self.tensor[1].add_(steps)


def stack(device: torch.device, layers: int = 3, kind: Callable[[], nn.Module] = Block) -> Any:
    return nn.ModuleList([kind() for _ in range(layers)]).to(device)


def run(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def batches(device: torch.device, count: int, rows: int = 3) -> Iterator[Tensor]:
    for _ in range(count):
        yield torch.randn(rows, WIDTH, device=device)


def with_options(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """`arguments`, those that are fields of GraphOptions as such; the backend is the device's if none is given."""
    names = {field.name for field in dataclasses.fields(GraphOptions)}
    given = {"backend": backend_for(device)}
    given |= {name: value for name, value in arguments.items() if name in names}
    rest = {name: value for name, value in arguments.items() if name not in names}
    return {**rest, "options": GraphOptions(**given)}


def managed(layers: Any, device: torch.device, **arguments: Any) -> GraphManager:
    return GraphManager(layers, **with_options({"warmup_steps": 1, **arguments}, device))


def warm(manager: GraphManager, layers: Sequence[nn.Module], device: torch.device) -> None:
    """Record and capture on random batches; gradients are None afterwards."""
    for _ in range(manager.warmup_steps):
        for x in batches(device, manager.num_microbatches):
            run(layers, x).sum().backward()
        for p in nn.ModuleList(layers).parameters():
            p.grad = None
        manager.end_iteration()
    assert manager.phase == "replaying"


def twins(device: torch.device, layers: int = 3, kind: Callable[[], nn.Module] = Block) -> Any:
    ours = stack(device, layers, kind)
    return ours, copy.deepcopy(ours)


def same(ours: nn.Module, theirs: nn.Module, what: object = "") -> None:
    """Equal parameters and gradients, bit for bit."""
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), (what, name)
        assert (p.grad is None) == (q.grad is None), (what, name)
        assert p.grad is None or torch.equal(p.grad, q.grad), (what, name, "grad")
