# SPDX-License-Identifier: Apache-2.0
"""What a set of graphs keeps: what its layers save, the edges, and nothing else for each layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graphs.fake import FakeBackend
from tests.graphs.layers import managed, run, same, twins

CPU = torch.device("cpu")
WIDTH = 1024  # a tensor of 4 KiB a row


class _Scale(torch.autograd.Function):
    """x · w with a backward that needs w alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.w = w
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.w, None


class Thin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return _Scale.apply(x, self.w)


class Saving(Thin):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def pool_bytes(make: type[nn.Module], count: int) -> int:
    backends = []
    layers = [make() for _ in range(count)]

    def backend() -> FakeBackend:
        backends.append(FakeBackend())
        return backends[-1]

    manager = managed(layers, CPU, backend=backend)
    for _ in range(3):
        x = torch.randn(4, WIDTH, requires_grad=True)
        run(layers, x).sum().backward()
        manager.end_iteration()
    assert manager.phase == "replaying"
    return backends[0].arena.total


def test_a_layer_takes_what_it_saves(capsys: pytest.CaptureFixture[str]) -> None:
    """Per further layer: nothing if it saves nothing, its input if it saves that."""
    tensor = 4 * WIDTH * 4
    assert pool_bytes(Thin, 6) == pool_bytes(Thin, 3)
    assert pool_bytes(Saving, 6) - pool_bytes(Saving, 3) == 3 * tensor


class Sum(nn.Module):
    """x · p, or where there are two inputs their sum, whose gradients are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.rand(WIDTH))

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return a * self.p if b is None else a + b


@pytest.mark.parametrize("strides", ["dense", "transposed", "expanded"])
def test_gradients_of_inputs_are_memory_of_their_own(device: torch.device, strides: str) -> None:
    """What a hook does in place to one gradient is not done to the other."""
    ours, theirs = twins(device, 3, Sum)
    manager = managed(ours, device)
    for step in range(4):
        x = torch.randn(4, WIDTH, device=device)
        x = {"dense": x, "transposed": x.view(WIDTH, 4).t(), "expanded": x[:1].expand(4, -1)}[
            strides
        ]
        for layers in (ours, theirs):
            in_place = layers is ours and step > 0  # in eager layers it would reach both
            a, b = layers[0](x), layers[1](x)
            for y, k in ((a, 2), (b, 3)):
                y.register_hook(lambda g, k=k, to=in_place: g.mul_(k) if to else k * g)
            layers[2](a, b).square().sum().backward()
        same(ours, theirs, step)
        ours.zero_grad(), theirs.zero_grad()
        manager.end_iteration()
    assert manager.phase == "replaying"


class Through(nn.Module):
    """Gradients of its inputs that are the result's own, x + p, or are one object, as for (a + b) q."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.joined = joined
        self.p, self.q = (nn.Parameter(torch.rand(WIDTH)) for _ in range(2))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if not self.joined:
            return a + self.p, b + self.q
        c = (a + b) * self.q
        return c * self.p, c + self.q


@pytest.mark.parametrize("joined", [False, True], ids=["passed through", "of a sum"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_stay_apart_that_layers_pass_on(
    device: torch.device, microbatches: int, joined: bool
) -> None:
    """From layer to layer, while those of another microbatch are computed, and a hook writes to some in place."""
    ours, theirs = twins(device, 3, lambda: Through(joined))
    manager = managed(ours, device, num_microbatches=microbatches)
    for step in range(4):
        inputs = torch.randn(microbatches, 2, 4, WIDTH, device=device)
        found = []
        for layers in (ours, theirs):
            x = inputs.clone().requires_grad_()
            losses = []
            for a, b in x:
                for layer in layers:
                    a, b = layer(a, b)
                    in_place = layers is ours and step > 0
                    a.register_hook(lambda g, to=in_place: g.mul_(2) if to else 2 * g)
                losses.append(a.square().sum() + 3 * b.sum())
            for loss in losses:
                loss.backward()
            found.append(x.grad)
        assert torch.equal(*found), step
        same(ours, theirs, step)
        ours.zero_grad(), theirs.zero_grad()
        manager.end_iteration()
    assert manager.phase == "replaying"
