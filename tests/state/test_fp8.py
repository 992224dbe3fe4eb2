# SPDX-License-Identifier: Apache-2.0
"""FP8State: delayed scaling against a plain-Python model of it, who is in charge, and that it stays one state."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakernels import (
    DelayedScaling,
    FP8State,
    LoRAConfig,
    LoRALinear,
    apply_lora,
)
from lorakernels.modules.linear.dora import DoRALinear
from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.numerics.fp8 import FP8_MAX, quantize_fp8
from tests.fp8_states import small, tensors, two_layers

FLT_MAX = torch.finfo(torch.float32).max


class Model:
    """Delayed scaling of one tensor in plain Python, as the docstring of `amax_and_scale_update` states it."""

    def __init__(self, recipe, fp8_max):
        self.recipe, self.fp8_max = recipe, fp8_max
        self.history, self.scale = [0.0] * recipe.amax_history_len, 0.0

    def update(self, current):
        if current == 0:
            return
        older = [a for a in self.history[1:] if math.isfinite(a)]
        self.history = [0.0, *self.history[2:], current][: len(self.history)]
        if not math.isfinite(current):
            return
        newest = self.recipe.amax_compute_algo == "most_recent"
        amax = current if newest else max([current, *older])
        self.scale = min(self.fp8_max * 2.0**-self.recipe.margin / amax, FLT_MAX)


AMAXES = st.sampled_from([0.0, 1e-45, 1e-38, 1e-3, 1.0, 3.7, 448.0, 6e4, 3e38, math.inf, math.nan])


@settings(max_examples=60, deadline=None)
@given(
    length=st.sampled_from([1, 2, 4, 31]),
    algo=st.sampled_from(["max", "most_recent"]),
    margin=st.sampled_from([0, 2]),
    sequence=st.lists(st.tuples(AMAXES, AMAXES), max_size=12),
)
def test_updates_match_the_model(length, algo, margin, sequence):
    recipe = DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algo)
    state = FP8State(["a", "b"], recipe)
    models = [Model(recipe, 57344.0) for _ in range(2)]
    for amaxes in sequence:
        state.backward[0] = torch.tensor(amaxes)
        state.reduce_and_update()
        for column, (model, amax) in enumerate(zip(models, amaxes, strict=True)):
            model.update(torch.tensor(amax).item())
            found = state.backward[:, column]
            expected = torch.tensor([*model.history, model.scale])
            torch.testing.assert_close(
                found, expected, rtol=2**-23, atol=0.0, equal_nan=True
            )  # float64 here


def test_one_inf_does_not_freeze_the_scale_for_a_whole_history():
    state = FP8State(["a"], DelayedScaling(amax_history_len=64))
    scales = []
    for amax in (1.0, math.inf, 2.0):
        state.forward[0] = amax
        state.reduce_and_update()
        scales.append(state.forward[-1].item())
    assert scales == [448.0, 448.0, 224.0]


def test_a_second_update_changes_nothing(device):
    state = small(device=device)
    before = tensors(state)
    assert (before[:, -1] > 0).all()
    state.reduce_and_update()
    assert torch.equal(tensors(state), before)
    state.forward[0, 1] = 9.0  # one new amax: its column alone moves
    state.reduce_and_update()
    moved = (tensors(state) != before).any(1)
    assert moved.tolist() == [[False, True], [False, False]]


def test_nobody_in_charge_updates_once_per_training_forward():
    model, report = two_layers()
    state = report.fp8_state
    for step in range(4):
        seen = state.forward[1:-1].count_nonzero(0).tolist()
        assert seen == [max(step - 1, 0)] * 2, "one roll per iteration"
        model(torch.randn(5, 16)).sum().backward()
    assert report.scales_in_charge == "auto" and (state.backward[-1] > 0).all()


def test_microbatches_in_flight_share_one_update():
    model, report = two_layers()
    state = report.fp8_state
    model(torch.randn(5, 16)).sum().backward()
    losses = [model(torch.randn(5, 16)).sum() for _ in range(3)]
    scale = state.forward[-1].clone()
    assert state.forward[1:-1].count_nonzero().item() == 2
    for loss in losses:
        loss.backward()
    assert torch.equal(state.forward[-1], scale)
    model(torch.randn(5, 16))
    assert state.forward[1:-1].count_nonzero().item() == 4


def test_another_layer_takes_the_lead_when_the_first_stops_running():
    model, report = two_layers()
    model(torch.randn(5, 16)).sum().backward()
    model[0].eval()
    state = report.fp8_state
    for _ in range(4):
        model(torch.randn(5, 16)).sum().backward()
    assert state.forward[-1, 1] > 0 and state.backward[-1, 1] > 0
    scale = state.forward[-1, 1].item()
    for _ in range(2):
        model[2](100 * torch.randn(5, 16)).sum().backward()
    model[2](torch.randn(5, 16))
    assert state.forward[-1, 1].item() < scale / 10


def test_an_explicit_update_takes_over():
    model, report = two_layers()
    report.fp8_state.reduce_and_update()
    assert report.scales_in_charge == "explicit"
    assert "updated by calls of reduce_and_update alone" in str(report)
    for _ in range(3):
        model(torch.randn(5, 16)).sum().backward()
    assert report.fp8_state.forward[1:].count_nonzero() == 0, "nothing moved by itself"
    report.fp8_state.reduce_and_update()
    assert (report.fp8_state.forward[-1] > 0).all()


def test_eval_neither_updates_nor_loses_state(device):
    model, report = two_layers()
    model.to(device)
    for _ in range(3):
        model(torch.randn(5, 16, device=device)).sum().backward()
    before = tensors(report.fp8_state)
    model.eval()
    model(100 * torch.randn(5, 16, device=device)).sum().backward()
    assert torch.equal(tensors(report.fp8_state), before)


def test_a_layer_left_in_eval_has_no_stale_scale(device):
    """NeMo#8780. Bounds: half an ulp of e4m3 is 2⁻⁴ of the value, or 2⁻¹⁰ of 1/scale below the smallest normal; of
    e5m2 2⁻³ and 2⁻¹⁷. The rest computes in fp32."""
    model, report = two_layers()
    model.to(device)
    for _ in range(5):
        model(torch.randn(5, 16, device=device)).sum().backward()
    frozen = model[0].eval()
    model(torch.randn(5, 16, device=device)).sum().backward()  # takes up its last amax
    column = tensors(report.fp8_state)[:, :, 0]
    for step in range(1, 6):
        growth = 1000 ** (step / 5)
        x = growth * torch.randn(5, 16, device=device)
        x.requires_grad_()
        y = frozen(x)
        y.retain_grad()
        (model[2](y.relu()).sum() * growth).backward()
        exact = {}
        weight = frozen.dequantized_weight().double() + frozen.delta_weight().double()
        exact["y"] = x.double() @ weight.t() + frozen.bias.double()
        exact["dx"] = y.grad.double() @ weight
        for found, name, value, base, normal, tiny, top in (
            (y, "y", x, frozen.dequantized_weight().t(), 2**-4, 2**-10, 448.0),
            (x.grad, "dx", y.grad, frozen.dequantized_weight(), 2**-3, 2**-17, 57344.0),
        ):
            step_of = normal * value.abs() + tiny * value.abs().max() / top
            bound = (step_of @ base.abs()).double() + 1e-5 * exact[name].abs().max()
            assert ((found - exact[name]).abs() <= bound).all(), (name, step)
    assert torch.equal(tensors(report.fp8_state)[:, :, 0], column)


def test_nothing_changes_the_frozen_weight():
    model, _ = two_layers()
    layer = model[0]
    bytes_, scale_inv = layer.weight.view(torch.uint8).clone(), layer.weight_scale_inv.clone()

    def same():
        held = layer.weight_scale_inv
        assert torch.equal(layer.weight.view(torch.uint8), bytes_)
        assert held.dtype == torch.float32 and torch.equal(held, scale_inv)

    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for step in range(20):
        model(10.0**step * 1e-10 * torch.randn(5, 16)).sum().backward()
        optimizer.step()
        same()
    model.to(torch.bfloat16)
    same()
    model.eval()(torch.randn(5, 16))
    same()
    for _ in range(2):
        with torch.no_grad():
            for p in (layer.lora_A, layer.lora_B):
                p.copy_(torch.randn(p.shape))
        layer.merge()
        assert not torch.equal(layer.weight.view(torch.uint8), bytes_)
        layer.unmerge()
        same()


def test_small_first_gradients_reach_the_first_layer():
    """dy of 1e-6 underflows e5m2 at scale 1; the first iteration scales by the tensor's own amax instead."""
    model, _ = two_layers()
    x = torch.randn(5, 16, requires_grad=True)
    (model(x).sum() * 1e-6).backward()
    assert x.grad.abs().max() > 1e-9 and (x.grad != 0).float().mean() > 0.9


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_survives_as_one_state(how):
    model, report = two_layers()
    for _ in range(3):
        model(torch.randn(5, 16)).sum().backward()
    if how == "state_dict":
        twin, other = two_layers()
        addresses = other.fp8_state.forward.data_ptr(), other.fp8_state.backward.data_ptr()
        twin.load_state_dict(model.state_dict())
        state = twin[0].fp8_state
        assert addresses == (state.forward.data_ptr(), state.backward.data_ptr())
    else:
        twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    state = twin[0].fp8_state
    assert state is twin[2].fp8_state and state is not report.fp8_state
    assert torch.equal(state.forward, report.fp8_state.forward)
    assert torch.equal(state.backward, report.fp8_state.backward)
    x = torch.randn(5, 16)
    assert torch.equal(model.eval()(x), twin.eval()(x))


def test_a_meta_model_takes_a_whole_state_dict():
    model, _ = two_layers()
    for _ in range(3):
        model(torch.randn(5, 16)).sum().backward()
    with torch.device("meta"):
        twin, report = two_layers()
    twin.load_state_dict(model.state_dict(), assign=True)
    state = report.fp8_state
    assert torch.equal(state.forward, model[0].fp8_state.forward) and not state.backward.is_meta
    x = torch.randn(5, 16)
    assert torch.equal(model.eval()(x), twin.eval()(x))


def test_another_linear_hands_over_its_scales():
    layers = [FrozenFP8Linear.from_linear(torch.nn.Linear(16, 16)) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    for _ in range(2):
        model(torch.randn(5, 16, requires_grad=True)).sum().backward()
        for layer in layers:
            layer.fp8_state.reduce_and_update()
    scales = [layer.fp8_state.forward[-1].item() for layer in layers]
    again = copy.deepcopy(model)
    report = apply_lora(model, LoRAConfig(r=2, target_modules=["0", "1"]))
    assert report.fp8_state.forward[-1].tolist() == scales and 0.0 not in scales
    assert report.scales_in_charge == "explicit" and "FP8 bytes and scales kept" in str(report)
    other = LoRAConfig(r=2, target_modules=["0", "1"], fp8=DelayedScaling(amax_history_len=7))
    report = apply_lora(again, other)
    assert not report.fp8_state.forward.any() and "scales dropped: they follow" in str(report)


def test_moves_with_the_model(device):
    model, report = two_layers()
    model.to(device)
    assert report.fp8_state.device.type == device.type
    model(torch.randn(5, 16, device=device)).sum().backward()
    assert (report.fp8_state.forward[0] > 0).all()


def test_a_standalone_layer_has_its_own_state():
    a, b = (LoRALinear(16, 8, config=LoRAConfig(r=2)) for _ in range(2))
    assert a.fp8_state is not b.fp8_state
    for _ in range(2):
        a(torch.randn(3, 16)).sum().backward()
    assert a.fp8_state.forward[-1] > 0 and b.fp8_state.forward[-1] == 0


@pytest.mark.parametrize("training", [True, False], ids=["training", "after eval"])
@pytest.mark.parametrize("use_dora", [None, False, True], ids=["frozen", "LoRA", "DoRA"])
def test_a_layer_that_has_run_writes_where_it_was_moved_to(use_dora, training):
    """Moved again and again, also by hand to another column."""
    linear = torch.nn.Linear(16, 8)
    if use_dora is None:
        layer = FrozenFP8Linear.from_linear(linear)
    else:
        kind = DoRALinear if use_dora else LoRALinear
        layer = kind.from_linear(linear, LoRAConfig(r=2, use_dora=use_dora))
    state = FP8State(["a", "b", "c"], layer.fp8_state.recipe)
    moves = (lambda: layer.move_state(state, "b"), lambda: setattr(layer, "column", 2))
    for column, move in zip((1, 2), moves, strict=True):
        layer.train(training)(torch.randn(3, 16)).sum()
        move()
        state.reset()
        layer.train()(torch.randn(3, 16, requires_grad=True)).sum().backward()
        for tensor in (state.forward, state.backward):
            assert (tensor[0] > 0).tolist() == [i == column for i in range(3)]


def test_quantize_saturates_and_keeps_nan():
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e9, 0.0, -0.0])
    for dtype, top in FP8_MAX.items():
        q = quantize_fp8(x, torch.ones(1), dtype).float()
        assert (
            q[[0, 1, 3]].tolist() == [top, -top, top] and q[2].isnan() and q[4:].tolist() == [0, 0]
        )
