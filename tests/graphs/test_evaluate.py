# SPDX-License-Identifier: Apache-2.0
"""eval="capture": graphs of their own, which leave no trace and are never handed out stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lorakernels.graphs import CaptureError, GraphManager, ReplayError
from torch import Tensor, nn

from tests.graphs.layers import Block, Counting, State, batches, managed, run, stack, warm


def evaluated(
    device: torch.device, kind: Any, **options: Any
) -> tuple[nn.ModuleList, GraphManager]:
    layers = stack(device, 1, kind)
    manager = managed(layers, device, eval="capture", **options)
    warm(manager, layers, device)
    layers.eval()
    return layers, manager


def test_its_capture_leaves_buffers(device: torch.device) -> None:
    layers, _ = evaluated(device, Counting)
    seen = layers[0].seen.zero_()
    for calls in (1, 2):
        with torch.no_grad():
            run(layers, torch.ones(3, 8, device=device))
        assert seen.item() == 24 * calls


def test_inference_mode_and_no_grad(device: torch.device) -> None:
    layers, manager = evaluated(device, Block)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        x = next(batches(device, 1))
        with mode():
            found = run(layers, x)
            with manager.disabled():
                assert torch.equal(found, run(layers, x))
    assert len(manager._evals) == 1


def test_states_are_watched(device: torch.device) -> None:
    state = State(device)
    layers, _ = evaluated(device, Block, rng_states=[state])
    with torch.no_grad():
        run(layers, next(batches(device, 1)))
    state.tensor = state.tensor.clone()
    with torch.no_grad(), pytest.raises(ReplayError, match=r"tensors of rng_states\[0\]"):
        run(layers, next(batches(device, 1)))


def test_a_new_function_at_an_old_address(device: torch.device) -> None:
    class Applies(Block):
        def forward(self, x: Tensor, function: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
            return function(super().forward(x)) if self.training else function(x)

    layers = stack(device, 1, Applies)
    manager = managed(layers, device, eval="capture")
    layers[0](next(batches(device, 1)), _identity).sum().backward()
    manager.end_iteration()
    layers.eval()
    x = torch.ones(3, 8, device=device)
    for factor in range(1, 6):
        function = eval(f"lambda x: x * {factor}")
        with torch.no_grad():
            assert layers[0](x, function).mean().item() == factor
        del function


class Wrapped:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def _identity(x: Tensor) -> Tensor:
    return x


def test_outputs_that_a_replay_cannot_renew(device: torch.device) -> None:
    class Wraps(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y if self.training else Wrapped(y)

    layers, manager = evaluated(device, Wraps)
    message = r"its output value is a .*Wrapped.* cannot renew"
    with torch.no_grad(), pytest.raises(CaptureError, match=message) as error:
        run(layers, next(batches(device, 1)))
    assert "use eval='eager'" in manager.explain(error.value)
