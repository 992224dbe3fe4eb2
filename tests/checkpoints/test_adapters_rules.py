# SPDX-License-Identifier: Apache-2.0
"""What adapter_config.json says of layers that one config or several made: short, in any order, the same layers."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from lorakernels import LoRAConfig, LoRALinear, apply_lora
from lorakernels.checkpoints.adapters.files import load_adapter, save_adapter
from lorakernels.config import matching
from lorakernels.modules import lora_modules
from tests.adapter_files import (
    CONFIG,
    Model,
    assert_same_outputs,
    peft_load,
    randomize,
    tensor_bytes,
)

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 20}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


def config_of(folder) -> dict:
    return json.loads((folder / CONFIG).read_text())


def saved(model: nn.Module, folder, **options) -> dict:
    save_adapter(model, folder, **options)
    return config_of(folder)


@pytest.mark.parametrize("field, r, alpha", [("alpha_pattern", 4, 3), ("rank_pattern", 3, 8)])
@pytest.mark.parametrize("specific_first", [True, False], ids=["specific first", "general first"])
def test_patterns_keep_their_meaning_when_their_keys_are_sorted(
    field, r, alpha, specific_first, tmp_path
):
    keys = {"layers.0.q": 3, "q": 5} if specific_first else {"q": 5, "layers.0.q": 3}
    base = Model()
    model = copy.deepcopy(base)
    config = {"target_modules": ["q", "v"], "r": 4, "lora_alpha": 8, field: keys}
    apply_lora(model, LoRAConfig(**config, fp8=None))
    randomize(model)
    first = lora_modules(model)["layers.0.q"]
    assert (first.r, first.lora_alpha) == (
        (r, alpha) if specific_first else ((5, 8) if field == "rank_pattern" else (4, 5))
    )
    found = saved(model, tmp_path / "ours")
    found[field] = dict(sorted(found[field].items(), reverse=True))
    for _ in range(2):  # as saved with its keys turned round, then as PEFT sorts them
        (tmp_path / "ours" / CONFIG).write_text(json.dumps(found))
        again = copy.deepcopy(base)
        load_adapter(again, tmp_path / "ours", fp8=None)
        assert_same_outputs(model, again, fp8=True)
        assert_same_outputs(model, peft_load(base, tmp_path / "ours"))
        found[field] = dict(sorted(found[field].items()))


def test_patterns_that_no_order_changes_are_written_as_given(tmp_path):
    model = Model()
    patterns = {
        "rank_pattern": {"v": 2, r"^layers\.1\.q": 5, "nothing": 7},
        "alpha_pattern": {"q": 4.0, "1.v": 2.5},
    }
    apply_lora(model, LoRAConfig(target_modules=["q", "v"], lora_alpha=16.0, **patterns, fp8=None))
    found = saved(model, tmp_path)
    used = {"v": 2, r"^layers\.1\.q": 5}  # PEFT warns of "nothing"
    assert list(found["rank_pattern"].items()) == list(used.items())
    assert found["alpha_pattern"] == {"q": 4, "1.v": 2.5}
    assert [type(x) for x in (found["lora_alpha"], found["alpha_pattern"]["q"])] == [int, int]


def test_a_scaling_changed_by_hand_is_saved(tmp_path):
    base = Model()
    model = copy.deepcopy(base)
    apply_lora(model, LoRAConfig(target_modules=["q", "v"], r=4, lora_alpha=8, fp8=None))
    randomize(model)
    model.layers[1].q.scaling = 0.75
    found = saved(model, tmp_path)
    assert (found["lora_alpha"], found["alpha_pattern"]) == (8, {r"^layers\.1\.q": 3})
    again = copy.deepcopy(base)
    load_adapter(again, tmp_path, fp8=None)
    assert_same_outputs(model, again, fp8=True)
    model.layers[1].q.scaling = 0.0
    before = tensor_bytes(tmp_path)
    with pytest.raises(
        ValueError, match=r"layers\.1\.q\.scaling must be .*greater than 0.*got 0\.0"
    ):
        save_adapter(model, tmp_path)
    assert tensor_bytes(tmp_path) == before


MIXED = {
    "rslora": ({"use_rslora": True}, {}),
    "rslora of other ranks": ({}, {"use_rslora": True, "r": 9}),
    "both rslora": ({"use_rslora": True, "r": 2}, {"use_rslora": True, "r": 3}),
    "biases": ({"bias": "none"}, {"bias": "lora_only"}),
    "all biases": ({"bias": "lora_only"}, {"bias": "all"}),
    "saved": ({}, {"modules_to_save": ["norm"]}),
    "saved in both": ({"modules_to_save": ["norm"]}, {"modules_to_save": ["norm", "v"]}),
    "dropout": ({"lora_dropout": 0.5}, {}),
    "ranks and alphas": ({"r": 2, "lora_alpha": 3}, {"r": 5, "lora_alpha": 7}),
}


@pytest.mark.parametrize("case", MIXED)
def test_layers_of_two_configs_are_one_adapter(case, tmp_path):
    base = Model().requires_grad_(False)
    model = copy.deepcopy(base)
    for layer, fields in zip(model.layers, MIXED[case], strict=True):
        apply_lora(layer, LoRAConfig(target_modules=["q"], fp8=None, **fields))
    randomize(model.eval())
    is_rslora = all(fields.get("use_rslora", False) for fields in MIXED[case])
    differs = {key for fields in MIXED[case] for key in fields} & {"bias", "lora_dropout"}
    if differs:
        with pytest.warns(UserWarning, match=f"layers differ in {differs.pop()}.* is saved"):
            save_adapter(model, tmp_path)
    else:
        save_adapter(model, tmp_path)
    assert config_of(tmp_path)["use_rslora"] == is_rslora
    again = copy.deepcopy(base).eval()
    load_adapter(again, tmp_path, fp8=None)
    assert_same_outputs(model, again, fp8=True)
    assert_same_outputs(model, peft_load(base.eval(), tmp_path))


def test_a_layer_whose_path_is_the_tail_of_another_s_keeps_its_own_values(tmp_path):
    def towers() -> nn.ModuleDict:
        inner = nn.ModuleDict({"layers": Model().layers, "head": nn.Linear(4, 4)})
        return nn.ModuleDict({"layers": Model().layers, "head": nn.Linear(4, 4), "tower": inner})

    values = {"layers.0.q": 2, "layers.1.q": 6, "head": 4, "tower.layers.1.q": 3, "tower.head": 5}
    model = towers()
    for path, r in values.items():
        config = LoRAConfig(target_modules=["m"], r=r, lora_alpha=10 * r + 1, fp8=None)
        held = nn.ModuleDict({"m": model.get_submodule(path)})
        apply_lora(held, config)
        model.set_submodule(path, held["m"])
    found = saved(model, tmp_path)
    for path, r in values.items():  # in whatever order the keys are read
        assert set(matching(found["rank_pattern"], path)) <= {r}
    again = towers()
    load_adapter(again, tmp_path, fp8=None)
    layers = lora_modules(again)
    assert {path: layer.r for path, layer in layers.items()} == values
    assert all(layer.scaling == (10 * layer.r + 1) / layer.r for layer in layers.values())


def test_saved_modules_that_no_name_tells_apart_are_refused(tmp_path):
    model = nn.ModuleDict(
        {"layers": Model().layers, "more": nn.ModuleDict({"layers": Model().layers})}
    )
    apply_lora(model["layers"][0], LoRAConfig(target_modules=["q"], modules_to_save=["norm"]))
    with pytest.raises(ValueError, match=r"no modules_to_save chooses exactly \['layers.0.norm'\]"):
        save_adapter(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_layer_adapted_inside_a_saved_module_is_refused(tmp_path):
    model = Model()
    apply_lora(model, LoRAConfig(target_modules=["layers.0.q"], modules_to_save=["layers.1"]))
    model.layers[1].q = LoRALinear.from_linear(model.layers[1].q, LoRAConfig())
    with pytest.raises(
        ValueError, match=r"'layers\.1'.*also inside a module with a saved one's name"
    ):
        save_adapter(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "targets, names",
    [
        ("all-linear", LINEAR),
        ([f"model.layers.{i}.self_attn.q_proj" for i in range(3)], ["q_proj"]),
        (["model.layers.1.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
        (r".*layers\.[12]\.mlp\.(up|down)_proj", r".*layers\.[12]\.mlp\.(up|down)_proj"),
        (["self_attn.q_proj", "down_proj"], ["self_attn.q_proj", "down_proj"]),
    ],
    ids=["all-linear", "paths of all layers", "one path", "regex", "names"],
)
def test_targets_are_written_short(targets, names, tmp_path):
    model = llama()
    report = apply_lora(model, LoRAConfig(r=2, target_modules=targets, fp8=None))
    found = saved(model, tmp_path)
    assert found["target_modules"] == names and found["task_type"] == "CAUSAL_LM"
    assert found["auto_mapping"] is None
    again = llama()
    same = load_adapter(again, tmp_path, fp8=None)
    assert [m.name for m in same.adapted()] == [m.name for m in report.adapted()]


def test_a_short_name_that_others_end_with_stays_a_path(tmp_path):
    """`layers` has a q that is no target: its targets are named whole, those of `tower` by what is theirs alone."""
    model = nn.ModuleDict({"layers": Model().layers, "tower": nn.ModuleList([nn.Linear(2, 2)])})
    config = LoRAConfig(
        target_modules=["layers.0.q", "layers.0.v", "layers.1.v", "tower.0"], fp8=None
    )
    apply_lora(model, config)
    assert saved(model, tmp_path)["target_modules"] == ["layers.0.q", "v", "tower.0"]


class CausalByName(Model):
    pass


CausalByName.__name__ = "TinyForCausalLM"


def test_task_type_is_pefts_and_of_models_it_takes(tmp_path):
    def adapted(model: nn.Module) -> nn.Module:
        apply_lora(model, LoRAConfig(target_modules=["q"], fp8=None))
        return model

    plain = saved(adapted(Model()), tmp_path / "plain")
    assert plain["task_type"] is None and plain["auto_mapping"]["base_model_class"] == "Model"
    # PEFT's class for CAUSAL_LM asks the model for prepare_inputs_for_generation, which this one lacks
    assert saved(adapted(CausalByName()), tmp_path / "name")["task_type"] is None
    given = saved(adapted(Model()), tmp_path / "given", task_type="SEQ_CLS")
    assert given["task_type"] == "SEQ_CLS" and given["auto_mapping"] is None
    with pytest.raises(ValueError, match=r"task_type must be None or one of \(.*got 'CAUSAL'"):
        save_adapter(adapted(Model()), tmp_path / "wrong", task_type="CAUSAL")
    assert not (tmp_path / "wrong").exists()


def test_peft_opens_a_causal_lm_as_one(tmp_path):
    peft = pytest.importorskip("peft")
    base = llama()
    model = copy.deepcopy(base)
    apply_lora(model, LoRAConfig(r=2, target_modules="all-linear", fp8=None))
    randomize(model)
    save_adapter(torch.compile(model), tmp_path)
    theirs = peft_load(base, tmp_path)
    assert isinstance(theirs, peft.PeftModelForCausalLM)
    ids = torch.arange(7)[None]
    # fp32: PEFT adds W x and the adapter in another order
    torch.testing.assert_close(theirs(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
