# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's modules, by stand-ins for its classes: what converts, what does not, and what becomes of it."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lorakernels import DelayedScaling, FrozenFP8Linear, LoRAConfig, LoRALinear, apply_lora
from lorakernels.integrations.transformer_engine import (
    convert_te_model,
    from_te_linear,
    load_te_state,
    why_not,
)
from lorakernels.modules.linear.frozen import quantize_weight
from lorakernels.state.fp8 import FP8State
from tests.integrations.te_stand_ins import (
    MODULES,
    Format,
    MXFP8Tensor,
    TELinear,
    float8,
    stand_in,
    te_linear,
    te_meta,
)


@pytest.mark.slow
def test_nothing_imports_transformer_engine():
    code = """if True:
        import sys
        import torch
        import lorakernels
        from lorakernels.integrations import transformer_engine as ours
        ours.why_not(torch.nn.Linear(2, 2))
        try:
            ours.convert_te_model(torch.nn.Linear(2, 2))
        except ValueError:
            pass
        found = [n for n in sys.modules if n.split(".")[0] in ("transformer_engine", "transformer_engine_torch")]
        assert not found, found
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_fp8_weight_is_taken_untouched(bias):
    linear = te_linear(bias=bias).eval()
    layer = from_te_linear(linear, LoRAConfig(r=2, rank_pattern={"fc": 3}), name="fc")
    assert isinstance(layer, LoRALinear) and layer.r == 3 and not layer.training
    assert torch.equal(layer.weight.view(torch.uint8), linear.weight._data)
    assert torch.equal(layer.weight_scale_inv, linear.weight._scale_inv)
    assert (layer.bias is None) != bias
    if bias:
        assert torch.equal(layer.bias, linear.bias) and not layer.bias.requires_grad


@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "FP8"])
def test_plain_weight(fp8):
    linear = te_linear(fp8=False)
    layer = from_te_linear(linear, LoRAConfig(r=2, fp8=fp8))
    if fp8 is None:
        assert torch.equal(layer.weight, linear.weight) and layer.weight_scale_inv is None
        return
    raw, scale_inv = quantize_weight(linear.weight)
    assert torch.equal(layer.weight.view(torch.uint8), raw)
    assert torch.equal(layer.weight_scale_inv, scale_inv)


RAW, ONE = torch.zeros(6, 8, dtype=torch.uint8), torch.ones(1)
Subclass = type("ColumnParallel", (TELinear,), {"forward": lambda self, x: x})
NOT_CONVERTIBLE = {
    "nn.Linear": (lambda: nn.Linear(2, 2), "it is a torch.nn.modules.linear.Linear, not a module"),
    "LayerNorm": (lambda: stand_in("LayerNorm", f"{MODULES}.layernorm")(), "no linear weight"),
    "LayerNormLinear": (
        lambda: stand_in("LayerNormLinear", f"{MODULES}.layernorm_linear")(),
        "normalises its input",
    ),
    "its subclass": (
        lambda: type(
            "TEColumn", (stand_in("LayerNormLinear", f"{MODULES}.layernorm_linear"),), {}
        )(),
        "normalises its input",
    ),
    "te.ops.Linear": (
        lambda: stand_in("Linear", "transformer_engine.pytorch.ops.linear")(),
        "fusible operation",
    ),
    "own forward": (lambda: Subclass(), "ColumnParallel has a forward of its own"),
    "tensor parallel": (
        lambda: te_linear(tp_size=2, parallel_mode="column"),
        r"tp_size=2, parallel_mode='column', sequence_parallel=False",
    ),
    "split": (
        lambda: te_linear(weight_names=["q_weight", "k_weight"]),
        r"\(parameters_split\) into \['q_weight', 'k_weight'\]",
    ),
    "return_bias": (lambda: te_linear(return_bias=True), "return_bias=True"),
    "FSDP": (lambda: te_linear(fsdp_wrapped=True), "convert before sharding"),
    "MXFP8": (lambda: te_linear(weight=MXFP8Tensor()), "MXFP8Tensor; only Float8Tensor has one"),
    "e5m2": (lambda: te_linear(weight=float8(RAW, ONE, "kFloat8E5M2")), "is kFloat8E5M2; ours is"),
    "no bytes": (lambda: te_linear(weight=float8(RAW, ONE, _data=None)), "only the transpose"),
    "two scales": (lambda: te_linear(weight=float8(RAW, torch.ones(2))), "must have one scale_inv"),
}


@pytest.mark.parametrize("case", NOT_CONVERTIBLE)
def test_why_not(case):
    make, reason = NOT_CONVERTIBLE[case]
    with pytest.raises(TypeError, match=rf"^fc is a \w+, which cannot be converted: .*{reason}"):
        from_te_linear(make(), LoRAConfig(), name="fc")


def test_why_not_says_none_for_what_converts():
    named = te_linear()
    named.__class__ = type("Named", (TELinear,), {})  # a subclass with TE's own forward
    assert [why_not(m) for m in (te_linear(), te_linear(fp8=False), named)] == [None] * 3


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"weight": float8(RAW, torch.tensor([math.inf]))},
            "positive, finite scale_inv, found inf",
        ),
        ({"weight": float8(RAW, torch.zeros(1))}, "positive, finite scale_inv, found 0"),
    ],
    ids=["inf", "zero"],
)
def test_a_broken_scale_is_refused(change, message):
    with pytest.raises(ValueError, match=f"fc.weight must have a {message}"):
        from_te_linear(te_linear(**change), LoRAConfig(), name="fc")


def test_fp8_weight_needs_a_recipe():
    with pytest.raises(ValueError, match=r"config\.fp8 must be a DelayedScaling .* found None"):
        from_te_linear(te_linear(), LoRAConfig(fp8=None))


def state_of(length: int = 3, **recipe: Any) -> FP8State:
    state = FP8State(["a", "b"], DelayedScaling(amax_history_len=length, **recipe))
    state.forward.fill_(0.25), state.backward.fill_(0.5)
    return state


def test_load_te_state_fills_one_column_in_place():
    state = state_of()
    addresses = state.forward.data_ptr(), state.backward.data_ptr()
    load_te_state(te_linear(fp8_meta=te_meta(scales=(3.0, 1.0))), state, "b")
    assert state.forward.tolist() == [[0.25, 0.0], [0.25, 1.0], [0.25, 2.0], [0.25, 3.0]]
    assert state.backward[:, 1].tolist() == [0.0] * 4  # never used: no amax seen yet
    assert (state.backward[:, 0] == 0.5).all()
    assert addresses == (state.forward.data_ptr(), state.backward.data_ptr())


@pytest.mark.parametrize(
    "meta, message",
    [
        ({}, r"fp8_meta\['scaling_fwd'\] must be .* found NoneType"),
        (te_meta(4, (3.0, 1.0)), "scaling_fwd has a history of 4 iterations, ours 3"),
        (te_meta(margin=2), "margin is 2, ours 0"),
        (te_meta(fp8_format=Format.E4M3), "fp8_format is 'E4M3', ours 'HYBRID'"),
        (te_meta(amax_compute_algo="most_recent"), "is 'most_recent', ours 'max'"),
        (te_meta(scaling_factor_compute_algo=max), "is <built-in function max>, ours None"),
        (te_meta(gemms=2), "scaling_fwd must hold one GEMM's 3 tensors, found 6"),
    ],
    ids=["none", "length", "margin", "format", "algorithm", "function", "two GEMMs"],
)
def test_load_te_state_refuses_what_does_not_fit(meta, message):
    state = state_of()
    with pytest.raises(ValueError, match=f"^b: .*{message}"):
        load_te_state(te_linear(fp8_meta=meta), state, "b")
    assert (state.forward == 0.25).all() and (state.backward == 0.5).all()
    with pytest.raises(KeyError, match="no tensor named 'c'"):
        load_te_state(te_linear(), state, "c")


def te_model(**changes: Any) -> nn.Module:
    """Two te.Linear around a norm of TE's; the second hangs in two places."""
    model = nn.Sequential(te_linear(8, 8, **changes), stand_in("LayerNorm", f"{MODULES}.norm")())
    model[1].forward = lambda x: x
    model.append(te_linear(8, 8, bias=False))
    model.append(model[2])
    return model


def test_convert_te_model_then_apply_lora():
    model = te_model(fp8_meta=te_meta(scales=(3.0, 5.0), margin=1))
    raw = [model[i].weight._data.clone() for i in (0, 2)]
    assert convert_te_model(model) == ["0", "2"]
    assert model[2] is model[3] and isinstance(model[2], FrozenFP8Linear)
    state = model[0].fp8_state
    assert state is model[2].fp8_state and state.names == ("0", "2")
    assert state.recipe == DelayedScaling(margin=1, amax_history_len=3)
    assert (state.forward[-1].tolist(), state.backward[-1].tolist()) == ([3.0, 0.0], [5.0, 0.0])
    config = LoRAConfig(r=2, target_modules="all-linear", fp8=state.recipe)
    report = apply_lora(model, config)
    assert torch.equal(report.fp8_state.forward, state.forward)
    for i, expected in zip((0, 2), raw, strict=True):
        assert isinstance(model[i], LoRALinear)
        assert torch.equal(model[i].weight.view(torch.uint8), expected)
    model(torch.randn(4, 8)).sum().backward()
    assert model[0].lora_B.grad.abs().max() > 0


@pytest.mark.parametrize(
    "change, options, error, message",
    [
        ({}, {"fp8": True}, TypeError, "must be a DelayedScaling or None .*got True"),
        ({"tp_size": 2}, {}, TypeError, "^2 is a Linear, which cannot be converted: it is one"),
        ({"weight": MXFP8Tensor()}, {}, TypeError, "^2 is a Linear, .*MXFP8Tensor"),
        (
            {"fp8_meta": te_meta(scales=(3.0, 1.0))},
            {"fp8": DelayedScaling(amax_history_len=5)},
            ValueError,
            "^2: .* history of 3 iterations, ours 5.*reset_fp8_meta_tensors",
        ),
        ({"fp8_meta": te_meta(fp8_dpa=True)}, {}, ValueError, r"^2: .*fp8_dpa.*Pass fp8="),
        (
            {"fp8_meta": {"recipe": stand_in("MXFP8BlockScaling", "x", object)()}},
            {},
            TypeError,
            r"^2: .*got MXFP8BlockScaling.*Pass fp8=",
        ),
        ({"fp8_meta": te_meta(margin=3)}, {}, ValueError, "^0 follows .*margin=0.*, 2 .*margin=3"),
    ],
    ids=["fp8", "shard", "MXFP8", "history", "dpa", "recipe kind", "two recipes"],
)
def test_convert_te_model_changes_nothing_when_it_refuses(change, options, error, message):
    model = te_model(fp8_meta=te_meta())
    for name, value in change.items():
        setattr(model[2], name, value)
    before = list(model)
    with pytest.raises(error, match=message):
        convert_te_model(model, **options)
    assert all(now is then for now, then in zip(model, before, strict=True))


def test_convert_te_model_refuses_a_plain_weight_that_is_not_finite():
    model = te_model()
    model.append(te_linear(8, 8, fp8=False))
    model[4].weight.data[3, 3] = math.nan
    with pytest.raises(ValueError, match=r"^4\.weight must be finite"):
        convert_te_model(model)
    assert isinstance(model[0], TELinear)


@pytest.mark.parametrize("name", ["LayerNormMLP", "GroupedLinear", "TransformerLayer"])
def test_convert_te_model_refuses_other_linear_modules(name):
    model = te_model()
    model.append(stand_in(name, f"{MODULES}.other")())
    with pytest.raises(TypeError, match=f"^4 is a {name}, which cannot be converted: it "):
        convert_te_model(model)
    assert isinstance(model[0], TELinear)


def test_convert_te_model_needs_a_te_linear_inside():
    with pytest.raises(ValueError, match="Sequential has no te"):
        convert_te_model(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="use from_te_linear"):
        convert_te_model(te_linear())
