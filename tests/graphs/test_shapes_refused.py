# SPDX-License-Identifier: Apache-2.0
"""New shapes that cannot be captured, or not yet: they run eagerly, the others are replayed as ever."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lorakernels.graphs import CaptureError, ReplayError, ReplayOrderError
from torch import Tensor

from tests.graphs.fake import FakeBackend
from tests.graphs.layers import (
    Block,
    State,
    managed,
    run,
    same,
    twins,
    warm,
)
from tests.graphs.test_shapes import batch, captured_blocks

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_blocks_that_differ_only_later_are_refused() -> None:
    ours, _ = twins(CPU, 2)
    manager = managed(ours, CPU, num_microbatches=2, on_new_shape="capture")

    def iteration(*rows: int) -> None:
        for y in [run(ours, batch(n, CPU)) for n in rows]:
            y.square().sum().backward()
        manager.end_iteration()

    iteration(3, 4)
    iteration(3, 4)
    with pytest.raises(ReplayError, match=r"expected float32 \[4, 8\].*found float32 \[5, 8\]"):
        iteration(3, 5)
    manager.discard_iteration()
    iteration(3, 4)
    with pytest.raises(ReplayOrderError, match="expected forward of layer '0'"):
        ours[1](batch(9, CPU))  # of a block that begins with another layer
    assert captured_blocks(manager) == 1


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_an_incomplete_block_of_a_new_shape(device: torch.device) -> None:
    ours, theirs = twins(device, 2)
    manager = managed(ours, device, on_new_shape="capture")
    warm(manager, ours, device)
    run(ours, batch(5, device))
    with pytest.raises(RuntimeError, match="the iteration is incomplete"):
        manager.end_iteration()
    manager.discard_iteration()
    for rows in (3, 5, 5):
        x = batch(rows, device)
        for layers in (ours, theirs):
            run(layers, x).square().sum().backward()
        same(ours, theirs, rows)
        manager.end_iteration()
    assert captured_blocks(manager) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_a_new_shape_that_cannot_be_captured_leaves_the_others() -> None:
    """F29, at every capture of the second set; capture() tries again."""
    for fail_at in range(4):
        ours, theirs = twins(CPU, 2)
        made = [FakeBackend(), FakeBackend(fail_at), FakeBackend()]
        given_out = iter(made)
        manager = managed(ours, CPU, on_new_shape="capture", backend=lambda it=given_out: next(it))
        warm(manager, ours, CPU)

        def both(rows: int, ours: Any = ours, theirs: Any = theirs) -> None:
            x = batch(rows, CPU)
            for layers in (ours, theirs):
                run(layers, x).square().sum().backward()
            same(ours, theirs, rows)

        both(5)
        with pytest.raises(CaptureError, match="cudaErrorStreamCaptureInvalidated"):
            manager.end_iteration()
        gc.collect()
        assert made[1].released and made[1].arena.live == 0 and not made[0].released
        for rows in (3, 5, 5, 3):
            both(rows)
            manager.end_iteration()
        assert captured_blocks(manager) == 1
        manager.capture()
        for rows in (3, 5, 3):
            both(rows)
            manager.end_iteration()
        assert [s.graphs.blocks for s in manager._blocks.captured] == [4, 1]
        with pytest.raises(RuntimeError, match="the layers are captured already"):
            manager.capture()
        manager.close()
        assert all(backend.released for backend in made)


class Odd(Block):
    """Takes what a replay could not see, or, of five rows, changes its argument."""

    def forward(self, x: Tensor, cache: object = None) -> Tensor:
        y = super().forward(x * 1)
        if len(x) == 5:
            x.add_(1)
        return y


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_new_shape_that_the_tracer_refuses_runs_eagerly_from_then_on(
    device: torch.device, microbatches: int
) -> None:
    """It raises once, after the iteration; the other shapes are replayed, and captured, as ever."""
    ours, theirs = twins(device, 2, Odd)
    options = {"num_microbatches": microbatches, "on_new_shape": "capture"}
    manager = managed(ours, device, **options)
    warm(manager, ours, device)

    def iteration(rows: int, odd: bool = False) -> None:
        for _ in range(microbatches):
            x = batch(rows, device)
            for layers in (ours, theirs):
                y = layers[0](x, State(device)) if odd else layers[0](x)
                layers[1](y).square().sum().backward()
        same(ours, theirs, rows)
        manager.end_iteration()

    with pytest.raises(CaptureError, match=r"argument \[1\] is a tests.graphs.layers.State"):
        iteration(3, odd=True)
    for rows, odd in ((3, False), (3, True), (4, False), (3, True), (4, False), (4, False)):
        iteration(rows, odd)
    assert captured_blocks(manager) == 2
    assert [s.graphs.blocks for s in manager._blocks.captured] == [microbatches, 2 * microbatches]


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_a_layer_of_a_new_shape_that_changes_its_argument(device: torch.device) -> None:
    """Its forward is refused, once; then the shape runs eagerly."""
    ours, theirs = twins(device, 1, Odd)
    manager = managed(ours, device, on_new_shape="capture")
    warm(manager, ours, device)
    with pytest.raises(CaptureError, match=r"its forward modifies \[0\] in place"):
        ours[0](batch(5, device))
    manager.discard_iteration()
    for rows in (5, 3, 5):
        x = batch(rows, device)
        for layers in (ours, theirs):
            layers[0](x * 1).square().sum().backward()
        same(ours, theirs, rows)
        manager.end_iteration()
    assert captured_blocks(manager) == 1


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_beyond_max_shapes_blocks_run_eagerly_and_say_so_once(device: torch.device) -> None:
    ours, theirs = twins(device, 2)
    manager = managed(ours, device, on_new_shape="capture", max_shapes=2)
    warm(manager, ours, device)
    with pytest.warns(RuntimeWarning, match="max_shapes=2 shapes are captured") as found:
        for rows in (5, 7, 9, 7, 3, 5):
            x = batch(rows, device)
            for layers in (ours, theirs):
                run(layers, x).square().sum().backward()
            same(ours, theirs, rows)
            manager.end_iteration()
    assert captured_blocks(manager) == 2
    assert len([w for w in found if "max_shapes" in str(w.message)]) == 1


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_an_abandoned_block_of_a_second_set(device: torch.device) -> None:
    """discard_iteration() takes every set back to its beginning, not the first one alone."""
    ours, theirs = twins(device, 2)
    manager = managed(ours, device, on_new_shape="capture")
    for index, rows in enumerate([3, 5, 5, 3, 5]):
        if index == 4:
            old = run(ours, batch(5, device))
            manager.discard_iteration()
        x = batch(rows, device)
        found, expected = run(ours, x), run(theirs, x)
        if index == 4:
            with pytest.raises(ReplayOrderError, match="replay of a forward that is over"):
                old.sum().backward()
        found.square().sum().backward()
        expected.square().sum().backward()
        same(ours, theirs, index)
        manager.end_iteration()
    assert captured_blocks(manager) == 2
