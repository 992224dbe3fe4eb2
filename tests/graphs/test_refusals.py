# SPDX-License-Identifier: Apache-2.0
"""What is refused, by name, before anything is launched. On a GPU and on the imitated graphs of fake.py."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lorakernels.graphs import CaptureError, ReplayError, ReplayOrderError
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


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scaling, self.merged = 2.0, False
        self.register_buffer("offset", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scaling + self.offset


def moved(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.clone()


CHANGES: dict[str, tuple[Callable[[Scaled], object], str]] = {
    "data of a parameter": (
        lambda m: moved(m.up.weight),
        r"address of 'up.weight': expected 0x\w+",
    ),
    "a parameter object": (
        lambda m: setattr(m.up, "weight", nn.Parameter(m.up.weight.data)),
        "parameters of up: expected weight=the tensor at",
    ),
    "a buffer": (
        lambda m: setattr(m, "offset", m.offset.clone()),
        "buffers of the layer: expected off",
    ),
    "an attribute": (
        lambda m: setattr(m, "scaling", 3.0),
        "attributes of the layer: expected scaling=2.0, found scaling=3.0",
    ),
    "a flag, as an adapter's merge": (lambda m: setattr(m, "merged", True), "found merged=True"),
    "a submodule": (
        lambda m: setattr(m, "down", nn.Linear(16, 8)),
        "modules of the layer: expected down=",
    ),
    "a new submodule": (lambda m: m.add_module("extra", nn.ReLU()), r"found also \['extra'\]"),
    "a submodule's mode": (lambda m: m.up.eval(), "attributes of up: expected training=True"),
    "a hook inside": (
        lambda m: m.up.register_forward_hook(lambda *_: None),
        "forward_hooks of up: expected only",
    ),
    "frozen": (
        lambda m: m.down.bias.requires_grad_(False),
        "requires_grad of 'down.bias': expected True",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_changed_layer(device: torch.device, change, message: str) -> None:
    layers = stack(device, 2, Scaled)
    manager = managed(layers, device)
    warm(manager, layers, device)
    run(layers, next(batches(device, 1))).sum().backward()
    manager.end_iteration()
    launches = manager.graphs.blocks
    change(layers[1])
    x = layers[0](next(batches(device, 1)))
    with pytest.raises(ReplayError, match=r"replay of layer '1': .*" + message) as error:
        layers[1](x)
    assert error.value.recapture and "recapture() between iterations" in manager.explain(
        error.value
    )
    assert manager.graphs.position == 1 and manager.graphs.blocks == launches
    # What was refused runs once it is captured again.
    manager.discard_iteration()
    layers[1].up._forward_hooks.clear()
    layers.to(device)
    theirs = copy.deepcopy(layers)
    manager.recapture()
    for p in (*layers.parameters(), *theirs.parameters()):
        p.grad = None
    x = next(batches(device, 1))
    run(layers, x).sum().backward(), run(theirs, x).sum().backward()
    same(layers, theirs)


INPUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "a broadcast": (lambda x: x[:1], r"found float32 \[1, 8\]"),
    "a transposed view at the same address": (lambda x: x.t(), r"with strides \[1, 8\]"),
    "a dtype": (lambda x: x.double(), "found float64"),
    "one that requires grad": (lambda x: x.requires_grad_(), "requires grad"),
    "a shape": (lambda x: x[:, :4], r"found float32 \[8, 4\]"),
}


@pytest.mark.parametrize(("change", "message"), INPUTS.values(), ids=INPUTS)
def test_a_changed_input(device: torch.device, change, message: str) -> None:
    layers = stack(device, 1)
    manager = managed(layers, device)
    run(layers, torch.randn(8, 8, device=device)).sum().backward()
    manager.end_iteration()
    x = torch.randn(8, 8, device=device)
    with pytest.raises(ReplayError, match=r"layer '0': input \[0\]\[0\]: .*" + message):
        layers[0](change(x))
    assert manager.graphs.position == 0
    run(layers, torch.randn(8, 8, device=device)).sum().backward()
    manager.end_iteration()


def test_a_new_shape_may_run_eagerly_and_says_so_once(device: torch.device) -> None:
    ours, theirs = twins(device)
    manager = managed(ours, device, on_new_shape="eager")
    warm(manager, ours, device)
    with pytest.warns(RuntimeWarning, match=r"layer '0'.*this call runs eagerly") as found:
        for rows in (5, 3, 5, 3, 4):
            x = torch.randn(rows, WIDTH, device=device)
            for layers in (ours, theirs):
                run(layers, x).square().sum().backward()
            manager.end_iteration()
            same(ours, theirs, rows)
    assert len([w for w in found if "layer '0'" in str(w.message)]) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_cache": True}, "arguments: expected False, found True"),
        ({"attention_mask": "tensor"}, "arguments: expected None, found a tensor"),
        ({"extra": 1}, "arguments: expected"),
        (
            {"position_embeddings": "other"},
            r"position_embeddings\[0\]: expected the same tensor as",
        ),
    ],
    ids=["a constant", "a tensor for None", "one more", "another side input"],
)
def test_changed_arguments(device: torch.device, change: dict, message: str) -> None:
    layers = stack(device, 2, Rotated)
    manager = managed(layers, device)

    def call(layer: nn.Module, x: torch.Tensor, cos: torch.Tensor, **more: object) -> torch.Tensor:
        arguments = {"attention_mask": None, "position_embeddings": (cos, cos), "use_cache": False}
        return layer(x, **{**arguments, **more})[0]

    for _ in range(2):
        cos = torch.rand(WIDTH, device=device)
        call(layers[1], call(layers[0], next(batches(device, 1)), cos), cos).sum().backward()
        manager.end_iteration()
    x = call(layers[0], next(batches(device, 1)), cos)
    other = {"tensor": cos, "other": (cos.clone(),) * 2}
    change = {k: other.get(v, v) if isinstance(v, str) else v for k, v in change.items()}
    with pytest.raises(ReplayError, match=message):
        call(layers[1], x, cos, **change)


class Gathers(Block):
    """Returns its output and its input in what it is told."""

    def forward(self, x: torch.Tensor, into: Any = tuple) -> Any:
        return into((super().forward(x), x.detach()))


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (list, "<class 'list'>"),
        (torch.Tensor, "<class 'torch.Tensor'>"),
        ((), "a tuple"),
        (3, "3"),
        (torch.zeros(()), "a tensor"),
    ],
    ids=["another", "the tensors'", "an instance", "a number", "a tensor"],
)
def test_a_class_is_a_constant(device: torch.device, other: Any, found: str) -> None:
    ours, theirs = twins(device, 1, Gathers)
    manager = managed(ours, device)
    for _ in range(4):
        x = next(batches(device, 1))
        for layers in (ours, theirs):
            results = layers[0](x, into=tuple)
            assert isinstance(results, tuple)
            results[0].sum().backward()
        same(ours, theirs)
        manager.end_iteration()
    assert manager.phase == "replaying"
    expected = re.escape(f"arguments: expected <class 'tuple'>, found {found}")
    with pytest.raises(ReplayError, match=expected):
        ours[0](x, into=other)
    ours[0](x, into=tuple)[0].sum().backward()
    manager.end_iteration()


@pytest.mark.parametrize("class_first", [False, True], ids=["a tensor", "a class"])
def test_a_tensor_is_not_its_class(device: torch.device, class_first: bool) -> None:
    layers = stack(device, 1, Mixes)
    manager = managed(layers, device)
    x = next(batches(device, 1))
    kinds = [x.clone(), torch.Tensor]
    kinds = kinds[::-1] if class_first else kinds
    for _ in range(2):
        layers[0](x, kinds[0]).sum().backward()
        manager.end_iteration()
    with pytest.raises(ReplayError, match="arguments: expected"):
        layers[0](x, kinds[1])


class Mixes(Block):
    def forward(self, x: torch.Tensor, with_what: Any) -> torch.Tensor:
        return super().forward(x if with_what is torch.Tensor else x + with_what)


def test_order(device: torch.device) -> None:
    """The handbook's shared-pool case, 3.0 instead of 4.0, is an error before any launch."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3 + 5 * self.w

    class Power(Line):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x**2 * self.w

    layers = nn.ModuleList([Line(), Power()]).to(device)
    manager = managed(layers, device)
    one, two = (torch.full((1,), v, device=device) for v in (1.0, 2.0))
    for _ in range(2):
        (layers[0](one) + layers[1](two)).backward()
        manager.end_iteration()
    with pytest.raises(
        ReplayOrderError, match=r"expected forward of layer '0', .*found forward of layer '1'"
    ):
        layers[1](two)
    y = layers[0](one)
    with pytest.raises(
        ReplayOrderError, match=r"expected forward of layer '1', .*found backward of layer '0'"
    ):
        y.backward()
    assert (y.item(), layers[1](two).item()) == (8.0, 4.0)


def test_a_backward_of_an_abandoned_iteration(device: torch.device) -> None:
    layers = stack(device, 1)
    manager = managed(layers, device)
    warm(manager, layers, device)
    old = layers[0](next(batches(device, 1))).sum()
    manager.discard_iteration()
    layers[0](next(batches(device, 1)))
    with pytest.raises(ReplayOrderError, match="replay of a forward that is over"):
        old.backward()


def test_second_backwards_and_second_derivatives(device: torch.device) -> None:
    layers = stack(device, 1)
    manager = managed(layers, device)
    warm(manager, layers, device)
    y = layers[0](next(batches(device, 1))).sum()
    y.backward(retain_graph=True)
    with pytest.raises(ReplayOrderError, match="found backward of layer '0'"):
        y.backward()
    y = layers[0](next(batches(device, 1))).sum()
    with pytest.raises(ReplayError, match="create_graph"):
        y.backward(create_graph=True)


def test_an_output_changed_in_place_on_its_way(device: torch.device) -> None:
    layers = stack(device, 2)
    manager = managed(layers, device)
    warm(manager, layers, device)
    x = layers[0](next(batches(device, 1)))
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(
        ReplayError, match="the tensor handed out as 0 output 0, found that tensor, modified"
    ):
        layers[1](x)
    manager.discard_iteration()
    x = layers[0](next(batches(device, 1)))
    with pytest.raises(ReplayError, match="found another tensor, at"):
        layers[1](x.detach().clone().requires_grad_())


class Waits(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if x.sum().item() > 0 else 2)


class Draws(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return super().forward(x)


class Remembers(Block):
    def forward(self, x: torch.Tensor, cache: object = None) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Waits, r"layer '1', forward: .*The layer waits for the device \(.item\(\)"),
        (
            Draws,
            "layer '1', forward: .*torch's CUDA generator, whose numbers a raw capture would freeze",
        ),
    ],
    ids=["item", "dropout of torch"],
)
def test_what_cannot_be_captured(device: torch.device, kind: type[nn.Module], message: str) -> None:
    """Refused by name, rolled back, and with the layer repaired a second capture succeeds."""
    layers = nn.ModuleList([Block(), kind()]).to(device)
    manager = managed(layers, device)
    run(layers, next(batches(device, 1))).sum().backward()
    generator = torch.get_rng_state()
    reserved = torch.cuda.memory_reserved() if device.type == "cuda" else 0
    with pytest.raises(CaptureError, match=message):
        manager.end_iteration()
    assert manager.phase == "failed" and torch.equal(generator, torch.get_rng_state())
    if device.type == "cuda":
        torch.cuda.empty_cache()
        # The first capture of a process makes cuBLAS's workspaces for its stream, one for each of two threads
        assert torch.cuda.memory_reserved() <= reserved + (2 * 34 << 20)
    run(layers, next(batches(device, 1))).sum().backward()
    manager.end_iteration()
    layers[1].forward = Block.forward.__get__(layers[1])
    manager.capture()
    theirs = copy.deepcopy(layers)
    for layer in theirs:
        layer.__dict__["forward"] = Block.forward.__get__(layer)
    for p in (*layers.parameters(), *theirs.parameters()):
        p.grad = None
    x = next(batches(device, 1))
    run(layers, x).sum().backward(), run(theirs, x).sum().backward()
    same(layers, theirs)


def test_what_is_refused_while_recording(device: torch.device) -> None:
    layer = InPlace().to(device)
    managed([layer], device)
    with pytest.raises(CaptureError, match=r"its forward modifies \[0\] in place"):
        layer(next(batches(device, 1)))
    layer = Remembers().to(device)
    manager = managed([layer], device)
    layer(next(batches(device, 1)), cache=State(device)).sum().backward()
    with pytest.raises(
        CaptureError, match=r"argument cache is a tests.graphs.layers.State.*use_cache=False"
    ):
        manager.end_iteration()


def test_a_reentrant_checkpoint_around_a_layer(device: torch.device) -> None:
    layers = stack(device, 2)
    manager = managed(layers, device)
    x = next(batches(device, 1)).requires_grad_()
    checkpoint(layers[1], layers[0](x), use_reentrant=True).sum().backward()
    with pytest.raises(CaptureError, match="layer '1', check: a reentrant checkpoint around it"):
        manager.end_iteration()


def test_a_state_that_moves(device: torch.device) -> None:
    state = State(device)
    layer = Drop(state)
    manager = managed([layer], device, rng_states=[state])
    manager.device = device
    for _ in range(2):
        layer(next(batches(device, 1)).requires_grad_()).sum().backward()
        manager.end_iteration()
    state.tensor = state.tensor.clone()
    with pytest.raises(
        ReplayError, match=r"tensors of rng_states\[0\]: expected tensor=the tensor at"
    ):
        layer(next(batches(device, 1)).requires_grad_())


def test_a_main_grad_that_moves(device: torch.device) -> None:
    """F7."""
    layer = nn.Linear(WIDTH, WIDTH, device=device)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    manager = managed([layer], device)
    warm(manager, [layer], device)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    with pytest.raises(
        ReplayError, match=r"main_grad of 'weight': expected the tensor at .*found another"
    ):
        layer(next(batches(device, 1))).sum().backward()


def test_autocast_is_part_of_the_call(device: torch.device) -> None:
    ours, theirs = twins(device, 2)
    manager = managed(ours, device)
    with pytest.raises(
        ReplayError, match=r"autocast: expected \(True, torch.bfloat16\), found \(False"
    ):
        for _ in range(3):
            x = next(batches(device, 1))
            with torch.autocast(device.type, torch.bfloat16):
                y, z = run(ours, x), run(theirs, x)
            assert y.dtype == z.dtype and torch.equal(y, z)
            y.float().sum().backward(), z.float().sum().backward()
            same(ours, theirs)
            manager.end_iteration()
        run(ours, x)


def test_functorch_transforms(device: torch.device) -> None:
    """A replay skips what autograd.Function asks for their sake, but not when one is active."""
    layers = stack(device, 1)
    manager = managed(layers, device)
    run(layers, torch.randn(3, WIDTH, device=device).requires_grad_()).sum().backward()
    manager.end_iteration()
    x = torch.randn(3, WIDTH, device=device)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: run(layers, x).sum())(x)
    manager.discard_iteration()
    run(layers, x.requires_grad_()).sum().backward()
