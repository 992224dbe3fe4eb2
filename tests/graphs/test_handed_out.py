# SPDX-License-Identifier: Apache-2.0
"""What replays hand out stays what it was, and what they were not given counts as nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lorakernels.graphs import ReplayError
from tests.graphs.fake import FakeBackend
from tests.graphs.layers import WIDTH, Rotated, batches, managed, run, same, stack, twins, warm
from tests.graphs.steps import Sgd, graphed


class Two(nn.Module):
    """Two outputs of one layer, which leave the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.up(x))
        return h[:, :WIDTH] * 2, h[:, WIDTH:] * 3


def loss_of(outputs: tuple[Tensor, Tensor], used: str) -> Tensor:
    one, other = outputs
    return {"both": one.square().sum() + other.sin().sum(), "first": one.square().sum(),
            "second": other.sin().sum()}[used]  # fmt: skip


@pytest.mark.parametrize("grads", ["add", "autograd"])
def test_an_output_that_is_not_used_has_no_gradient_of_an_earlier_step(device, grads) -> None:
    """Its buffer holds what the last replay was given, or what shares the pool with it."""
    ours = nn.ModuleList([Two()]).to(device)
    theirs = copy.deepcopy(ours)
    manager = managed(ours, device, grads=grads)
    for index, used in enumerate(["both", "both", "first", "both", "second", "first"]):
        x = next(batches(device, 1))
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for layers, one in zip((ours, theirs), inputs, strict=True):
            loss_of(layers[0](one), used).backward()
        same(ours, theirs, (index, used))
        assert torch.equal(inputs[0].grad, inputs[1].grad), (index, used)
        manager.end_iteration()
    assert manager.phase == "replaying"


@pytest.mark.parametrize(
    "how", ["torch.autograd.grad", "a hook of the parameter", "a hook's copy in .grad"]
)
def test_gradients_that_autograd_hands_out_are_not_overwritten(device, how: str) -> None:
    layers = stack(device, 2)
    parameters = list(layers.parameters())
    manager = managed(layers, device, grads="autograd")
    warm(manager, layers, device)
    kept: list[Tensor] = []
    if how == "a hook of the parameter":
        for parameter in parameters:
            parameter.register_hook(kept.append)
    elif how == "a hook's copy in .grad":
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))

    def step() -> list[Tensor]:
        kept.clear()
        loss = run(layers, next(batches(device, 1))).square().sum()
        found = list(torch.autograd.grad(loss, parameters)) if how == "torch.autograd.grad" else []
        if not found:
            loss.backward()
            found = list(kept)
        for parameter in parameters:
            parameter.grad = None
        manager.end_iteration()
        assert len(found) == len(parameters)
        return found

    first = step()
    before = [grad.clone() for grad in first]
    second = step()
    assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    memory = {grad.untyped_storage().data_ptr() for grad in [*first, *second]}
    assert len(memory) == 2 * len(parameters)


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_a_set_of_graphs_is_chosen_by_autocast_too(device) -> None:
    """The same tensors and constants with and without autocast are two kinds of blocks."""
    ours, theirs = twins(device, 2)
    manager = managed(ours, device, on_new_shape="capture")
    x = next(batches(device, 1))
    kind = device.type
    for index, enabled in enumerate([False, True, True, False, True, False, False, True]):
        results = []
        for layers in (ours, theirs):
            with torch.autocast(kind, torch.bfloat16, enabled=enabled, cache_enabled=False):
                y = run(layers, x)
            y.square().sum().backward()
            results.append(y)
        assert torch.equal(*results), (index, enabled)
        same(ours, theirs, (index, enabled))
        manager.end_iteration()
    assert [s.graphs.blocks for s in manager._blocks.captured] == [3, 3]


def test_autocast_that_was_not_captured_is_refused(device) -> None:
    layers = stack(device, 2)
    manager = managed(layers, device)
    warm(manager, layers, device)
    x = next(batches(device, 1))
    with (
        pytest.raises(ReplayError, match="autocast"),
        torch.autocast(device.type, torch.bfloat16),
    ):
        run(layers, x)


def test_a_side_input_that_was_written_in_place_before_is_taken(device) -> None:
    """cos and sin, shared by the layers, as rotary embeddings that are filled anew for each batch."""
    ours, theirs = twins(device, 2, Rotated)
    manager = managed(ours, device)
    cos, sin = (torch.empty(WIDTH, device=device) for _ in range(2))
    for index in range(4):
        x, angle = next(batches(device, 1)), torch.randn(WIDTH, device=device)
        torch.cos(angle, out=cos)
        sin.copy_(angle.sin())
        results = []
        for layers in (ours, theirs):
            y = x
            for layer in layers:
                y, _ = layer(y, position_embeddings=(cos, sin))
            y.square().sum().backward()
            results.append(y)
        assert torch.equal(*results), index
        same(ours, theirs, index)
        manager.end_iteration()
    assert [s.graphs.blocks for s in manager._blocks.captured] == [3]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.up(a)) + 2 * b


def test_one_tensor_given_twice_is_not_two_tensors(device) -> None:
    """The graph copies it once: a second tensor, however like the first, would not be read."""
    layer = Pair().to(device)
    manager = managed([layer], device)
    x, other = batches(device, 2)
    layer(x, x).sum().backward()
    manager.end_iteration()
    layer(other, other).sum().backward()
    manager.end_iteration()
    with pytest.raises(ReplayError):
        layer(x, other)
    manager.discard_iteration()
    assert torch.equal(layer(other, other), torch.tanh(layer.up(other)) + 2 * other)


def test_gradients_between_layers_that_a_hook_keeps_are_not_overwritten(device) -> None:
    """From the first replay on: what was kept then is seen, and is handed out as copies from there on."""
    ours, theirs = twins(device, 3)
    manager = managed(ours, device)
    warm(manager, ours, device)
    kept: list[list[Tensor]] = [[], []]
    for index in range(6):
        x = next(batches(device, 1))
        for layers, mine in zip((ours, theirs), kept, strict=True):
            y = x
            for layer in layers:
                y = layer(y)
                y.register_hook(mine.append)
            y.square().sum().backward()
            layers.zero_grad(set_to_none=True)
        assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True)), index
        manager.end_iteration()
    assert len(kept[0]) == 18


@pytest.mark.parametrize("how", ["reset", "recapture"])
def test_gradients_of_whole_steps_outlive_their_pool(how: str) -> None:
    """A step's gradients lie in its graph's memory, which is given back."""
    backends: list[FakeBackend] = []

    def backend() -> FakeBackend:
        backends.append(FakeBackend())
        return backends[-1]

    model = stack(torch.device("cpu"), 1)[0]
    run_step = graphed(Sgd(model), torch.device("cpu"), warmup_steps=1, backend=backend)
    for x in batches(torch.device("cpu"), 3):
        run_step(x)
    before = [p.grad.clone() for p in model.parameters()]
    getattr(run_step, how)()
    for parameter, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, grad)
        assert not any(b.arena.owns(parameter.grad) for b in backends)


class Aside(nn.Module):
    """A second output that nothing is trained through."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x)
        return torch.tanh(h), h.detach().square()


def test_an_output_without_gradient_is_one_in_replays_too(device) -> None:
    ours, theirs = twins(device, 2, Aside)
    manager = managed(ours, device)
    for index in range(4):
        x = next(batches(device, 1))
        for layers in (ours, theirs):
            y, first = layers[0](x)
            y, second = layers[1](y)
            assert [t.requires_grad for t in (y, first, second)] == [True, False, False], index
            (y * first + second).square().sum().backward()
        same(ours, theirs, index)
        manager.end_iteration()
    assert manager.phase == "replaying"


def test_an_output_that_was_changed_in_place_once_is_known_in_later_iterations(device) -> None:
    """It is handed out as an alias, whose version stays what that change has made it."""
    ours, theirs = twins(device, 2)
    manager = managed(ours, device)
    for index in range(5):
        if index == 4:
            y = ours[0](next(batches(device, 1)))
            with torch.no_grad():
                y.mul_(2)
            with pytest.raises(ReplayError, match="modified in place"):
                ours[1](y)
            del y
            manager.discard_iteration()
        x = next(batches(device, 1))
        for layers in (ours, theirs):
            run(layers, x).square().sum().backward()
        same(ours, theirs, index)
        manager.end_iteration()
    assert not manager._blocks.captured[0].graphs.trial
