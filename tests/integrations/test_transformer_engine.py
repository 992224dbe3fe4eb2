# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine: on the CPU with stand-ins for its classes, on the GPU against TE itself, bit for bit."""

from __future__ import annotations

import enum
import math
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels import DelayedScaling, FrozenFP8Linear, LoRAConfig, LoRALinear, apply_lora
from lorakernels.fp8 import FP8State
from lorakernels.integrations.transformer_engine import (
    convert_te_model,
    from_te_linear,
    load_te_state,
    why_not,
)
from lorakernels.modules.frozen import quantize_weight

E4M3 = torch.float8_e4m3fn
MODULES = "transformer_engine.pytorch.module"


def stand_in(name: str, where: str, *bases: type, **members: Any) -> type:
    """A class that says it is TE's `name`."""
    return type(name, bases or (nn.Module,), {"__module__": where, **members})


Format = enum.Enum("Format", {"E4M3": (448, 448), "HYBRID": (448, 57344)})
Float8Tensor = stand_in(
    "Float8Tensor", "transformer_engine.pytorch.tensor.float8_tensor", types.SimpleNamespace
)
MXFP8Tensor = stand_in(
    "MXFP8Tensor", "transformer_engine.pytorch.tensor.mxfp8_tensor", types.SimpleNamespace
)
TELinear = stand_in("Linear", f"{MODULES}.linear", forward=lambda self, x: x)


def te_linear(rows: int = 6, columns: int = 8, bias: bool = True, fp8: bool = True, **changes):
    """The attributes of te.Linear in TE 2.12 that matter here; an absent bias is an empty tensor there."""
    module = TELinear()
    weight = torch.randn(rows, columns)
    module.weight = nn.Parameter(weight)
    if fp8:
        raw, scale_inv = quantize_weight(weight)
        del module.weight
        module.weight = float8(raw, scale_inv)
    module.bias = nn.Parameter(torch.randn(rows)) if bias else torch.empty(0)
    facts = {
        "tp_size": 1,
        "parallel_mode": None,
        "sequence_parallel": False,
        "weight_names": ["weight"],
        "return_bias": False,
        "fsdp_wrapped": False,
        "fp8_meta": {"fp8_checkpoint": False, "fp8_group": None},
    }
    for name, value in (facts | changes).items():
        setattr(module, name, value)
    return module


def float8(raw: Tensor, scale_inv: Tensor, dtype: str = "kFloat8E4M3", **changes: Any) -> Any:
    return Float8Tensor(
        **{
            "_data": raw,
            "_scale_inv": scale_inv,
            "_fp8_dtype": types.SimpleNamespace(name=dtype),
            "_transpose": torch.full_like(raw.t(), 255),  # stale: NaN everywhere
            "_transpose_invalid": True,
        }
        | changes
    )


def te_meta(length: int = 3, scales: tuple[float, float] = (1.0, 1.0), gemms: int = 1, **recipe):
    """fp8_meta after `scales` of x and dy and histories to match; scale 1 is a state never used."""
    values = {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": length,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
    }
    meta = {"recipe": types.SimpleNamespace(**(values | recipe))}
    for key, tensors, scale in (("scaling_fwd", 3, scales[0]), ("scaling_bwd", 2, scales[1])):
        history = torch.zeros(length, tensors * gemms)
        if scale != 1:
            history[1:] = torch.arange(1.0, length)[:, None] + torch.arange(tensors * gemms) * 10
        column = torch.full((tensors * gemms,), 7.0)
        column[0] = scale
        meta[key] = types.SimpleNamespace(amax_history=history, scale=column)
    return meta


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


@pytest.mark.parametrize("layout", ["single", "both"])
def test_convert_te_model_then_apply_lora(layout):
    model = te_model(fp8_meta=te_meta(scales=(3.0, 5.0), margin=1))
    raw = [model[i].weight._data.clone() for i in (0, 2)]
    assert convert_te_model(model, weight_layout=layout) == ["0", "2"]
    assert model[2] is model[3] and isinstance(model[2], FrozenFP8Linear)
    state = model[0].fp8_state
    assert state is model[2].fp8_state and state.names == ("0", "2")
    assert state.recipe == DelayedScaling(margin=1, amax_history_len=3)
    assert (state.forward[-1].tolist(), state.backward[-1].tolist()) == ([3.0, 0.0], [5.0, 0.0])
    config = LoRAConfig(r=2, target_modules="all-linear", weight_layout=layout, fp8=state.recipe)
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
        ({}, {"weight_layout": "x"}, ValueError, "'single' or 'both', got 'x'"),
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
    ids=["fp8", "layout", "shard", "MXFP8", "history", "dpa", "recipe kind", "two recipes"],
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


# Real modules. Sizes are multiples of 16, as TE's FP8 GEMMs want them.


def same(a: Tensor, b: Tensor) -> Tensor:
    """0-dim bool: equal bits, or NaN in both."""
    bits = a.contiguous().view(torch.int32) == b.contiguous().view(torch.int32)
    return (bits | (a.isnan() & b.isnan())).all()


@pytest.fixture
def te() -> Iterator[Any]:
    te = pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    yield te
    FP8GlobalStateManager.reset()


def te_recipes(te: Any) -> Any:
    from transformer_engine.common import recipe

    return recipe


def make(te: Any, recipe: Any, *sizes: int, **options: Any) -> Any:
    """A frozen bf16 te.Linear whose weight is FP8 from the start."""
    with te.quantized_model_init(enabled=True, recipe=recipe):
        linear = te.Linear(*sizes, params_dtype=torch.bfloat16, **options)
    return linear.requires_grad_(False)


def train(te: Any, model: nn.Module, recipe: Any, features: int, steps: int = 4) -> None:
    """Forward and backward under TE, so that its scales of x and dy leave 1."""
    for step in range(steps):
        x = torch.randn(32, features, device="cuda", dtype=torch.bfloat16) * (step + 1)
        x.requires_grad_()
        with te.autocast(enabled=True, recipe=recipe):
            y = model(x)
        y.backward(torch.randn_like(y) * 1e-3)


@pytest.mark.gpu
def test_recipes_of_te(te):
    recipes = te_recipes(te)
    changes = {"margin": 2, "amax_history_len": 31, "amax_compute_algo": "most_recent"}
    theirs = recipes.DelayedScaling(fp8_format=recipes.Format.E4M3, reduce_amax=False, **changes)
    ours = DelayedScaling(fp8_format="E4M3", reduce_amax=False, **changes)
    assert DelayedScaling.from_te(theirs) == ours and ours.to_te() == theirs
    assert DelayedScaling.from_te(recipes.DelayedScaling()) == DelayedScaling()
    assert DelayedScaling().to_te() == recipes.DelayedScaling()
    for kind in ("MXFP8BlockScaling", "Float8CurrentScaling", "Float8BlockScaling"):
        with pytest.raises(TypeError, match=f"got {kind}"):
            DelayedScaling.from_te(getattr(recipes, kind)())
    for field, value in (("amax_compute_algo", torch.amax), ("fp8_dpa", True)):
        with pytest.raises(ValueError, match=rf"DelayedScaling\.{field}"):
            DelayedScaling.from_te(recipes.DelayedScaling(**{field: value}))


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kind", ["DelayedScaling", "Float8CurrentScaling"])
def test_te_linear_keeps_its_bytes(te, kind, bias):
    linear = make(te, getattr(te_recipes(te), kind)(), 64, 96, bias=bias)
    raw, scale_inv = linear.weight._data.clone(), linear.weight._scale_inv.clone()
    layer = from_te_linear(linear, LoRAConfig(r=4))
    assert (layer.out_features, layer.in_features) == (96, 64) == tuple(raw.shape)
    assert raw.unique().numel() > 20  # not a weight of zeros
    assert torch.equal(layer.weight.view(torch.uint8), raw)
    assert torch.equal(layer.weight_scale_inv, scale_inv.view(1))
    assert (layer.bias is None) != bias
    dequantized = linear.weight.dequantize(dtype=torch.float32)
    assert torch.equal(layer.dequantized_weight(), dequantized)


@pytest.mark.gpu
def test_why_not_knows_te(te):
    assert why_not(te.Linear(64, 64)) is None
    assert why_not(te.Linear(64, 64, parallel_mode="column")) is None  # of one rank
    assert "no linear weight" in why_not(te.RMSNorm(64))
    for module, reason in (
        (te.LayerNormLinear(64, 64), "normalises"),
        (te.LayerNormMLP(64, 128), "two weights"),
        (te.GroupedLinear(2, 64, 64), "per group"),
        (te.MultiheadAttention(64, 4), "arguments"),
        (te.TransformerLayer(64, 128, 4), "built of"),
        (te.ops.Linear(64, 64), "fusible"),
        (te.Linear(64, 64, parameters_split=("q_", "k_")), "q_weight"),
        (te.Linear(64, 64, return_bias=True), "return_bias"),
        (te.Linear(64, 64, parallel_mode="row", tp_size=2), "tp_size=2"),
    ):
        assert reason in why_not(module), type(module)
    if te.is_fp8_block_scaling_available():
        linear = make(te, te_recipes(te).Float8BlockScaling(), 128, 128)
        assert "Float8BlockwiseQTensor" in why_not(linear)


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_trained_state_loads_and_quantizes_with_the_same_bits(te, algorithm):
    """W is the identity with scale 1, so y is x's FP8 values times scale_inv: one wrong bit in the scale shows."""
    recipe = te_recipes(te).DelayedScaling(amax_history_len=8, amax_compute_algo=algorithm)
    linear = make(te, recipe, 64, 64, bias=False, init_method=nn.init.eye_)
    train(te, linear, recipe, 64)
    layer = from_te_linear(linear, LoRAConfig(r=4, fp8=DelayedScaling.from_te(recipe)), name="fc")
    load_te_state(linear, layer.fp8_state, "fc")
    for key, rows in (
        ("scaling_fwd", layer.fp8_state.forward),
        ("scaling_bwd", layer.fp8_state.backward),
    ):
        theirs = linear.fp8_meta[key]
        assert theirs.scale[0] != 1 and (theirs.amax_history[:, 0] > 0).sum() == 4
        assert same(rows[-1, 0], theirs.scale[0]) and same(rows[:-1, 0], theirs.amax_history[:, 0])
    before = layer.fp8_scale
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16) * 20  # some of it saturates
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        expected = linear(x)
    assert torch.equal(layer.train()(x), expected)
    assert torch.equal(layer.fp8_scale, before)


@pytest.mark.gpu
def test_a_state_of_another_kind_is_refused(te):
    recipe = te_recipes(te).Float8CurrentScaling()
    state = FP8State(["fc"], DelayedScaling(), "cuda")
    for linear in (te.Linear(64, 64), make(te, recipe, 64, 64)):
        with pytest.raises(ValueError, match="must be the state of delayed scaling"):
            load_te_state(linear, state, "fc")
    untouched = make(te, te_recipes(te).DelayedScaling(), 64, 64)
    state.forward.fill_(2.0)
    load_te_state(untouched, state, "fc")
    assert not state.forward.any() and not state.backward.any()


@pytest.mark.gpu
def test_forward_equals_te_with_the_same_scales(te):
    """Both multiply the same FP8 bytes and round to bf16 once; they differ in the order of the fp32 sums only.

    Against the exact product: TE's error is bf16's rounding (2⁻⁸ of the value) plus that of Hopper's FP8 sums, together
    below 2⁻⁷ of the largest output; ours may be twice TE's, plus half a bf16 ulp (2⁻⁹).
    """
    recipe = te_recipes(te).DelayedScaling(amax_history_len=8)
    linear = make(te, recipe, 256, 128, bias=True)
    nn.init.normal_(linear.bias)
    train(te, linear, recipe, 256)
    config = LoRAConfig(r=8, lora_dropout=0.0, fp8=DelayedScaling.from_te(recipe))
    layer = from_te_linear(linear, config, name="fc").train()
    load_te_state(linear, layer.fp8_state, "fc")
    scale = layer.fp8_scale[0]
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    x8 = (x.float() * scale).clamp(-448, 448).to(E4M3).double() / scale.double()
    exact = x8 @ layer.dequantized_weight().double().t() + layer.bias.double()
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        theirs = linear(x)
    error_te = (theirs.double() - exact).abs().max()
    error = (layer(x).double() - exact).abs().max()
    largest = exact.abs().max()
    assert error_te < 2**-7 * largest
    assert error < 2 * error_te + 2**-9 * largest


@pytest.mark.gpu
def test_a_te_model_becomes_ours_and_trains(te):
    recipe = te_recipes(te).DelayedScaling(amax_history_len=8)
    first, second = make(te, recipe, 64, 128), make(te, recipe, 128, 64)
    model = nn.Sequential(first, nn.GELU(), te.RMSNorm(128, dtype=torch.bfloat16), second)
    train(te, model, recipe, 64)
    raw = [linear.weight._data.clone() for linear in (first, second)]
    assert convert_te_model(model) == ["0", "3"]
    state = model[0].fp8_state
    assert state.recipe == DelayedScaling(amax_history_len=8)
    for column, linear in enumerate((first, second)):
        assert same(state.forward[-1, column], linear.fp8_meta["scaling_fwd"].scale[0])
        assert same(state.backward[-1, column], linear.fp8_meta["scaling_bwd"].scale[0])
    apply_lora(model, LoRAConfig(r=8, target_modules=["0", "3"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    losses = []
    for _ in range(10):
        loss = (model.train()(x).float() - x.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and model[0].lora_B.abs().max() > 0
    for layer, expected in zip((model[0], model[3]), raw, strict=True):
        assert torch.equal(layer.weight.view(torch.uint8), expected)
