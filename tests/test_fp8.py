# SPDX-License-Identifier: Apache-2.0
"""FP8State: delayed scaling against a plain-Python model of it, who is in charge, and that it stays one state."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

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
    fp8,
    reference,
)
from lorakernels.modules.frozen import FrozenFP8Linear

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


def small(names=("a", "b"), seed=0, **options):
    """A state of history length 4 after three iterations."""
    state = FP8State(names, DelayedScaling(amax_history_len=4), **options)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        rows = torch.rand(2, len(names), generator=generator)
        state.forward[0], state.backward[0] = rows.to(state.device)
        state.reduce_and_update()
    return state


def tensors(state):
    return torch.stack((state.forward, state.backward)).clone()


def addresses(state):
    return state.forward.data_ptr(), state.backward.data_ptr()


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


def two_layers(**options):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    report = apply_lora(model, LoRAConfig(r=4, target_modules=["0", "2"], **options))
    for layer in (model[0], model[2]):
        torch.nn.init.normal_(layer.lora_B, std=0.1)
    return model, report


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
    assert report.scales_in_charge == "explicit" and "explicit" in str(report)
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


@pytest.mark.parametrize("layout", ["single", "both"])
def test_nothing_changes_the_frozen_weight(layout):
    model, _ = two_layers(weight_layout=layout)
    layer = model[0]
    bytes_, scale_inv = layer.weight.view(torch.uint8).clone(), layer.weight_scale_inv.clone()

    def same():
        held = layer.weight_scale_inv
        assert torch.equal(layer.weight.view(torch.uint8), bytes_)
        assert held.dtype == torch.float32 and torch.equal(held, scale_inv)
        assert layer.weight_t is None or torch.equal(layer.weight_t, bytes_.t())

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


@pytest.mark.parametrize("how", ["state_dict", "save"])
def test_restores_in_place(how):
    state = small()
    taken, before, address = getattr(state, how)(), tensors(state), addresses(state)
    state.in_charge = "someone"
    state.pin("a test")
    state.forward.fill_(3.0)
    state.backward.fill_(math.nan)
    (state.restore if how == "save" else state.load_state_dict)(taken)
    assert torch.equal(tensors(state), before) and addresses(state) == address
    assert state.in_charge == "explicit" and state.pinned_by == "a test"
    state.forward.zero_()
    restored = taken.forward if how == "save" else taken["forward"]
    assert torch.equal(restored, before[0]), "a copy, not a view"


def test_a_snapshot_remembers_who_leads_the_automatic_update():
    """Warming up a part of the model must not make it the leader."""
    runs = []
    for warm_up in (False, True):
        torch.manual_seed(0)
        model, report = two_layers()
        state = report.fp8_state
        model(torch.randn(5, 16)).sum().backward()
        x = torch.randn(5, 16)
        if warm_up:
            snapshot = state.save()
            for _ in range(3):
                model[2](x).sum().backward()
            state.restore(snapshot)
        for _ in range(2):
            model(x).sum().backward()
        runs.append(tensors(state))
    assert torch.equal(*runs)


def test_a_snapshot_of_others_is_refused():
    state = small()
    before = tensors(state)
    longer = FP8State(["a", "b"], DelayedScaling(amax_history_len=7)).save()
    with pytest.raises(ValueError, match=r"forward of the snapshot .*\(8, 2\).* \(5, 2\)"):
        state.restore(longer)
    taken = state.save()
    with pytest.raises(ValueError, match=r"torch.float64.*float32"):
        state.restore(replace(taken, backward=taken.backward.double()))
    state.register("c")
    with pytest.raises(ValueError, match=r"of 2 tensors, this FP8State of 3; .*\['c'\]"):
        state.restore(taken)
    assert torch.equal(tensors(state)[:, :, :2], before)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda s: small(("a", "b", "c")).state_dict(),
            r"of 3 tensors, this FP8State of 2; .*\['c'\]",
        ),
        (
            lambda s: small(("b", "a")).state_dict(),
            "column 0 of the state is 'b', of this FP8State 'a'",
        ),
        (
            lambda s: FP8State(["a", "b"], DelayedScaling(amax_history_len=7)).state_dict(),
            "'amax_history_len': 7.*'amax_history_len': 4",
        ),
        (
            lambda s: {**s, "recipe": {**s["recipe"], "fp8_format": "E4M3"}},
            "'fp8_format': 'E4M3'.*'fp8_format': 'HYBRID'",
        ),
        (lambda s: {**s, "forward": s["forward"].double()}, "forward.*float64.*float32"),
        (lambda s: {**s, "backward": s["backward"][:3]}, r"backward.*\(3, 2\).*\(5, 2\)"),
        (
            lambda s: {k: s[k] for k in ("names", "forward")},
            r"must have.*found \['forward', 'names'\]",
        ),
    ],
    ids=["names", "order", "length", "format", "dtype", "shape", "entries"],
)
def test_a_state_that_does_not_fit_is_refused(change, expected):
    state, other = small(), small(seed=1)
    before = tensors(state)
    with pytest.raises(ValueError, match=expected):
        state.load_state_dict(change(other.state_dict()))
    assert torch.equal(tensors(state), before)


def test_names_are_unique_and_known():
    with pytest.raises(ValueError, match="unique"):
        FP8State(["a", "a"], DelayedScaling())
    with pytest.raises(KeyError, match="no tensor named 'z'"):
        small().column("z")


def test_registering_keeps_every_other_column():
    state, wide = small(), FP8State(["a", "b", "late"], DelayedScaling(amax_history_len=4))
    before = tensors(state)
    assert state.register("late") == 2 == state.column("late") and state.names == wide.names
    assert torch.equal(tensors(state)[:, :, :2], before) and not tensors(state)[:, :, 2].any()
    wide.forward[:, :2], wide.backward[:, :2] = before
    for one in (state, wide):
        one.forward[0], one.backward[0] = torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 4.0]])
        one.reduce_and_update()
    assert torch.equal(tensors(state), tensors(wide))
    assert state.forward.is_contiguous() and state.backward.is_contiguous()
    layer = LoRALinear(16, 8, config=LoRAConfig(fp8=state.recipe), fp8_state=state, name="late")
    layer(torch.ones(2, 16)).sum().backward()
    assert (tensors(state)[:, 0, 2] > 0).all()
    with pytest.raises(ValueError, match="'late' is registered already, as column 2"):
        state.register("late")


def test_pinned_addresses_stay():
    state = small()
    before, address = tensors(state), addresses(state)
    state.pin("the demo")
    state.pin("a CUDA graph")
    state.pin("the demo")
    assert state.pinned_by == "the demo, a CUDA graph"
    with pytest.raises(RuntimeError, match=r"register 'c'.*pinned by the demo, a CUDA graph"):
        state.register("c")
    with pytest.raises(RuntimeError, match=r"from cpu to meta.*pinned by the demo"):
        state.to("meta")
    assert state.to("cpu") is state and addresses(state) == address
    assert torch.equal(tensors(state), before) and state.names == ("a", "b")
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert twin.pinned_by is None and twin.register("c") == 2
    layer = LoRALinear(16, 8, config=LoRAConfig(r=2))
    layer.fp8_state.pin("a test")
    with pytest.raises(RuntimeError, match=r"from cpu to meta.*pinned by a test"):
        layer.to("meta")
    assert layer.lora_A.device.type == layer.weight.device.type == "cpu", "moved before it refused"
    state.unpin("the demo")
    assert state.pinned_by == "a CUDA graph"
    state.unpin()
    assert state.pinned_by is None and state.register("c") == 2


def recording(recording_now=True):
    """As if the stream were under capture; the real thing is in test_fp8_capture.py."""
    return mock.patch.object(FP8State, "_capturing", lambda self: recording_now)


@pytest.mark.parametrize("in_charge", ["auto", "explicit"])
def test_what_runs_under_capture_pins(in_charge):
    model, report = two_layers()
    state = report.fp8_state
    state.in_charge = in_charge
    model(torch.randn(5, 16))
    assert state.pinned_by is None
    with recording():
        model.eval()(torch.randn(5, 16))
        assert state.pinned_by is None, "eval does not touch the state"
        model.train()(torch.randn(5, 16))
    assert state.pinned_by == "a CUDA graph"
    state.unpin()
    with recording():
        state.reduce_and_update()
    assert state.pinned_by == "a CUDA graph"


def test_nan_is_reported_once_by_name():
    state = FP8State(["layers.0.q", "layers.0.k"], DelayedScaling(), check_nan=True)

    def warned():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state.reduce_and_update()
        assert all(w.category is RuntimeWarning for w in caught)
        return [str(w.message) for w in caught]

    state.forward[0] = torch.tensor([math.nan, math.inf])
    assert warned() == ["amax of x of 'layers.0.q' is NaN"]
    state.forward[0, 0] = math.nan
    state.backward[0] = torch.tensor([1.0, math.nan])
    assert warned() == ["amax of dy of 'layers.0.k' is NaN"]
    state.forward[0] = math.nan
    assert warned() == ["amax of x of 'layers.0.k' is NaN"]
    state.forward[0], state.backward[0] = math.nan, math.nan
    assert warned() == ["amax of dy of 'layers.0.q' is NaN"]


def test_nan_in_the_data_is_reported_by_the_automatic_update():
    model, report = two_layers()
    report.fp8_state.check_nan = True
    x = torch.randn(5, 16)
    x[2, 3] = math.nan
    model(x).sum().backward()
    with pytest.warns(RuntimeWarning, match="amax of x of '[02]' is NaN"):
        model(torch.randn(5, 16))


def test_checking_under_capture_is_refused_before_anything_changes():
    state = small(check_nan=True)
    state.forward[0], state.in_charge = 1.0, "auto"
    before = tensors(state)
    with recording(), pytest.raises(RuntimeError, match=r"check_nan=True.*under capture"):
        state.reduce_and_update()
    assert torch.equal(tensors(state), before)
    assert state.in_charge == "auto" and state.pinned_by is None


def test_one_process_updates_by_one_op_and_no_copy():
    state = small()
    with mock.patch.object(fp8.ops, "amax_and_scale_update") as op:
        state.reduce_and_update()
    op.assert_called_once()
    forward, backward, current, gated = op.call_args.args[:4]
    assert forward is state.forward and backward is state.backward
    assert current is None and gated is False


HOST_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


@contextmanager
def no_host_reads():
    def refuse(*args):
        raise AssertionError("a device value was read on the host")

    with ExitStack() as stack:
        for name in HOST_READS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, refuse))
        yield


def test_updates_read_nothing_on_the_host_by_default():
    model, report = two_layers()
    x = torch.randn(5, 16)
    with no_host_reads():
        for _ in range(2):
            model(x).sum().backward()
        report.fp8_state.reduce_and_update()
        report.fp8_state.restore(report.fp8_state.save())
        report.fp8_state.check_nan = True
        with pytest.raises(AssertionError, match="read on the host"):
            report.fp8_state.reduce_and_update()


@pytest.mark.gpu
def test_no_iteration_waits_for_the_device():
    model, report = two_layers()
    model.cuda()
    x = torch.randn(5, 16, device="cuda")
    model(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            model(x).sum().backward()
        report.fp8_state.reduce_and_update()
        report.fp8_state.check_nan = True
        with pytest.raises(RuntimeError, match="synchroniz"):
            report.fp8_state.reduce_and_update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", [FrozenFP8Linear, LoRALinear])
def test_a_layer_refuses_a_state_that_is_not_its_own(kind):
    recipe, linear = DelayedScaling(margin=2), torch.nn.Linear(16, 8)

    def build(own, state, name="a"):
        arg = LoRAConfig(fp8=own) if kind is LoRALinear else own
        return kind.from_linear(linear, arg, fp8_state=state, name=name)

    state = FP8State(["a"], recipe)
    assert build(recipe, state).fp8_state is state
    with pytest.raises(ValueError, match=r"a: fp8_state follows .*margin=2.*layer .*margin=0"):
        build(DelayedScaling(), state)
    with pytest.raises(ValueError, match=r"a: fp8_state follows .*margin=2.*layer None"):
        build(None, state)
    with pytest.raises(ValueError, match="a: fp8_state is on meta, the weight on cpu"):
        build(recipe, FP8State(["a"], recipe, "meta"))
    with pytest.raises(KeyError, match=r"no tensor named 'b' in this FP8State; it has \['a'\]"):
        build(recipe, state, "b")


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


def test_quantize_saturates_and_keeps_nan():
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e9, 0.0, -0.0])
    for dtype, top in reference.FP8_MAX.items():
        q = reference.quantize_fp8(x, torch.ones(1), dtype).float()
        assert (
            q[[0, 1, 3]].tolist() == [top, -top, top] and q[2].isnan() and q[4:].tolist() == [0, 0]
        )
