# SPDX-License-Identifier: Apache-2.0
"""Gradients of parameters: added inside the graphs or given to autograd, and nobody's overwritten."""

from __future__ import annotations

import copy

import pytest
import torch
from lorakernels.graphs import (
    CaptureError,
)
from lorakernels.graphs.plan.order import Direction
from torch import nn

from tests.graphs.layers import (
    WIDTH,
    Block,
    batches,
    managed,
    run,
    same,
    twins,
    warm,
)

CPU = torch.device("cpu")
F, B = Direction.FORWARD, Direction.BACKWARD


def test_accumulation_without_a_gradient_closed_form(device: torch.device) -> None:
    """TE :801: after zero_grad(set_to_none=True), two replays give g1ᵀx1 + g2ᵀx2, not twice the last."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False, device=device)
    manager = managed([layer], device, num_microbatches=2)
    warm(manager, [layer], device)
    for _ in range(3):
        layer.zero_grad(set_to_none=True)
        xs, gs = list(batches(device, 2)), list(batches(device, 2))
        for x, g in zip(xs, gs, strict=True):
            layer(x).backward(g)
        expected = gs[0].T @ xs[0] + gs[1].T @ xs[1]
        torch.testing.assert_close(layer.weight.grad, expected, rtol=0, atol=0)
        manager.end_iteration()


@pytest.mark.parametrize("main", ["none", "of another dtype", "transposed"])
def test_large_gradients_are_added_in_pieces(device: torch.device, main: str) -> None:
    """Small integers, so that sums are exact; the last piece of 300 × 200 is short."""
    layer = nn.Linear(200, 300, device=device)
    if main == "of another dtype":
        layer.weight.main_grad = torch.zeros(300, 200, dtype=torch.float64, device=device)
    elif main == "transposed":
        layer.weight.main_grad = torch.zeros(200, 300, device=device).t()

    def integers(*size: int) -> torch.Tensor:
        return torch.randint(-4, 5, size, device=device).float()

    manager = managed([layer], device)
    run([layer], integers(8, 200)).sum().backward()
    manager.end_iteration()
    for _ in range(2):
        layer.zero_grad(set_to_none=True)
        x, g = integers(8, 200), integers(8, 300)
        if main != "none":
            layer.weight.main_grad.zero_()
        layer(x).backward(g)
        found = layer.weight.grad if main == "none" else layer.weight.main_grad
        assert torch.equal(found, (g.T @ x).to(found.dtype))
        assert torch.equal(layer.bias.grad, g.sum(0))
        manager.end_iteration()


@pytest.mark.parametrize(
    "how", ["kept", "a view of it kept", "an alias of it kept", "replaced", "given at capture"]
)
def test_a_gradient_that_somebody_holds_is_not_overwritten(device: torch.device, how: str) -> None:
    """TE :754: the first gradient keeps its address and its values; the second lies elsewhere."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False, device=device)
    manager = managed([layer], device)
    others = []
    if how == "given at capture":
        run([layer], next(batches(device, 1))).sum().backward()
        others.append(layer.weight.grad)  # a flat buffer, say, that all gradients live in
        manager.end_iteration()
        layer.zero_grad(set_to_none=False)
    else:
        warm(manager, [layer], device)

    def step() -> torch.Tensor:
        x, g = batches(device, 2)
        before = 0 if layer.weight.grad is None else layer.weight.grad.clone()
        layer(x).backward(g)
        manager.end_iteration()
        torch.testing.assert_close(layer.weight.grad, before + g.T @ x, rtol=0, atol=0)
        return layer.weight.grad

    first = step()
    if how == "given at capture":
        assert first is others[0]
    address, snapshot = first.data_ptr(), first.clone()
    if how == "a view of it kept":
        first = first[0]
        snapshot = snapshot[0]
    if how == "an alias of it kept":
        first = first.detach()
    if how == "replaced":
        layer.weight.grad = first.clone()
    else:
        layer.weight.grad = None
    second = step()
    assert torch.equal(first, snapshot) and first.data_ptr() == address
    assert second.data_ptr() != address
    step()
    assert torch.equal(first, snapshot)
    del first, second, others
    layer.weight.grad = None
    for _ in range(2):
        step()


def test_main_grad_is_added_to_and_grad_stays_none(device: torch.device) -> None:
    """TE test_grouped_mlp :999, Megatron :1788: main_grad starts at 0.5."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False, device=device)
    layer.weight.main_grad = torch.full_like(layer.weight, 0.5)
    manager = managed([layer], device)
    warm(manager, [layer], device)
    assert torch.equal(layer.weight.main_grad, torch.full_like(layer.weight, 0.5)), (
        "capture left it"
    )
    x, g = batches(device, 2)
    layer(x).backward(g)
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.main_grad, 0.5 + g.T @ x, rtol=0, atol=0)


def test_frozen_and_unused_parameters(device: torch.device) -> None:
    class Odd(Block):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))

    ours, theirs = twins(device, 2, Odd)
    for layers in (ours, theirs):
        layers[0].up.requires_grad_(False)
    manager = managed(ours, device)
    for step in range(3):
        x = next(batches(device, 1))
        for layers in (ours, theirs):
            run(layers, x).sum().backward()
        same(ours, theirs, step)
        assert ours[0].unused.grad is None and ours[0].up.weight.grad is None
        manager.end_iteration()


def test_a_parameter_that_two_layers_share(device: torch.device) -> None:
    ours, theirs = twins(device, 2)
    for layers in (ours, theirs):
        layers[1].up.weight = layers[0].up.weight
    manager = managed(ours, device)
    for step in range(4):
        x = next(batches(device, 1))
        for layers in (ours, theirs):
            run(layers, x).sum().backward()
        # the same two contributions, perhaps added in another order of rounding: there are two, so none
        same(ours, theirs, step)
        ours.zero_grad(), theirs.zero_grad()
        manager.end_iteration()


def test_under_ddp_gradients_go_through_its_hooks(tmp_path) -> None:
    """DDP reduces in hooks on parameters; without them it would wait for gradients for ever, or not reduce."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ours, theirs = (nn.Sequential(*layers) for layers in twins(CPU))
        model = nn.parallel.DistributedDataParallel(ours)
        reduced: list[int] = []

        def hook(state, bucket):  # DDP reads annotations, as objects
            reduced.append(len(bucket.parameters()))
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(bucket.buffer() * 2)
            return future

        model.register_comm_hook(None, hook)
        manager = managed(list(ours), CPU)
        for step in range(4):
            x = next(batches(CPU, 1))
            model(x).square().sum().backward()
            theirs(x).square().sum().backward()
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(p.grad, 2 * q.grad), step
            ours.zero_grad(), theirs.zero_grad()
            manager.end_iteration()
        assert (
            sum(reduced) == 4 * len(list(ours.parameters())) and manager._blocks.grad_memory is None
        )
        manager.close()
        manager = managed(list(ours), CPU, grads="add")
        model(x).sum().backward()
        with pytest.raises(
            CaptureError, match=r"inside DistributedDataParallel.*Use grads='autograd'"
        ):
            manager.end_iteration()
    finally:
        torch.distributed.destroy_process_group()


def test_all_gradients_are_installed_at_once_where_nobody_holds_one(device: torch.device) -> None:
    """After zero_grad one launch zeroes the memory of all; with one gradient or one `.grad` kept, each goes its way."""
    ours, theirs = twins(device, 3)
    manager = managed(ours, device)
    warm(manager, ours, device)
    kept: list[torch.Tensor] = []
    for step, keep in enumerate(["", "", "grad", "held", "view", "", ""]):
        x = next(batches(device, 1))
        for layers in (ours, theirs):
            run(layers, x).square().sum().backward()
        same(ours, theirs, step)
        manager.end_iteration()
        weight = ours[1].up.weight
        if keep in ("held", "view"):
            kept = [weight.grad if keep == "held" else weight.grad[0], weight.grad.clone()]
            kept[1] = kept[1] if keep == "held" else kept[1][0]
        elif kept:
            assert torch.equal(*kept), step
            kept.clear()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            if not (keep == "grad" and p is weight):
                p.grad = q.grad = None
        if keep == "grad":
            assert ours[0].up.weight.grad is None and weight.grad is not None


class _Optional(nn.Module):
    """Reaches `extra` only when asked to; `outside` is trained outside of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.extra = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.outside = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, more: bool = False) -> torch.Tensor:
        y = self.up(x)
        return x + torch.tanh(y + self.extra(x) if more else y)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "replayed"])
def test_only_what_a_backward_reaches_gets_a_gradient(device: torch.device, graphs: bool) -> None:
    """Two captured blocks, of which one reaches `extra`: the other leaves its .grad None. A gradient that collects over
    iterations outside of the layers is not zeroed by theirs."""
    layers = [_Optional().to(device) for _ in range(2)]
    manager = managed(layers, device, on_new_shape="capture") if graphs else None
    seen = []
    for iteration in range(10):
        more = iteration >= 4 and iteration % 2 == 1
        x = torch.randn(3, WIDTH, device=device)
        for layer in layers:
            x = layer(x, more)
        x.square().sum().backward()
        sum(layer.outside.square().sum() for layer in layers).backward()
        seen.append((layers[0].extra.weight.grad is None, float(layers[0].outside.grad[0])))
        for layer in layers:
            layer.up.weight.grad = layer.extra.weight.grad = None
        if manager is not None:
            manager.end_iteration()
    if manager is not None:
        assert len(manager.report().shapes) == 2
    assert seen == [(not (i >= 4 and i % 2 == 1), 2.0 * (i + 1)) for i in range(10)]


@pytest.mark.parametrize("held", [False, True], ids=["nobody's", "held"])
def test_recapture_with_gradients_keeps_their_memory_the_managers(
    device: torch.device, held: bool
) -> None:
    """Unless somebody has one: then that one stays where it is, and is added to."""
    ours, theirs = twins(device, 2)
    manager = managed(ours, device)
    warm(manager, ours, device)
    kept = None
    for step in range(4):
        x = next(batches(device, 1))
        for layers in (ours, theirs):
            run(layers, x).square().sum().backward()
        same(ours, theirs, step)
        manager.end_iteration()
        kept = ours[0].up.weight.grad if held else None
        manager.recapture()
        kinds = [t.kind for t in manager._blocks.grad_memory.of(list(ours.parameters()))]
        assert kinds == ["given" if held and i == 0 else "own" for i in range(8)], step
        assert kept is None or ours[0].up.weight.grad is kept


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def test_sets_that_reach_more_and_fewer_parameters_take_turns(device: torch.device) -> None:
    """Memory that one set has zeroed and another has not added to since lies beside memory with an old gradient."""
    ours = nn.ModuleList([_Optional() for _ in range(2)]).to(device)
    theirs = copy.deepcopy(ours)
    manager = managed(ours, device, on_new_shape="capture")
    for index, more in enumerate([0, 1, 0, 1, 1, 0, 0, 1, 0, 1]):
        x = next(batches(device, 1))
        for layers in (ours, theirs):
            y = x
            for layer in layers:
                y = layer(y, bool(more))
            y.square().sum().backward()
        same(ours, theirs, index)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = q.grad = None
        manager.end_iteration()
    assert [s.graphs.blocks for s in manager._blocks.captured] == [4, 4]
