# SPDX-License-Identifier: Apache-2.0
"""match_targets against PEFT itself: the same table, the same modules in the same order."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lorakernels import LoRALinear, apply_lora
from lorakernels.config import LoRAConfig
from lorakernels.modules.model.targets import choose, match_saved, match_targets
from lorakernels.recipes import DelayedScaling


class Holder(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q_proj", "k_proj", "v")})
        self.experts = nn.ModuleList(Holder(v=nn.Linear(4, 4)) for _ in range(2))
        self.gate = Holder(v=nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.visual = Holder(blocks=nn.ModuleList(Block() for _ in range(2)))
        self.q_proj = nn.Linear(4, 4)
        self.xq_proj = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 7)


SAME_AS_PEFT = {
    "suffix": {"target_modules": ["q_proj", "v"]},
    "exact path": {"target_modules": ["layers.1.attn.q_proj"]},
    "suffix over a dot": {"target_modules": ["attn.q_proj", "experts.1.v"]},
    "a set": {"target_modules": {"k_proj"}},
    "regex": {"target_modules": r"layers\.\d\.attn\.(q_proj|v)"},
    "regex matches the whole path": {"target_modules": r"q_proj"},
    "regex from the left": {"target_modules": r".*q_proj"},
    "exclude by suffix": {"target_modules": ["q_proj", "v"], "exclude_modules": ["attn.q_proj"]},
    "exclude needs a dot before a tail": {
        "target_modules": ["q_proj", "xq_proj"],
        "exclude_modules": ["proj", "q_proj"],
    },
    "exclude by regex": {"target_modules": ["v"], "exclude_modules": r".*\.experts\.\d+\.v"},
    "exclude beats an exact path": {
        "target_modules": ["q_proj", "layers.0.attn.v"],
        "exclude_modules": ["layers.0.attn.v"],
    },
    "saved subtree is no target": {"target_modules": ["v"], "modules_to_save": ["gate"]},
    "saved name inside a path": {"target_modules": ["v"], "modules_to_save": ["visual"]},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": 1},
    "layer 0": {"target_modules": ["q_proj"], "layers_to_transform": 0},
    "layers": {"target_modules": ["v"], "layers_to_transform": [0, 2]},
    "no layers given": {"target_modules": ["v"], "layers_to_transform": []},
    "first number, not the expert's": {
        "target_modules": ["experts.1.v"],
        "layers_to_transform": [1],
    },
    "layers of a pattern": {
        "target_modules": ["v"],
        "layers_to_transform": [0],
        "layers_pattern": "layers",
    },
    "layers of two patterns": {
        "target_modules": ["v"],
        "layers_to_transform": [1],
        "layers_pattern": ["blocks", "layers"],
    },
    "layers of an empty pattern": {
        "target_modules": ["v"],
        "layers_to_transform": [1],
        "layers_pattern": [],
    },
    "layers do not hold back an exact path": {
        "target_modules": ["layers.2.attn.v", "k_proj"],
        "layers_to_transform": [0],
    },
    "layers hold back a top-level name only by suffix": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [0],
    },
    "all-linear": {"target_modules": "all-linear"},
    "All-Linear without saved": {"target_modules": "All-Linear", "modules_to_save": ["lm_head"]},
    "all-linear with exclude": {
        "target_modules": "all-linear",
        "exclude_modules": ["v", "lm_head"],
    },
}


def peft_targets(model: nn.Module, kwargs: dict) -> list[str]:
    peft = pytest.importorskip("peft")
    kwargs = {
        name: list(value) if isinstance(value, set) else value for name, value in kwargs.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuner = peft.LoraModel(model, peft.LoraConfig(**kwargs), "default")
    return tuner.targeted_module_names


@pytest.mark.parametrize("case", SAME_AS_PEFT)
def test_same_as_peft(case):
    kwargs = SAME_AS_PEFT[case]
    found = match_targets(Model(), LoRAConfig(**kwargs))
    assert found
    assert found == peft_targets(Model(), kwargs)


def test_all_linear_leaves_out_the_output_embedding():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM(config)
    found = match_targets(model, LoRAConfig(target_modules="all-linear"))
    assert len(found) == 14 and "lm_head" not in found
    assert found == peft_targets(model, {"target_modules": "all-linear"})


segment = st.sampled_from(["layers", "q", "v", "xq", "0", "1", "12", "h"])
path = st.lists(segment, min_size=1, max_size=5).map(".".join)
names = st.lists(path, min_size=1, max_size=3)


@settings(max_examples=400, deadline=None)
@given(
    path=path,
    target=names,
    exclude=st.none() | names | st.just(r".*\.v"),
    layers=st.none() | st.integers(0, 2) | st.lists(st.integers(0, 12), max_size=3),
    pattern=st.none() | segment | st.lists(segment, max_size=2),
    save=st.none() | st.lists(path, max_size=1),
)
def test_any_path_like_peft(path, target, exclude, layers, pattern, save):
    peft = pytest.importorskip("peft")
    utils = pytest.importorskip("peft.tuners.tuners_utils")
    kwargs = {
        "target_modules": target,
        "exclude_modules": exclude,
        "layers_to_transform": layers,
        "layers_pattern": pattern if layers is not None else None,
        "modules_to_save": save,
    }
    theirs = bool(utils.check_target_module_exists(peft.LoraConfig(**kwargs), path))
    assert bool(choose(LoRAConfig(**kwargs), [path])) == theirs


@pytest.mark.parametrize("layer, chosen", [(0, True), (1, False), (2, False)])
@pytest.mark.parametrize("pattern", ["layers", ["h", "layers"], None])
def test_of_two_layers_in_a_path_the_first_counts(layer, chosen, pattern):
    utils = pytest.importorskip("peft.tuners.tuners_utils")
    lora = pytest.importorskip("peft").LoraConfig
    path = "model.layers.0.tower.layers.1.experts.2.q"
    kwargs = {"target_modules": ["q"], "layers_to_transform": [layer], "layers_pattern": pattern}
    assert bool(utils.check_target_module_exists(lora(**kwargs), path)) == chosen
    assert bool(choose(LoRAConfig(**kwargs), [path])) == chosen


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({}, r"target_modules is None.*Linear modules here end in k_proj, lm_head, q_proj, v"),
        ({"target_modules": ["q_porj"]}, r"\('q_porj',\) matches no module; near: q_proj"),
        ({"target_modules": "attn.q_proj"}, r"matches no module; near: .*attn.q_proj"),
        ({"target_modules": ["v"], "layers_to_transform": 9}, "layers_to_transform=9"),
        ({"target_modules": ["v"], "exclude_modules": ["v"]}, "matches 20 modules, all excluded"),
        ({"target_modules": ["lm_head"], "modules_to_save": ["lm_head"]}, "all excluded"),
        ({"target_modules": []}, "matches no module"),
    ],
)
def test_no_match_says_what_is_near(kwargs, message):
    with pytest.raises(ValueError, match=message):
        match_targets(Model(), LoRAConfig(**kwargs))


UNUSED = {
    "exclude_modules: 'q_prj' matches no module": {"exclude_modules": ["q_prj", "lm_head"]},
    r"exclude_modules: '\.\*q_prj' matches no module": {"exclude_modules": ".*q_prj"},
    "rank_pattern: 'k_proj', 'x' matches no target": {
        "rank_pattern": {"k_proj": 2, "x": 3, "v": 4}
    },
    "alpha_pattern: 'k_proj' matches no target": {"alpha_pattern": {"k_proj": 2, "q_proj": 4}},
}


@pytest.mark.parametrize("message", UNUSED)
def test_a_pattern_without_effect_is_warned_of_as_in_peft(message):
    kwargs = {"target_modules": ["q_proj", "v"], **UNUSED[message]}
    with pytest.warns(UserWarning, match=f"LoRAConfig.{message} and has no effect"):
        apply_lora(Model(), LoRAConfig(r=1, fp8=None, **kwargs))


@pytest.mark.parametrize("exclude", [["lm_head", "attn.q_proj"], r".*\.attn\.q_proj"])
def test_patterns_that_match_are_not_warned_of(exclude):
    """PEFT's exclude_modules may name a module that is no target."""
    config = LoRAConfig(
        r=1,
        fp8=None,
        target_modules=["q_proj", "v"],
        exclude_modules=exclude,
        rank_pattern={"layers.0.attn.v": 2, r"^q_proj": 3},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_lora(Model(), config)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "module, name, found",
    [
        (nn.Embedding(3, 4), "m", "is a Embedding, expected an nn.Linear"),
        (nn.Sequential(nn.Linear(4, 4)), "m", "is a Sequential"),
        (Scaled(4, 4), "m", "Scaled, which does more than nn.Linear"),
        (nn.MultiheadAttention(4, 2), "m.out_proj", "NonDynamicallyQuantizableLinear"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "m", "parametrized"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_wrong_class_is_named(module, name, found):
    model = nn.ModuleDict({"m": module})
    with pytest.raises(TypeError, match=rf"target '{name}' .*{found}"):
        match_targets(model, LoRAConfig(target_modules=[name]))


def test_saved_modules_match_by_plain_tail():
    model = Model()
    assert match_saved(model, LoRAConfig()) == []
    assert match_saved(model, LoRAConfig(modules_to_save=["head"])) == ["lm_head"]
    below = LoRAConfig(target_modules=["v"], modules_to_save=["layers.0.gate"])
    assert match_saved(model, below) == ["layers.0.gate"]  # which keeps its v from being a target
    with pytest.raises(ValueError, match="no module ends with 'lm_haed'; near: lm_head"):
        match_saved(model, LoRAConfig(modules_to_save=["lm_haed"]))
    with pytest.raises(
        TypeError, match="'layers' is a ModuleList, which has no forward of its own"
    ):
        match_saved(model, LoRAConfig(modules_to_save=["layers"]))


def hooked(register: str) -> nn.Linear:
    linear = nn.Linear(4, 4)

    def double(*values):
        return None

    getattr(linear, register)(double)
    return linear


@pytest.mark.parametrize(
    "register, what",
    [
        ("register_forward_hook", "a forward hook, hooked.<locals>.double"),
        ("register_forward_pre_hook", "a forward pre-hook, hooked"),
        ("register_full_backward_hook", "a backward hook, hooked"),
        ("register_full_backward_pre_hook", "a backward pre-hook, hooked"),
    ],
)
def test_a_target_with_hooks_is_refused(register, what):
    """The module is replaced, so its hooks would never run again. PEFT's base layer stays a module and keeps them."""
    model = nn.ModuleDict({"m": hooked(register)})
    with pytest.raises(TypeError, match=f"target 'm' has {what}.*register it after apply_lora"):
        match_targets(model, LoRAConfig(target_modules=["m"]))


def test_a_target_with_a_forward_of_its_own_is_refused():
    model = nn.ModuleDict({"m": nn.Linear(4, 4)})
    model["m"].forward = lambda x: x
    with pytest.raises(
        TypeError, match=r"'m' has a forward set on the instance,.*it may dequantize"
    ):
        match_targets(model, LoRAConfig(target_modules=["m"]))
    hooks = pytest.importorskip("accelerate.hooks")
    del model["m"].forward
    hooks.add_hook_to_module(model["m"], hooks.AlignDevicesHook("cpu"))
    with pytest.raises(
        TypeError, match=r"on the instance by accelerate's AlignDevicesHook.*remove_hook"
    ):
        match_targets(model, LoRAConfig(target_modules=["m"]))
    hooks.remove_hook_from_submodules(model)
    assert match_targets(model, LoRAConfig(target_modules=["m"])) == ["m"]


@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "fp8"])
@pytest.mark.parametrize("frozen", ["plain", "fp8"])
def test_a_weight_without_its_scales_gets_no_adapter(fp8, frozen):
    """e4m3 alone; and as compressed-tensors leaves it, whose forward reads the scale that lies beside the weight."""
    if fp8 is None and frozen == "fp8":
        pytest.skip("refused for other reasons")
    lora = LoRAConfig(target_modules=["m"], fp8=fp8)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        model = nn.ModuleDict({"n": nn.Linear(4, 4), "m": nn.Linear(4, 4)})
        weight = torch.ones(4, 4).to(dtype)
        model["m"].weight = nn.Parameter(weight, requires_grad=False)
        with pytest.raises(TypeError, match=rf"m\.weight must be plain.*found {dtype} without"):
            apply_lora(model, lora, frozen=frozen)
        assert type(model["m"]) is nn.Linear and model["n"].weight.requires_grad
    model["m"] = nn.Linear(4, 4)
    model["m"].register_buffer("weight_scale", torch.ones(4, 1))
    model["m"].forward = lambda x: x
    with pytest.raises(
        TypeError, match=r"'m' is quantized, with weight_scale.*dequantize the model"
    ):
        apply_lora(model, lora, frozen=frozen)


def mamba() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=8, state_size=2, num_hidden_layers=1, vocab_size=9)
    )


@pytest.mark.parametrize("name", ["out_proj", "dt_proj", "x_proj"])
def test_layers_of_mamba_whose_weight_is_read_are_refused(name):
    with pytest.raises(
        ValueError,
        match=rf"mixer\.{name}'.*MambaMixer reads the weight.*exclude_modules=\['mixer\.dt_proj'",
    ):
        match_targets(mamba(), LoRAConfig(target_modules=[name]))


def test_what_peft_refuses_of_mamba_is_refused_and_the_rest_trains():
    model = mamba()
    for targets in ("all-linear", ["out_proj"]):
        with pytest.raises(ValueError, match="is incompatible with Mamba"):
            peft_targets(mamba(), {"target_modules": targets})
        with pytest.raises(ValueError, match="reads the weight"):
            match_targets(nn.Sequential(model), LoRAConfig(target_modules=targets))
    config = LoRAConfig(
        target_modules="all-linear", exclude_modules=["out_proj", "dt_proj", "x_proj"]
    )
    lora = apply_lora(model, replace(config, fp8=None)).adapted()
    assert [row.name for row in lora] == ["backbone.layers.0.mixer.in_proj"]
    model(torch.arange(5)[None]).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
def test_t5_casts_to_the_dtype_of_wo(feed_forward):
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=9, decoder_start_token_id=0, feed_forward_proj=feed_forward, **sizes
        )
    )
    config, ids = LoRAConfig(target_modules="all-linear"), torch.arange(5)[None]
    with pytest.raises(
        ValueError,
        match=r"wo'.*T5Dense.*works in the dtype of the weight of 'wo'.*\['DenseReluDense.wo'\], or use fp8",
    ):
        match_targets(model, config)
    assert any(path.endswith("wo") for path in match_targets(model, replace(config, fp8=None)))
    apply_lora(model, replace(config, exclude_modules=["wo"]))
    model(input_ids=ids, labels=ids).loss.backward()


def test_an_input_in_fp8_names_its_cause():
    x = torch.zeros(1, 16, dtype=torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"found torch.float8_e4m3fn; is it cast to an FP8 layer's"):
        LoRALinear(16, 16)(x)


def test_paths_are_matched_without_the_names_of_wrappers():
    wrap = pytest.importorskip(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    ).checkpoint_wrapper
    model = Model()
    model.layers[1] = wrap(model.layers[1])
    model.layers[2].attn = torch.compile(model.layers[2].attn)
    config = LoRAConfig(
        target_modules=["layers.1.attn.v", r"layers.2.attn.v"], rank_pattern={"^layers.1.attn.v": 3}
    )
    found = match_targets(model, config)
    assert found == ["layers.1._checkpoint_wrapped_module.attn.v", "layers.2.attn._orig_mod.v"]
    assert [config.rank_for(path) for path in found] == [3, 8]
    assert match_targets(model, LoRAConfig(target_modules=r"layers\.\d\.attn\.v"))[1:] == found
    without = replace(config, exclude_modules=["layers.1.attn.v"])
    assert match_targets(model, without) == found[1:]
    saved = LoRAConfig(modules_to_save=["layers.2.attn.v"])
    assert match_saved(model, saved) == found[1:]


def test_a_compiled_linear_is_not_replaced_behind_its_wrapper():
    model = nn.ModuleDict({"m": torch.compile(nn.Linear(4, 4))})
    with pytest.raises(TypeError, match="target 'm' is a OptimizedModule"):
        match_targets(model, LoRAConfig(target_modules=["m"]))
