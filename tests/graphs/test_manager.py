# SPDX-License-Identifier: Apache-2.0
"""GraphManager beside an eager twin, bit for bit: on a GPU, and on a CPU with graphs that are imitated (fake.py)."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lorakernels.graphs import (
    CaptureError,
    GraphManager,
    OrderError,
    ReplayOrderError,
    gpipe,
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)
from lorakernels.graphs.order import Direction, Order, Step
from torch import nn

from tests.graphs.fake import FakeBackend
from tests.graphs.layers import (
    WIDTH,
    Block,
    Counting,
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
F, B = Direction.FORWARD, Direction.BACKWARD


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


def run_order(
    layers: nn.ModuleList, order: Order, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Drive single layers in any order, as a pipeline stage whose layers are cut from each other."""
    waiting: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    outputs: list[torch.Tensor] = []
    for step in order:
        key = (step.layer, step.microbatch)
        if step.direction is F:
            x = inputs[step.microbatch].detach().requires_grad_()
            y = layers[step.layer](x)
            waiting[key] = x, y
            outputs.append(y.detach().clone())
        else:
            x, y = waiting.pop(key)
            y.square().sum().backward()
            outputs.append(x.grad)
    return outputs


ORDERS = {
    "gpipe": gpipe(2, 3),
    "1F1B of TE :1151": one_forward_one_backward(2, 3, stages=2, stage=0),
    "interleaved 1F1B": interleaved_one_forward_one_backward(1, 4, stages=2, stage=0, chunks=2),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_pipelines_with_several_microbatches_in_flight(device: torch.device, order: Order) -> None:
    ours, theirs = twins(device, 2)
    manager = managed(ours, device, num_microbatches=order.num_microbatches)
    for step in range(4):
        inputs = list(batches(device, order.num_microbatches))
        found, expected = (run_order(m, order, inputs) for m in (ours, theirs))
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b), step
        same(ours, theirs, step)
        manager.end_iteration()
    assert len(manager.report().graphs) == len(order)


@st.composite
def orders(draw: st.DrawFn) -> Order:
    layers, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    todo = [
        [Step(n, m, F) for n in range(layers)] + [Step(n, m, B) for n in reversed(range(layers))]
        for m in range(microbatches)
    ]
    steps, done = [], [0] * layers
    while any(todo):
        ready = [
            m
            for m, rest in enumerate(todo)
            if rest and (rest[0].direction is B or done[rest[0].layer] == m)
        ]
        step = todo[draw(st.sampled_from(ready))].pop(0)
        done[step.layer] += step.direction is F
        steps.append(step)
    return Order(steps, layers, microbatches)


def run_chunk_order(
    layers: nn.ModuleList, order: Order, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Layers of a microbatch feed each other; its backward runs at its last layer's step, all layers at once."""
    last, hidden, found = len(order.layers) - 1, list(inputs), []
    for step in order:
        m = step.microbatch
        if step.direction is F:
            hidden[m] = layers[step.layer](hidden[m])
        elif step.layer == last:
            found.append(hidden[m].detach().clone())
            hidden[m].square().sum().backward()
    return found


@settings(max_examples=25, deadline=None)
@given(orders())
def test_random_interleavings_on_the_imitated_pool(order: Order) -> None:
    """The backward of a microbatch runs whole; forwards of others lie anywhere between."""
    torch.manual_seed(0)
    ours, theirs = twins(CPU, len(order.layers))
    manager = managed(ours, CPU, num_microbatches=order.num_microbatches)
    for step in range(4):
        inputs = list(batches(CPU, order.num_microbatches))
        found, expected = (run_chunk_order(m, order, inputs) for m in (ours, theirs))
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b), step
        same(ours, theirs, step)
        manager.end_iteration()


def test_interleaved_scalars_give_4_6_8(device: torch.device) -> None:
    """The handbook's case: f(x) = x² + 2x + 1 at 1, 2, 3 as f0 f1 b0 f2 b1 b2; torch's own callables give 6, 3, 8."""

    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x + 2 * x + 1

    layer = Square()
    manager = managed([layer], device, num_microbatches=3)
    manager.device = device
    for _ in range(3):
        xs = [torch.full((1,), i + 1.0, device=device, requires_grad=True) for i in range(3)]
        ys = [layer(xs[0]), layer(xs[1])]
        ys[0].backward()
        ys.append(layer(xs[2]))
        ys[1].backward()
        ys[2].backward()
        assert [x.grad.item() for x in xs] == [4.0, 6.0, 8.0]
        assert [y.item() for y in ys] == [4.0, 9.0, 16.0]
        manager.end_iteration()


def test_parallel_results_of_the_handbook_are_4_10_18(device: torch.device) -> None:
    """Three graphs of one pool, all outputs read at the end: not 13, 12, 19."""

    class Times(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * y * self.weight

    layer = Times().to(device)
    manager = managed([layer], device, num_microbatches=3)
    for _ in range(3):
        pairs = [(1.0, 4.0), (2.0, 5.0), (3.0, 6.0)]
        outs = [layer(*(torch.full((1,), v, device=device) for v in pair)) for pair in pairs]
        assert [y.item() for y in outs] == [4.0, 10.0, 18.0]
        sum(outs).backward()
        assert layer.weight.grad.item() == 32.0
        layer.weight.grad = None
        manager.end_iteration()


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
    kinds = [b.kind for b in manager._sets.captured[0].plan.buffers]
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
    with pytest.raises(RuntimeError, match=r"layer '0': 0 output 0: expected nobody to hold it"):
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
    for choice in ("eager", "capture"):
        state = State(device)
        layers = [Drop(state), Block().to(device)]
        manager = managed(layers, device, eval=choice, rng_states=[state])
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
        assert manager._evals is None or len(manager._evals) == 4
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


def test_a_failed_capture_leaves_nothing_and_a_second_one_succeeds() -> None:
    """F29, at every single capture: forward and backward of three layers."""
    for fail_at in range(6):
        ours, theirs = twins(CPU, 3, Counting)
        made = [FakeBackend(fail_at), FakeBackend()]
        given = iter(made)
        manager = managed(ours, CPU, backend=lambda given=given: next(given))
        x = next(batches(CPU, 1))
        run(ours, x).sum().backward(), run(theirs, x).sum().backward()
        before = [t.clone() for t in ours.buffers()]
        with pytest.raises(CaptureError, match="cudaErrorStreamCaptureInvalidated") as error:
            manager.end_iteration()
        layer, phase = (fail_at, "forward") if fail_at < 3 else (5 - fail_at, "backward")
        assert (error.value.layer, error.value.phase) == (str(layer), phase)
        assert error.value.cuda == "cudaErrorStreamCaptureInvalidated"
        assert "run eagerly until capture() succeeds" in manager.explain(error.value)
        del error
        gc.collect()
        assert made[0].released and made[0].arena.live == 0
        assert all(map(torch.equal, before, ours.buffers()))
        assert not any("forward" in vars(layer) for layer in ours)
        for step in range(4):
            run(ours, x).sum().backward(), run(theirs, x).sum().backward()
            same(ours, theirs, step)
            manager.end_iteration()
            if step == 1:
                manager.capture()
        assert manager.phase == "replaying"


def test_recapture_takes_new_parameters(device: torch.device) -> None:
    """F30: load_state_dict(assign=True) moves every parameter."""
    ours, theirs = twins(device)
    manager = managed(ours, device)
    warm(manager, ours, device)
    state = {k: torch.randn_like(v) for k, v in ours.state_dict().items()}
    ours.load_state_dict(copy.deepcopy(state), assign=True)
    theirs.load_state_dict(state)
    x = next(batches(device, 1))
    with pytest.raises(RuntimeError, match=r"parameters of up.*manager.recapture\(\)"):
        run(ours, x)
    manager.discard_iteration()
    manager.recapture()
    for step in range(3):
        run(ours, x).sum().backward(), run(theirs, x).sum().backward()
        same(ours, theirs, step)
        manager.end_iteration()


def test_bad_arguments_name_the_value() -> None:
    layers = stack(CPU, 2)
    for options, message in [
        ({"scope": "model"}, 'scope must be "layer" or "iteration", got \'model\''),
        ({"grads": "sum"}, r"grads must be one of \('auto', 'add', 'autograd'\), got 'sum'"),
        ({"on_new_shape": "pad"}, "on_new_shape must be one of"),
        ({"warmup_steps": 0}, "warmup_steps must be an int >= 1, got 0"),
        ({"num_microbatches": 1.5}, "num_microbatches must be an int >= 1, got 1.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            GraphManager(layers, **options)
    with pytest.raises(TypeError, match="layers must be a sequence of modules, got one Block"):
        GraphManager(layers[0])
    manager = GraphManager(layers, warmup_steps=1)
    run(layers, next(batches(CPU, 1))).sum().backward()
    with pytest.raises(ValueError, match="the layers must be on a CUDA device, found cpu"):
        manager.end_iteration()


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


def test_a_recapture_updates_the_executable_graphs(device: torch.device) -> None:
    """cudaGraphExecUpdate where the nodes are the same, a new instantiation where they are not; the report says so."""

    class Gated(Block):
        gate = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y * 2 if self.gate else y

    ours, theirs = twins(device, 2, Gated)
    manager = managed(ours, device)
    warm(manager, ours, device)
    executable = [c.forward_graph for c in manager.graphs.calls]
    assert {g.made for g in manager.report().graphs} == {"instantiated"}
    state = {k: torch.randn_like(v) for k, v in ours.state_dict().items()}
    for changed in (False, True):
        for layers in (ours, theirs):
            layers.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
            layers[1].gate = changed
        manager.recapture()
        report = manager.report()
        made = {(g.layer, g.direction): g.made for g in report.graphs}
        assert made["0", "forward"] == made["0", "backward"] == "updated"
        if changed:
            assert made["1", "forward"].startswith("instantiated: "), made
            assert f"recaptured: {list(made.values()).count('updated')} of 4" in str(report)
        else:
            assert set(made.values()) == {"updated"} and "4 of 4 graphs by an update" in str(report)
            assert [c.forward_graph for c in manager.graphs.calls] == executable
        for step in range(3):
            x = next(batches(device, 1))
            for layers in (ours, theirs):
                run(layers, x).square().sum().backward()
            same(ours, theirs, (changed, step))
            manager.end_iteration()


def test_a_failed_recapture_frees_the_graphs_it_had_kept() -> None:
    for fail_at in range(4):
        ours, theirs = twins(CPU, 2)
        made = [FakeBackend(), FakeBackend(fail_at), FakeBackend()]
        given = iter(made)
        manager = managed(ours, CPU, backend=lambda given=given: next(given))
        warm(manager, ours, CPU)
        with pytest.raises(CaptureError, match="cudaErrorStreamCaptureInvalidated"):
            manager.recapture()
        gc.collect()
        for backend in made[:2]:
            assert backend.released and backend.arena.live == 0
            assert not [g for g in backend.graphs if g() is not None and g().alive]
        assert manager.phase == "failed" and not any("forward" in vars(x) for x in ours)
        manager.recapture()
        for step in range(2):
            x = next(batches(CPU, 1))
            for layers in (ours, theirs):
                run(layers, x).square().sum().backward()
            same(ours, theirs, step)
            manager.end_iteration()


@pytest.mark.parametrize("where", ["the fingerprints", "the pins", "the report"])
def test_a_failure_after_the_last_capture_leaves_nothing(monkeypatch, where: str) -> None:
    """F29, beyond the captures themselves."""
    from lorakernels.graphs import sets

    class Pinned(State):
        in_charge = "user"

        def __init__(self) -> None:
            super().__init__(CPU)
            self.pins: list[str] = []

        @property
        def pinned_by(self) -> str | None:
            return ", ".join(self.pins) or None

        def pin(self, by: str) -> None:
            self.pins.append(by)
            if where == "the pins" and len(self.pins) == 1 and failing:
                raise RuntimeError("late")

        def unpin(self, by: str) -> None:
            self.pins.remove(by)

        def save(self) -> torch.Tensor:
            return self.tensor.clone()

        def restore(self, saved: torch.Tensor) -> None:
            self.tensor.copy_(saved)

    failing, state, made = [1], Pinned(), [FakeBackend(), FakeBackend()]
    ours, theirs = twins(CPU, 2)
    given = iter(made)
    manager = managed(ours, CPU, fp8_state=state, backend=lambda: next(given))
    run(ours, next(batches(CPU, 1))).square().sum().backward()
    grads = [p.grad for p in ours.parameters()]

    def late(*_: object) -> None:
        raise RuntimeError("late")

    with monkeypatch.context() as patch:
        if where == "the fingerprints":
            real, count = sets.LayerWatch, []
            patch.setattr(
                sets, "LayerWatch", lambda *a: late() if count.append(1) or count[1:] else real(*a)
            )
        elif where == "the report":
            patch.setattr(sets, "_report", late)
        with pytest.raises(CaptureError, match="install: RuntimeError: late"):
            manager.end_iteration()
    failing.clear()
    gc.collect()
    assert made[0].released and made[0].arena.live == 0 and state.pinned_by is None
    assert not any("forward" in vars(layer) for layer in ours) and manager.graphs is None
    assert all(p.grad is g for p, g in zip(ours.parameters(), grads, strict=True))
    manager.capture()
    assert state.pinned_by == "lorakernels.graphs"
    for p in ours.parameters():
        p.grad = None
    for step in range(3):
        x = next(batches(CPU, 1))
        for layers in (ours, theirs):
            run(layers, x).square().sum().backward()
        same(ours, theirs, step)
        manager.end_iteration()
