# SPDX-License-Identifier: Apache-2.0
"""LoRAConfig and DelayedScaling: what they refuse and normalise, and PEFT's pattern rules."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
import sys
import types

import pytest
import torch

from lorakernels.config import LoRAConfig, clean_path
from lorakernels.recipes import DelayedScaling, MMParams

BAD_LORA = [
    ("r", 0, ValueError, "at least 1, got 0"),
    ("r", -4, ValueError, "got -4"),
    ("r", True, TypeError, "an int, got True"),
    ("r", 8.0, TypeError, "an int, got 8.0"),
    ("r", "8", TypeError, "an int, got '8'"),
    ("lora_alpha", 0, ValueError, "greater than 0, got 0"),
    ("lora_alpha", float("nan"), ValueError, "finite, got nan"),
    ("lora_alpha", float("inf"), ValueError, "finite, got inf"),
    ("lora_alpha", True, TypeError, "a number, got True"),
    ("lora_dropout", 1.0, ValueError, r"in \[0, 1\), got 1.0"),
    ("lora_dropout", -0.1, ValueError, r"in \[0, 1\), got -0.1"),
    ("lora_dropout", float("nan"), ValueError, "got nan"),
    ("lora_dropout", "0.1", TypeError, "a number, got '0.1'"),
    ("target_modules", 3, TypeError, "a string or a list of strings, got 3"),
    ("target_modules", ["q_proj", 3], TypeError, "strings only, got 3"),
    ("target_modules", "layers.(", ValueError, r"'layers.\(' is not a valid regular expression"),
    ("target_modules", ["all-linear", "lm_head"], ValueError, "'all-linear' inside the list"),
    ("target_modules", ["All-Linear"], ValueError, "the string 'all-linear' or a list of module"),
    ("exclude_modules", "[", ValueError, "not a valid regular expression"),
    ("layers_to_transform", "0", TypeError, "an int or a list of ints, got '0'"),
    ("layers_to_transform", [0, True], TypeError, "an int, got True"),
    ("layers_to_transform", -1, ValueError, "at least 0, got -1"),
    ("layers_pattern", "layers", ValueError, "needs layers_to_transform"),
    ("rank_pattern", {"q_proj": 0}, ValueError, r"\['q_proj'\] must be at least 1"),
    ("rank_pattern", {"(": 4}, ValueError, "not a valid regular expression"),
    ("rank_pattern", {3: 4}, TypeError, "string keys, got 3"),
    ("rank_pattern", [("q", 4)], TypeError, "a dict"),
    ("alpha_pattern", {"q": None}, TypeError, r"\['q'\] must be a number, got None"),
    ("modules_to_save", "lm_head", TypeError, "a list of names, got the string 'lm_head'"),
    ("modules_to_save", [""], ValueError, "would match every module"),
    ("use_rslora", 1, TypeError, "True or False, got 1"),
    ("use_dora", "yes", TypeError, "True or False, got 'yes'"),
    ("bias", "some", ValueError, "'none' or 'all' or 'lora_only', got 'some'"),
    (
        "init_lora_weights",
        "pissa_niter_",
        ValueError,
        "True, False, .*'pissa_niter_N'.*, got 'pissa_niter_'",
    ),
    ("init_lora_weights", 1, ValueError, "got 1"),
    ("fp8", True, TypeError, "a DelayedScaling, a BlockScaling or None .*got True"),
]
BAD_RECIPE = [
    ("margin", 0.5, TypeError, "an int, got 0.5"),
    ("fp8_format", "E5M2", ValueError, "'HYBRID' or 'E4M3', got 'E5M2'"),
    ("amax_history_len", 0, ValueError, "at least 1, got 0"),
    ("amax_compute_algo", "mean", ValueError, "'max' or 'most_recent', got 'mean'"),
    ("reduce_amax", None, TypeError, "True or False, got None"),
]


@pytest.mark.parametrize("field, value, error, message", BAD_LORA)
def test_lora_config_refuses(field, value, error, message):
    with pytest.raises(error, match=rf"LoRAConfig\.{field}.*{message}"):
        LoRAConfig(**{field: value})


@pytest.mark.parametrize("field, value, error, message", BAD_RECIPE)
def test_delayed_scaling_refuses(field, value, error, message):
    with pytest.raises(error, match=rf"DelayedScaling\.{field}.*{message}"):
        DelayedScaling(**{field: value})


@pytest.mark.parametrize("field, value", [("layers_to_transform", 1), ("layers_pattern", "h")])
def test_layers_need_a_list_of_targets(field, value):
    with pytest.raises(ValueError, match=rf"LoRAConfig\.{field}.*got the string 'q'"):
        LoRAConfig(target_modules="q", **{field: value})


@pytest.mark.parametrize(
    "names",
    [["b", "a", "b"], ("b", "a"), {"a", "b"}, frozenset("ab")],
    ids=lambda names: type(names).__name__,
)
def test_any_collection_of_names(names):
    config = LoRAConfig(target_modules=names, modules_to_save=names)
    assert sorted(config.target_modules) == sorted(config.modules_to_save) == ["a", "b"]


def test_formats():
    hybrid, e4m3 = DelayedScaling(), DelayedScaling(fp8_format="E4M3")
    assert (hybrid.forward_dtype, hybrid.backward_dtype) == (torch.float8_e4m3fn, torch.float8_e5m2)
    assert (hybrid.fp8_max_forward, hybrid.fp8_max_backward) == (448.0, 57344.0)
    assert (e4m3.backward_dtype, e4m3.fp8_max_backward) == (torch.float8_e4m3fn, 448.0)


def te_recipe(kind="DelayedScaling", **changes):
    """What from_te reads of Transformer Engine 2.12's recipe."""
    values = {
        "margin": 0,
        "fp8_format": TEFormat.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
    }
    return type(kind, (types.SimpleNamespace,), {})(**(values | changes))


class TEFormat(enum.Enum):
    E4M3 = (448, 448)
    E5M2 = (57344, 57344)
    HYBRID = (448, 57344)


def test_from_te_takes_every_field():
    assert DelayedScaling.from_te(te_recipe()) == DelayedScaling()
    changes = {
        "margin": 2,
        "amax_history_len": 31,
        "amax_compute_algo": "most_recent",
        "reduce_amax": False,
    }
    found = DelayedScaling.from_te(te_recipe(fp8_format=TEFormat.E4M3, **changes))
    assert found == DelayedScaling(fp8_format="E4M3", **changes)
    split = types.SimpleNamespace(use_split_accumulator=True)
    found = DelayedScaling.from_te(te_recipe(fp8_gemm_fprop=split))
    assert found == DelayedScaling(fp8_gemm_fprop=MMParams(True))
    older = te_recipe(override_linear_precision=(False, False, False))
    assert DelayedScaling.from_te(older) == DelayedScaling()


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("fp8_format", TEFormat.E5M2, "'HYBRID' or 'E4M3', got 'E5M2'"),
        ("amax_compute_algo", max, "'max' or 'most_recent', got <built-in function max>"),
        ("scaling_factor_compute_algo", max, "None, got <built-in function max>"),
        ("fp8_dpa", True, "False, got True"),
        ("fp8_mha", True, "False, got True"),
        ("override_linear_precision", (False, True, False), r"\(False, False, False\), got"),
        ("amax_history_len", 0, "at least 1, got 0"),
    ],
)
def test_from_te_refuses(field, value, message):
    with pytest.raises(ValueError, match=rf"DelayedScaling\.{field} must be {message}"):
        DelayedScaling.from_te(te_recipe(**{field: value}))


@pytest.mark.parametrize("kind", ["MXFP8BlockScaling", "Float8CurrentScaling"])
def test_from_te_refuses_another_kind_of_recipe(kind):
    recipe = te_recipe(kind)
    del recipe.amax_history_len
    with pytest.raises(TypeError, match=rf"DelayedScaling object, got {kind}"):
        DelayedScaling.from_te(recipe)
    with pytest.raises(TypeError, match="got DelayedScaling"):  # the class, not a recipe
        DelayedScaling.from_te(DelayedScaling)


def test_to_te_says_the_same(monkeypatch):
    common = types.ModuleType("transformer_engine.common")
    common.recipe = types.SimpleNamespace(Format=TEFormat, DelayedScaling=te_recipe)
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.common", common)
    ours = DelayedScaling(2, "E4M3", 31, "most_recent", False)
    assert ours.to_te().fp8_format is TEFormat.E4M3
    assert DelayedScaling.from_te(ours.to_te()) == ours


def test_copies_are_equal_and_own_their_dicts():
    ranks = {"q_proj": 4}
    config = LoRAConfig(target_modules=["q_proj"], rank_pattern=ranks, layers_to_transform=range(2))
    ranks["q_proj"] = 99
    assert config.rank_for("model.q_proj") == 4
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert dataclasses.replace(config, r=3).layers_to_transform == (0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.r = 3


PATTERNS = {
    "layers.0.q_proj": 3,
    r"^model.layers.\d+.k_proj": 5,
    "q_proj": 16,
    "k_proj": 32,
    "v": 64,
}


@pytest.mark.parametrize(
    "path, r",
    [
        ("model.layers.0.q_proj", 3),  # a longer tail listed first wins
        ("model.layers.1.q_proj", 16),
        ("model.layers.7.k_proj", 5),  # an anchored expression
        ("text.model.layers.7.k_proj", 32),  # ^ does not hold there
        ("model.layers.0.xv", 8),  # no dot before the tail
        ("v", 64),
    ],
)
@pytest.mark.parametrize("use_rslora", [False, True], ids=["lora", "rslora"])
def test_patterns_like_peft(path, r, use_rslora):
    other = pytest.importorskip("peft.utils.other")
    alphas = {key: 2 * rank + 1 for key, rank in PATTERNS.items()}
    config = LoRAConfig(rank_pattern=PATTERNS, alpha_pattern=alphas, use_rslora=use_rslora)
    alpha = 2 * r + 1 if r != 8 else 8
    assert PATTERNS.get(other.get_pattern_key(PATTERNS.keys(), path), 8) == r
    assert (config.rank_for(path), config.alpha_for(path)) == (r, alpha)
    assert config.scaling_for(path) == (alpha / r**0.5 if use_rslora else alpha / r)


KEYS = {"q|v": 4, "tower._orig_mod_.k": 5, "a+b": 6, "my_orig_mod.q2": 7}


@pytest.mark.parametrize(
    "path, r",
    [
        ("model.q", 4),
        ("model.q_norm", 8),  # the alternatives are in brackets: neither is a prefix
        ("model.norm_v", 8),
        ("a+b", 6),  # the path itself, which it does not match as an expression
        ("x.a+b", 8),
        ("my_orig_mod.q2", 7),  # what only ends like a wrapper is a name
        ("tower._orig_mod_.k", 5),
    ],
)
def test_keys_that_are_not_plain_names_like_peft(path, r):
    other = pytest.importorskip("peft.utils.other")
    assert KEYS.get(other.get_pattern_key(KEYS.keys(), path), 8) == r
    assert LoRAConfig(rank_pattern=KEYS).rank_for(path) == r


def test_an_expression_that_matches_comes_before_the_path_itself():
    other = pytest.importorskip("peft.utils.other")
    keys = {"a+b": 6, "a.*": 5}
    assert keys[other.get_pattern_key(keys.keys(), "a+b")] == 5
    assert LoRAConfig(alpha_pattern=keys).alpha_for("a+b") == 5


@pytest.mark.parametrize(
    "path, clean",
    [
        ("_orig_mod.layers.0._checkpoint_wrapped_module.q", "layers.0.q"),
        ("layers.0._orig_mod", "layers.0"),
        ("_fsdp_wrapped_module._orig_mod.q", "q"),
        ("layers.x_orig_mod.q", "layers.x_orig_mod.q"),
        ("_orig_mod_.q", "_orig_mod_.q"),
    ],
)
def test_names_of_wrappers_are_no_part_of_a_path(path, clean):
    assert clean_path(path) == clean


def test_gemms_add_up_as_te_s_do_unless_asked_otherwise() -> None:
    recipe = DelayedScaling()
    assert not recipe.fp8_gemm_fprop.use_split_accumulator
    assert recipe.fp8_gemm_dgrad.use_split_accumulator
    with pytest.raises(
        ValueError, match=r"DelayedScaling\.fp8_gemm_dgrad must be an MMParams, got True"
    ):
        DelayedScaling(fp8_gemm_dgrad=True)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"MMParams\.use_split_accumulator must be True or False, got 1"
    ):
        MMParams(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fp8_gemm_fprop"):
        DelayedScaling(fp8_gemm_fprop=MMParams(True)).to_te()
