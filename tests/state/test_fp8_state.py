# SPDX-License-Identifier: Apache-2.0
"""FP8State as an object: snapshots, registering, pinned addresses, NaN, and what it refuses."""

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

from lorakernels import DelayedScaling, FP8State, LoRAConfig, LoRALinear, MMParams
from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.state import fp8
from tests.fp8_states import addresses, small, tensors, two_layers


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


def test_a_snapshot_remembers_who_has_run_since_the_leader():
    """A layer that comes round twice without the leader takes the lead, also when a snapshot lies in between."""
    state = small(("a", "b"))
    state.in_charge = "auto"
    state.on_training_forward(0)
    state.on_training_forward(1)
    snapshot = state.save()
    state.on_training_forward(0)  # b has not run since
    state.restore(snapshot)
    state.forward[0], state.backward[0] = 3.0, 5.0
    state.on_training_forward(1)
    assert not state.forward[0].any() and not state.backward[0].any()  # updated: the row has rolled


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


def test_a_state_saved_before_recipes_had_gemms_loads():
    """Its GEMMs added up as they do by default; a recipe that says otherwise is another one."""
    old = small(seed=1).state_dict()
    old["recipe"] = {k: v for k, v in old["recipe"].items() if not k.startswith("fp8_gemm_")}
    state = small()
    state.load_state_dict(old)
    assert torch.equal(state.forward, old["forward"])
    other = replace(state.recipe, fp8_gemm_fprop=MMParams(True))
    with pytest.raises(ValueError, match=r"'fp8_gemm_fprop': \{'use_split_accumulator': False\}"):
        FP8State(state.names, other).load_state_dict(old)


@pytest.mark.parametrize("fused", ["saved", "loaded into", "both"])
def test_the_history_of_a_joint_dy_is_taken_by_a_joint_dy_only(fused):
    """ "a" is the first of fused projections on one side: dy's history there is of all of them together."""
    saved, state = small(seed=1), small(seed=2)
    for one, where in ((saved, "saved"), (state, "loaded into")):
        one.joint = {0} if fused in (where, "both") else set()
    expected = saved.backward.clone()
    if fused != "both":
        expected[:, 0] = 0.0
    state.load_state_dict(saved.state_dict())
    assert torch.equal(state.backward, expected)
    assert torch.equal(state.forward, saved.forward)


def test_a_joint_dy_is_still_one_where_its_layer_is_moved_to():
    layer = FrozenFP8Linear(16, 8)
    layer.fp8_state.joint.add(layer.column)
    for names in (["a"], ["a", "b", "layer"]):
        state = FP8State(names, layer.fp8_state.recipe)
        layer.move_state(state, "layer")
        assert state.state_dict()["joint"] == ["layer"]


def test_amaxes_of_microbatches_are_their_largest():
    """Whatever their order, up to the update."""
    config = LoRAConfig(r=2, fp8=DelayedScaling())
    layer = LoRALinear(8, 8, config=config)
    state = layer.fp8_state
    for sizes in ((1.0, 5.0, 2.0), (5.0, 1.0, 2.0)):
        state.reset()
        state.in_charge = "explicit"
        for size in sizes:
            x = torch.full((3, 8), size, requires_grad=True)
            layer(x).backward(torch.full((3, 8), -size))
        assert state.forward[0].tolist() == [5.0] and state.backward[0].tolist() == [5.0]


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
