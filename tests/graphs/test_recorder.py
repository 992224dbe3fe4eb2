# SPDX-License-Identifier: Apache-2.0
"""OrderRecorder on real modules: what ran is what was recorded, and the numbers do not change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lorakernels.graphs import Direction, Order, OrderError, OrderRecorder, Step
from torch import Tensor, nn

from tests.graphs.recorded import HOOKS, Block, blocks, chain, recording
from tests.graphs.schedules import (
    gpipe,
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)

F, B = Direction.FORWARD, Direction.BACKWARD


def run_stage(layers: nn.ModuleList, order: Order, cut: Callable[[int], bool]) -> None:
    """Run `order` eagerly; where `cut(layer)`, the layer's input is detached as between stages."""
    inputs: dict[tuple[int, int], Tensor] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    for step in order:
        at, before, after = ((step.layer + offset, step.microbatch) for offset in (0, -1, 1))
        if step.direction is F:
            x = outputs[before] if step.layer else torch.randn(2, 4)
            inputs[at] = x.detach().requires_grad_() if cut(step.layer) else x
            outputs[at] = layers[step.layer](inputs[at])
        elif at == (len(layers) - 1, step.microbatch):
            outputs[at].sum().backward()
        elif cut(step.layer + 1):
            outputs[at].backward(inputs[after].grad)


@st.composite
def runnable_orders(draw: st.DrawFn) -> Order:
    """Any interleaving: a forward waits for the layer before it, a backward for the next one's."""
    layers, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    done: list[Step] = []
    while len(done) < 2 * layers * microbatches:
        ready = []
        for layer in range(layers):
            m = sum(s.layer == layer and s.direction is F for s in done)
            if m < microbatches and (layer == 0 or Step(layer - 1, m, F) in done):
                ready.append(Step(layer, m, F))
            for m in range(microbatches):
                step = Step(layer, m, B)
                needed = Step(layer, m, F) if layer == layers - 1 else Step(layer + 1, m, B)
                if step not in done and needed in done:
                    ready.append(step)
        done.append(draw(st.sampled_from(ready)))
    return Order(done, layers, microbatches)


@settings(max_examples=60, deadline=None)
@given(runnable_orders())
def test_any_schedule_is_recorded_as_it_ran(order: Order) -> None:
    layers = blocks(len(order.layers))
    with recording(layers, order.num_microbatches) as recorder:
        for _ in range(2):
            run_stage(layers, order, cut=lambda layer: True)
            assert recorder.end_iteration() == order
    assert recorder.order == order and recorder.num_iterations == 2


@pytest.mark.parametrize(
    ("order", "edges"),
    [
        pytest.param(gpipe(3, 3), {0, 3}, id="gpipe"),
        pytest.param(one_forward_one_backward(2, 5, stages=3, stage=0), {0, 2}, id="1f1b-first"),
        pytest.param(one_forward_one_backward(2, 5, stages=3, stage=2), {0, 2}, id="1f1b-last"),
        pytest.param(
            interleaved_one_forward_one_backward(2, 4, stages=1, stage=0, chunks=2),
            {0, 2, 4},
            id="interleaved",
        ),
    ],
)
def test_pipeline_schedules_with_autograd_inside_a_chunk(order: Order, edges: set[int]) -> None:
    layers = blocks(len(order.layers))
    with recording(layers, order.num_microbatches) as recorder:
        run_stage(layers, order, cut=edges.__contains__)
        assert recorder.end_iteration() == order


def test_handbook_interleaving_keeps_gradients_4_6_8() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x + 2 * x + 1

    layers = nn.ModuleList([Square()])
    xs = [torch.tensor(value, requires_grad=True) for value in (1.0, 2.0, 3.0)]
    with recording(layers, 3) as recorder:
        ys = {}
        for op in ("f0", "f1", "b0", "f2", "b1", "b2"):
            m = int(op[1])
            if op[0] == "f":
                ys[m] = layers[0](xs[m])
            else:
                ys[m].backward()
        order = recorder.end_iteration()
    assert [x.grad.item() for x in xs] == [4.0, 6.0, 8.0]
    assert order == one_forward_one_backward(1, 3, stages=2, stage=0)


class Wide(nn.Module):
    """Several tensors in, also by keyword; a nested structure out, one tensor in it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, skip: Tensor, *, mask: Tensor, gain: float = 1.0) -> tuple:
        y = self.linear(x) * gain
        return y, {"skip": skip + y, "mask": mask, "same": y}, [None, 3]


def test_tuples_dicts_and_keywords_pass_unchanged() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([Wide(), Wide(), Wide()])
    x, mask = torch.randn(2, 4), torch.tensor([True, False])

    def run() -> list[Tensor]:
        layers.zero_grad()
        y, skip = x, x
        for layer in layers:
            y, rest, tail = layer(y, skip, mask=mask, gain=0.5)
            skip = rest["skip"]
            assert rest["same"] is y and rest["mask"] is mask and tail == [None, 3]
        (y + skip).sum().backward()
        return [y, *(p.grad.clone() for p in layers.parameters())]

    expected = run()
    with recording(layers) as recorder:
        assert all(map(torch.equal, run(), expected))
        assert recorder.end_iteration() == gpipe(3, 1)


def test_an_output_that_is_not_used_does_not_hide_the_backward() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.ones(4), torch.ones(4)])

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(x * weight for weight in self.weights)

    layers = nn.ModuleList([Two()])
    with recording(layers, 2) as recorder:
        for output in (0, 1):
            layers.zero_grad()
            layers[0](torch.ones(2, 4))[output].sum().backward()
            assert layers[0].weights[1 - output].grad is None
        assert recorder.end_iteration() == one_forward_one_backward(1, 2, stages=1, stage=0)


def test_layers_that_pass_their_input_through_keep_their_place() -> None:
    layers = nn.ModuleList([nn.Identity(), Block(), nn.Identity(), nn.Identity()])
    leaf = torch.randn(2, 4, requires_grad=True)
    with recording(layers) as recorder:
        y = chain(layers, leaf)
        y.sum().backward()
        assert recorder.end_iteration() == gpipe(4, 1)
    assert layers[0](leaf) is leaf


def test_a_branch_goes_back_in_the_engines_order() -> None:
    """Layers 1 and 2 both read layer 0's output; autograd runs the later one first."""
    layers = blocks(4)
    with recording(layers) as recorder:
        x = layers[0](torch.randn(2, 4))
        left, right = layers[1](x), layers[2](x)
        layers[3](left * right).sum().backward()
        backwards = [step.layer for step in recorder.end_iteration() if step.direction is B]
    assert backwards == [3, 2, 1, 0]


def test_inputs_without_grad_and_frozen_weights() -> None:
    """Only the last layer's bias is trained, yet the backward of the first is where it is."""
    layers = blocks(2).requires_grad_(False)
    layers[0].linear.bias.requires_grad_()
    with recording(layers) as recorder:
        chain(layers, torch.randn(2, 4)).sum().backward()
        assert recorder.end_iteration() == gpipe(2, 1)
    layers.requires_grad_(False)
    with recording(layers), pytest.raises(RuntimeError, match="layer '0' returned no tensor that"):
        chain(layers, torch.randn(2, 4))


def test_a_differing_order_is_refused_and_the_first_one_stays() -> None:
    layers = blocks(1)
    first = gpipe(1, 2)
    with recording(layers, 2) as recorder:
        run_stage(layers, first, cut=bool)
        recorder.end_iteration()
        run_stage(layers, one_forward_one_backward(1, 2, stages=1, stage=0), cut=bool)
        with pytest.raises(OrderError) as error:
            recorder.end_iteration()
        assert (error.value.position, error.value.expected) == (1, Step(0, 1, F))
        assert error.value.actual == Step(0, 0, B)
        assert "differs from the earlier iterations' at position 1" in str(error.value)
        run_stage(layers, first, cut=bool)
        assert recorder.end_iteration() == first and recorder.num_iterations == 2


def test_an_incomplete_iteration_is_refused_and_forgotten() -> None:
    layers = blocks(2)
    with OrderRecorder(["low", "high"]).attach(list(layers)) as recorder:
        with pytest.raises(RuntimeError, match="no iteration recorded yet"):
            _ = recorder.order
        y = chain(layers, torch.randn(2, 4))
        with pytest.raises(OrderError, match="expected backward of layer 'low', microbatch 0, fou"):
            recorder.end_iteration()
        with pytest.raises(RuntimeError, match="backward of layer 'high' belongs to an iteration"):
            y.sum().backward()
        chain(layers, torch.randn(2, 4))
        recorder.discard_iteration()
        chain(layers, torch.randn(2, 4)).sum().backward()
        assert recorder.end_iteration().layers == ("low", "high")
        for _ in range(2):
            chain(layers, torch.randn(2, 4)).sum().backward()
        with pytest.raises(OrderError, match="beyond num_microbatches=1 at position 4"):
            recorder.end_iteration()


def test_a_second_backward_through_one_forward_is_refused() -> None:
    layers = blocks(1)
    with recording(layers) as recorder:
        y = layers[0](torch.randn(2, 4)).sum()
        y.backward(retain_graph=True)
        y.backward()
        with pytest.raises(OrderError, match="a second backward at position 2"):
            recorder.end_iteration()


def test_a_forward_that_raises_is_not_recorded() -> None:
    layers = blocks(1)
    with recording(layers) as recorder:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layers[0](torch.randn(2, 5))
        layers[0](torch.randn(2, 4)).sum().backward()
        assert recorder.end_iteration() == gpipe(1, 1)


def test_in_place_on_an_output_is_loud_while_recording() -> None:
    layers = blocks(1)
    with recording(layers):
        y = layers[0](torch.randn(2, 4))
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            y.add_(1)
    layers[0](torch.randn(2, 4)).add_(1)


def test_detach_leaves_no_hook_and_late_backwards_run() -> None:
    layers = blocks(2)
    with pytest.raises(ZeroDivisionError), recording(layers) as recorder:
        y = chain(layers, torch.randn(2, 4))
        raise ZeroDivisionError
    assert not any(getattr(module, name) for module in layers.modules() for name in HOOKS)
    y.sum().backward()
    assert "Mark" not in str(layers[0](torch.randn(2, 4)).grad_fn)
    recorder.attach(list(layers))
    y = chain(layers, torch.randn(2, 4)).sum()
    y.backward(retain_graph=True)
    assert recorder.end_iteration() == gpipe(2, 1)
    recorder.detach()
    y.backward()
    assert not any(getattr(module, name) for module in layers.modules() for name in HOOKS)


def test_modules_that_cannot_be_attached_are_refused_before_any_hook() -> None:
    outer = nn.Sequential(Block(), Block())
    a, b = outer
    for modules, error, message in [
        ([a], ValueError, "modules has 1 entries, expected 2"),
        ([a, torch.tanh], TypeError, "layer 'y' must be an nn.Module, got builtin_function"),
        ([a, a], ValueError, "layers 'x' and 'y' are the same module"),
        ([b, outer], ValueError, "layer 'x' lies inside layer 'y'"),
    ]:
        with pytest.raises(error, match=message):
            OrderRecorder(["x", "y"]).attach(modules)
        assert not any(getattr(module, name) for module in outer.modules() for name in HOOKS)
    recorder = OrderRecorder(["x", "y"]).attach([a, b])
    with pytest.raises(RuntimeError, match=r"already attached: call detach\(\) first"):
        recorder.attach([a, b])
    recorder.detach()


def test_a_block_begins_anew_only_where_all_layers_have_run_as_often() -> None:
    """F0 F0 F1 B1: as many backwards and forwards as one whole block of two layers."""
    layers = blocks(2)
    with recording(layers) as recorder:
        layers[0](torch.randn(2, 4))
        y = layers[0](torch.randn(2, 4))
        layers[1](y.detach()).sum().backward()
        assert not recorder.begins_anew(0)
        recorder.discard_iteration()
        layers[1](layers[0](torch.randn(2, 4))).sum().backward()
        assert recorder.begins_anew(0) and not recorder.begins_anew(1)
