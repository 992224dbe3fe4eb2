# SPDX-License-Identifier: Apache-2.0
"""GraphManager beside an eager twin, bit for bit: on a GPU, and on a CPU with graphs that are imitated (fake.py)."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from lorakernels.graphs import (
    GraphManager,
    GraphOptions,
    OrderError,
    ReplayOrderError,
    StepGraph,
)
from torch import nn

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


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("grads", ["add", "autograd"])
def test_training_is_bit_equal(device: torch.device, set_to_none: bool, grads: str) -> None:
    ours, theirs = twins(device)
    manager = managed(ours, device, num_microbatches=2, warmup_steps=2, grads=grads)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
    for step in range(6):
        for x in batches(device, 2):
            results = [run(m, x) for m in (ours, theirs)]
            assert torch.equal(*results), step
            for y in results:
                y.square().sum().backward()
        same(ours, theirs, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        manager.end_iteration()
    assert manager.phase == "replaying"
    report = manager.report()
    assert report.microbatches_captured == 1 and len(report.graphs) == 6 and not report.copied
    assert report.buffers < report.unshared_buffers and report.saved_bytes > 0


def test_called_as_transformers_calls_its_layers(device: torch.device) -> None:
    """Side inputs by keyword and in tuples, constants, tuples out; shared ones are copied once per microbatch."""
    ours, theirs = twins(device, 4, Rotated)
    manager = managed(ours, device, num_microbatches=2)

    def model(layers: nn.ModuleList, x: torch.Tensor, cos: torch.Tensor, mask: torch.Tensor):
        for layer in layers:
            x, nothing = layer(
                x, attention_mask=mask, position_embeddings=(cos, cos), use_cache=False
            )
            assert nothing is None
        return x

    for step in range(4):
        for x in batches(device, 2):
            cos, mask = torch.rand(WIDTH, device=device), torch.rand(3, 1, device=device)
            a, b = (model(m, x, cos, mask) for m in (ours, theirs))
            assert torch.equal(a, b), step
            a.sum().backward(), b.sum().backward()
        same(ours, theirs, step)
        manager.end_iteration()
    kinds = [b.kind for b in manager._blocks.captured[0].plan.buffers]
    assert kinds.count("input") == 3, "x, cos, mask; sin is the same object as cos"


@pytest.mark.parametrize("kept", ["in a list", "by autograd"])
def test_an_output_that_eager_code_keeps_is_handed_out_as_a_copy(
    device: torch.device, kept: str
) -> None:
    """F5. transformers' output_hidden_states keeps the objects; an auxiliary loss keeps them in its graph."""
    ours, theirs = twins(device)
    manager = managed(ours, device)

    def loss(layers: nn.ModuleList, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        hidden, penalty = [], 0.0
        for layer in layers:
            x = layer(x)
            if kept == "in a list":
                hidden.append(x)
            else:
                penalty = penalty + x.square().sum()
        return x.sum() + penalty, hidden

    for step in range(4):
        x = next(batches(device, 1))
        results = []
        for layers in (ours, theirs):
            value, hidden = loss(layers, x)
            value.backward()
            results.append([value.detach(), *hidden])
        assert all(map(torch.equal, *results)), step
        same(ours, theirs, step)
        manager.end_iteration()
    assert [n.startswith(f"{i} output") for i, n in enumerate(manager.report().copied)] == [
        True,
        True,
    ]


def test_an_output_kept_for_the_first_time_after_the_trial_is_refused_then_copied(
    device: torch.device,
) -> None:
    layers = stack(device)
    manager = managed(layers, device)
    for _ in range(4):
        run(layers, next(batches(device, 1))).sum().backward()
        manager.end_iteration()
    assert not manager.report().copied
    x = layers[0](next(batches(device, 1)))
    y = layers[1](x)
    with pytest.raises(RuntimeError, match=r"layer '0': 0 output 0: expected no reference to it"):
        layers[2](y)
    manager.discard_iteration()
    del y
    x = layers[0](next(batches(device, 1)))
    content = x.detach().clone()
    layers[2](layers[1](x)).sum().backward()
    assert torch.equal(x, content) and manager.report().copied == ("0 output 0",)


def test_branches_and_skips_between_layers(device: torch.device) -> None:
    """Layers 1 and 2 read layer 0; eager code adds their outputs; layer 3 reads that.

    Five gradients meet at layer 0's output. A graphed layer adds its own two first, eager autograd all in turn: float32
    additions in another order, so the norms of the differences are a few 2⁻²⁴ of the gradients'.
    """
    ours, theirs = twins(device, 4)
    manager = managed(ours, device)
    for _ in range(4):
        x = next(batches(device, 1))
        for layers in (ours, theirs):
            h = layers[0](x)
            layers[3](layers[1](h) + layers[2](h) + h).square().sum().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (p.grad - q.grad).norm() <= 2**-20 * q.grad.norm()
        manager.end_iteration()


def test_eval_is_never_the_training_graph(device: torch.device) -> None:
    """F35."""
    state = State(device)
    layers = [Drop(state), Block().to(device)]
    manager = managed(layers, device, rng_states=[state])
    x = next(batches(device, 1))
    run(layers, x.requires_grad_()).sum().backward()
    manager.end_iteration()
    for layer in layers:
        layer.eval()
    with torch.no_grad():
        for rows in (3, 5, 3):
            x = torch.randn(rows, WIDTH, device=device)
            first, second = run(layers, x), run(layers, x)
            with manager.disabled():
                expected = run(layers, x)
            assert torch.equal(first, expected) and torch.equal(second, expected)
    for layer in layers:
        layer.train()
    x = next(batches(device, 1)).requires_grad_()
    assert not torch.equal(layers[0](x), x)
    manager.close()


def test_disabled_and_close_are_the_eager_layers(device: torch.device) -> None:
    ours, theirs = twins(device)
    forwards = [vars(layer).get("forward") for layer in ours]
    manager = managed(ours, device)
    warm(manager, ours, device)
    launches = manager.graphs.blocks
    with manager.disabled():
        for _ in range(2):
            with manager.disabled():
                pass
            x = next(batches(device, 1))
            run(ours, x).sum().backward(), run(theirs, x).sum().backward()
            same(ours, theirs)
            manager.end_iteration()
    assert manager.graphs.blocks == launches
    ours.zero_grad(), theirs.zero_grad()
    manager.close()
    assert [vars(layer).get("forward") for layer in ours] == forwards
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in ours)
    run(ours, x).sum().backward(), run(theirs, x).sum().backward()
    same(ours, theirs)


def test_reset_frees_everything_and_records_again(device: torch.device) -> None:
    layers = stack(device)
    made: list[FakeBackend] = []
    options = {}
    if device.type == "cpu":
        options["backend"] = lambda: made.append(FakeBackend()) or made[-1]
    manager = managed(layers, device, **options)
    warm(manager, layers, device)
    loss = run(layers, next(batches(device, 1))).sum()
    loss.backward(retain_graph=True)
    manager.end_iteration()
    graphs = weakref.ref(manager.graphs)
    layers.zero_grad()
    manager.reset()
    with pytest.raises(RuntimeError, match=r"found graphs that reset\(\) has dropped"):
        loss.backward()
    del loss
    gc.collect()
    assert graphs() is None and manager.phase == "recording"
    for backend in made:
        assert backend.released and backend.arena.live == 0
        assert not [g for g in backend.graphs if g() is not None and g().alive]
    warm(manager, layers, device)
    run(layers, next(batches(device, 1))).sum().backward()


def test_bad_arguments_name_the_value() -> None:
    layers = stack(CPU, 2)
    for options, message in [
        ({"grads": "sum"}, r"grads must be one of \('auto', 'add', 'autograd'\), got 'sum'"),
        ({"warmup_steps": 0}, "warmup_steps must be an int >= 1, got 0"),
        ({"num_microbatches": 1.5}, "num_microbatches must be an int >= 1, got 1.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            GraphManager(layers, **options)
    with pytest.raises(TypeError, match="layers must be a sequence of modules, got one Block"):
        GraphManager(layers[0])
    with pytest.raises(TypeError, match="got a function; StepGraph captures a step function"):
        GraphManager(lambda x: x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_new_shape": "pad"}, r"on_new_shape must be one of .*, got 'pad'"),
        ({"mode": "global"}, r"mode must be one of \('relaxed', 'thread_local'\), got 'global'"),
        ({"max_shapes": 0}, "max_shapes must be an int >= 1, got 0"),
    ],
    ids=["on_new_shape", "mode", "max_shapes"],
)
def test_bad_options_name_the_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraphOptions(**options)


@pytest.mark.parametrize("kind", [GraphManager, StepGraph, GraphOptions])
def test_signatures_are_readable(kind: type) -> None:
    """Every parameter by name, at most eight, with its type: what `help` and editors show."""
    parameters = inspect.signature(kind).parameters.values()
    assert len(parameters) <= 8
    assert all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    assert all(p.annotation is not p.empty for p in parameters)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_layers_that_have_no_graphs_are_refused_before_anything_is_attached(where: str) -> None:
    layers = stack(torch.device(where), 2)
    message = f"the modules must be on a CUDA device before their graphs are made, found {where}"
    with pytest.raises(ValueError, match=message):
        GraphManager(layers)
    with pytest.raises(ValueError, match=message):
        StepGraph(lambda x: x, modules=[layers])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layers)
    assert not any("forward" in vars(m) for m in layers)


def test_incomplete_iterations(device: torch.device) -> None:
    layers = stack(device, 2)
    manager = managed(layers, device)
    run(layers, next(batches(device, 1)))
    with pytest.raises(OrderError, match="the iteration is incomplete"):
        manager.end_iteration()
    warm(manager, layers, device)
    run(layers, next(batches(device, 1)))
    with pytest.raises(ReplayOrderError, match="replay ended early at position 2"):
        manager.end_iteration()
    manager.discard_iteration()
    run(layers, next(batches(device, 1))).sum().backward()
    manager.end_iteration()
