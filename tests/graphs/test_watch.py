# SPDX-License-Identifier: Apache-2.0
"""What else a captured layer relies on: gradients' memory, hooks, tensors that are no parameters, random states."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lorakernels.graphs import CaptureError, ReplayError
from tests.graphs.fake import FakeBackend
from tests.graphs.layers import (
    WIDTH,
    Block,
    Drop,
    Rotated,
    State,
    batches,
    managed,
    run,
    same,
    stack,
    twins,
    warm,
)

CPU = torch.device("cpu")


class Gained(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.state = torch.ones(()), State(CPU)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


def moved(x: Tensor) -> None:
    x.data = x.data.clone()


CHANGES: dict[str, tuple[Callable[[Gained], object], str]] = {
    "the data of a gradient": (lambda m: moved(m.down.weight.grad), "gradient of down.weight"),
    "the data of a main_grad": (lambda m: moved(m.up.weight.main_grad), "gradient of up.weight"),
    "a hook on a parameter": (
        lambda m: m.down.weight.register_hook(lambda g: None),
        "_backward_hooks of 'down.weight': expected None",
    ),
    "a hook after accumulation": (
        lambda m: m.down.weight.register_post_accumulate_grad_hook(lambda p: None),
        "_post_accumulate_grad_hooks of 'down.weight': expected None",
    ),
    "a tensor attribute": (
        lambda m: setattr(m, "gain", torch.tensor(5.0)),
        "expected gain=the tensor at",
    ),
    "the data of a tensor attribute": (lambda m: moved(m.gain), "address of 'gain'"),
    "a layer's random state": (lambda m: setattr(m, "state", State(CPU)), "state=a State at"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_refused(device: torch.device, change, message: str) -> None:
    layers = stack(device, 1, Gained)
    layers[0].gain = layers[0].gain.to(device)
    layers[0].up.weight.main_grad = torch.zeros_like(layers[0].up.weight)
    manager = managed(layers, device)
    warm(manager, layers, device)
    run(layers, next(batches(device, 1))).sum().backward()
    manager.end_iteration()
    change(layers[0])
    with pytest.raises(ReplayError, match=message) as error:
        run(layers, next(batches(device, 1))).sum().backward()
    assert error.value.recapture


def test_what_was_repaired_after_a_failed_capture_is_watched(device: torch.device) -> None:
    class Dropped(Block):
        def __init__(self) -> None:
            super().__init__()
            self.p = 0.5

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return nn.functional.dropout(y, self.p) if self.p else y

    layers = stack(device, 1, Dropped)
    manager = managed(layers, device)
    run(layers, next(batches(device, 1))).sum().backward()
    with pytest.raises(CaptureError, match="CUDA generator"):
        manager.end_iteration()
    layers[0].p = 0.0
    manager.capture()
    layers[0].p = 0.9
    with pytest.raises(ReplayError, match=r"expected p=0.0, found p=0.9"):
        run(layers, next(batches(device, 1)))


def test_a_tensor_that_is_trained_from_outside(device: torch.device) -> None:
    """Its gradient would be the pool's memory, and lost at the next zero_grad."""
    scale = nn.Parameter(torch.ones((), device=device))

    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scale

    layers = stack(device, 1, Scaled)
    manager = managed(layers, device)
    run(layers, next(batches(device, 1))).sum().backward()
    before = scale.grad.clone()
    with pytest.raises(CaptureError, match=r"trains a tensor \[\] that is neither its parameter"):
        manager.end_iteration()
    assert torch.equal(scale.grad, before)


def test_masks_that_would_repeat(device: torch.device) -> None:
    """F9: dropout from a state that nobody has given to the manager."""
    layers = [Block().to(device), Drop(State(device))]
    manager = managed(layers, device)
    run(layers, next(batches(device, 1))).sum().backward()
    with pytest.raises(CaptureError, match=r"layer '1', .*none of rng_states advances"):
        manager.end_iteration()


def test_one_stream_for_all_blocks_of_an_iteration() -> None:
    """F2: graphs of one pool on two streams could overlap."""
    made: list[FakeBackend] = []
    layers = stack(CPU, 2)
    backend = lambda: made.append(FakeBackend()) or made[-1]  # noqa: E731
    manager = managed(layers, CPU, num_microbatches=2, backend=backend)
    warm(manager, layers, CPU)
    run(layers, next(batches(CPU, 1))).sum().backward()
    made[0].current += 1
    with pytest.raises(ReplayError, match="stream: expected 0x7, found 0x8"):
        run(layers, next(batches(CPU, 1)))


def test_a_gradient_that_a_hook_turns_in_place(device: torch.device) -> None:
    """A view at the same address with other strides is another gradient. The graph's matrix products read it from
    contiguous memory, eager ones transposed: sums of 8 float32 in another order, a few 2⁻²⁴ of their norm."""
    ours, theirs = twins(device, 2)
    manager = managed(ours, device)
    for _ in range(4):
        x = torch.randn(WIDTH, WIDTH, device=device)
        for layers in (ours, theirs):
            h = layers[0](x)
            h.register_hook(lambda g: g.t())
            (layers[1](h) * torch.arange(WIDTH, device=device)).sum().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (p.grad - q.grad).norm() <= 2**-20 * q.grad.norm()
        manager.end_iteration()


def test_expanded_inputs(device: torch.device) -> None:
    """A mask that is one row for all: its memory cannot be written to as often as it is read."""
    ours, theirs = twins(device, 2, Rotated)
    manager = managed(ours, device)
    for step in range(4):
        x, cos = torch.randn(3, WIDTH, device=device), torch.rand(WIDTH, device=device)
        mask = torch.rand(1, WIDTH, device=device).expand(3, WIDTH)
        results = []
        for layers in (ours, theirs):
            y = x
            for layer in layers:
                y, _ = layer(y, attention_mask=mask, position_embeddings=(cos, cos))
            results.append(y)
            y.sum().backward()
        assert torch.equal(*results), step
        same(ours, theirs, step)
        manager.end_iteration()


def test_an_input_that_changes_in_place_between_two_layers(device: torch.device) -> None:
    class Late(Block):
        def forward(self, x: Tensor, depth: Tensor) -> Tensor:
            return super().forward(x) * (depth > 1).float()

    ours, theirs = twins(device, 3, Late)
    manager = managed(ours, device)
    for step in range(4):
        x, results = next(batches(device, 1)), []
        for layers in (ours, theirs):
            y, depth = x, torch.zeros((), device=device)
            for layer in layers:
                y = layer(y, depth)
                depth.add_(1)
            results.append(y)
            y.sum().backward()
        assert torch.equal(*results), step
        same(ours, theirs, step)
        manager.end_iteration()


def test_an_eager_microbatch_among_replayed_ones(device: torch.device) -> None:
    ours, theirs = twins(device, 2)
    manager = managed(ours, device, num_microbatches=2, on_new_shape="eager")
    for step in range(4):
        rows = (3, 5) if step == 2 else (3, 3)
        for n in rows:
            x = torch.randn(n, WIDTH, device=device)
            for layers in (ours, theirs):
                if layers is ours and n == 5:
                    with pytest.warns(RuntimeWarning, match="this call runs eagerly"):
                        y = run(layers, x)
                else:
                    y = run(layers, x)
                y.sum().backward()
        same(ours, theirs, step)
        manager.end_iteration()
    run(ours, next(batches(device, 1))).sum().backward()
    with pytest.raises(RuntimeError, match="replay ended early"):
        manager.end_iteration()


def test_copies_of_layers_are_nobodys(device: torch.device) -> None:
    """Neither while their order is recorded, nor when they have a forward of their own and are captured."""
    layer = Block().to(device)
    layer.forward = lambda x: 42.0 * x + 0 * Block.forward(layer, x)
    manager = managed([layer], device)
    x = next(batches(device, 1))
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x), 42.0 * x) and not manager._recorder._iteration.events
    warm(manager, [layer], device)
    assert torch.equal(copy.deepcopy(layer)(x), 42.0 * x)


def test_disabled_while_recording(device: torch.device) -> None:
    layers = stack(device, 2)
    manager = managed(layers, device, warmup_steps=2)
    for _ in range(2):
        run(layers, next(batches(device, 1))).sum().backward()
        with manager.disabled():
            run(layers, torch.randn(7, WIDTH, device=device)).sum().backward()
            manager.end_iteration()
        manager.end_iteration()
    assert manager.phase == "replaying"


def test_an_output_changed_in_place_after_its_last_reader(device: torch.device) -> None:
    """The reader's backward needs it: eager autograd refuses, too. The gradient that comes back may be changed."""
    ours, theirs = twins(device, 2)
    manager = managed(ours, device)
    for step in range(4):
        x = next(batches(device, 1))
        for layers in (ours, theirs):
            h = layers[0](x)
            h.register_hook(lambda g: g.mul_(2))
            y = layers[1](h).sum()
            del h
            y.backward()
        same(ours, theirs, step)
        manager.end_iteration()
    assert not manager.report().copied
    for layers, error in ((theirs, RuntimeError), (ours, ReplayError)):
        h = layers[0](x)
        y = layers[1](h)
        with torch.no_grad():
            h.mul_(2)
        del h
        with pytest.raises(error, match="modified"):
            y.sum().backward()
