# SPDX-License-Identifier: Apache-2.0
"""Hooks that would not fire are refused, the others fire."""

from __future__ import annotations

import pytest
import torch

from lorakernels.graphs import CaptureError
from tests.graphs.layers import (
    WIDTH,
    batches,
    managed,
    run,
    same,
    stack,
    twins,
    warm,
)


def test_hooks_that_would_not_fire(device: torch.device) -> None:
    """F19."""
    layers = stack(device, 2)
    manager = managed(layers, device, grads="add")
    handle = layers[1].down.register_forward_hook(lambda *_: None)
    run(layers, next(batches(device, 1))).sum().backward()
    with pytest.raises(
        CaptureError, match=r"layer '1', check: submodule 'down' has a hook \(_forward_hooks: "
    ):
        manager.end_iteration()
    handle.remove()
    handle = layers[0].up.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(
        CaptureError, match=r"parameter 'up.weight' has a hook .* Use grads='autograd'"
    ):
        manager.capture()
    handle.remove()
    manager.capture()
    run(layers, next(batches(device, 1))).sum().backward()


def test_hooks_on_the_layer_and_on_parameters_fire(device: torch.device) -> None:
    layers = stack(device, 2)
    manager = managed(layers, device)
    fired: list[str] = []
    layers[0].register_forward_hook(lambda *_: fired.append("forward"))
    layers[0].register_full_backward_hook(lambda *_: fired.append("backward"))
    layers[0].up.weight.register_post_accumulate_grad_hook(lambda p: fired.append("grad"))
    for _ in range(3):
        fired.clear()
        run(layers, next(batches(device, 1)).requires_grad_()).sum().backward()
        assert sorted(fired) == ["backward", "forward", "grad"]
        manager.end_iteration()
    assert manager.phase == "replaying" and manager._blocks.grad_memory is None


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_a_parameters_hook_that_comes_later_fires_after_recapture(device: torch.device) -> None:
    """Until then no further set of graphs is captured, as one set's gradients would pass the hook by."""
    ours, theirs = twins(device, 2)
    manager = managed(ours, device, on_new_shape="capture")
    warm(manager, ours, device)
    for layers in (ours, theirs):
        layers[0].up.weight.register_hook(lambda grad: 2 * grad)

    def step(rows: int) -> None:
        x = torch.randn(rows, WIDTH, device=device)
        for layers in (ours, theirs):
            layers.zero_grad()
            run(layers, x).square().sum().backward()
        same(ours, theirs, rows)

    step(5)
    with pytest.raises(CaptureError, match=r"parameter 'up.weight' has a hook"):
        manager.end_iteration()
    manager.recapture()
    for _ in range(3):
        step(3)
        manager.end_iteration()
    assert manager.phase == "replaying" and manager._blocks.captured[0].graphs.blocks == 3
