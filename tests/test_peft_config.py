# SPDX-License-Identifier: Apache-2.0
"""PEFT's own LoraConfig is taken or refused by name, and what PEFT does not take of ours says what to do."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lorakernels
from lorakernels import (
    BlockScaling,
    DelayedScaling,
    LoRAConfig,
    apply_lora,
    load_adapter,
    save_adapter,
)
from tests.adapter_files import CONFIG, Model

peft = pytest.importorskip("peft")
from lorakernels.integrations.peft import register  # noqa: E402

EVERY = {
    "r": 3,
    "lora_alpha": 5,
    "target_modules": ["q", "v"],
    "exclude_modules": ["layers.1.v"],
    "layers_to_transform": [0, 1],
    "layers_pattern": "layers",
    "rank_pattern": {"v": 2},
    "alpha_pattern": {"q": 7},
    "modules_to_save": ["head"],
    "use_rslora": True,
    "bias": "all",
    "lora_dropout": 0.25,
    "init_lora_weights": "gaussian",
    "task_type": "FEATURE_EXTRACTION",
}


def test_every_field_of_both_is_taken(tmp_path: Path) -> None:
    """The same parameters train, of the same shapes, and the file says what PEFT's does."""
    models = {"ours": Model(), "theirs": Model()}
    report = apply_lora(models["ours"], peft.LoraConfig(**EVERY))
    assert report.config == LoRAConfig(**EVERY) == LoRAConfig.from_peft(peft.LoraConfig(**EVERY))
    assert report.config.fp8 == DelayedScaling()
    wrapped = peft.get_peft_model(models["theirs"], peft.LoraConfig(**EVERY))
    save_adapter(models["ours"], tmp_path / "ours")
    wrapped.save_pretrained(tmp_path / "theirs")
    ours, theirs = (json.loads((tmp_path / k / CONFIG).read_text()) for k in models)
    for name in (*EVERY, "auto_mapping"):
        values = [sorted(v) if isinstance(v, list) else v for v in (ours[name], theirs[name])]
        assert values[0] == values[1], name
    again = Model()
    assert load_adapter(again, tmp_path / "ours").config.task_type == "FEATURE_EXTRACTION"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_bias": True}, r"lora_bias=True is not supported: a bias on lora_B. Expected False"),
        ({"trainable_token_indices": [1]}, "trainable rows of an embedding.*register"),
        ({"layer_replication": [(0, 1)]}, "replicated layers"),
        ({"use_qalora": True}, "QALoRA"),
        ({"qalora_group_size": 8}, "qalora_group_size=8 .*no such field"),
        ({"ensure_weight_tying": True}, "tied across layers"),
        ({"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"}, "aLoRA"),
        ({"megatron_config": {"x": 1}}, "Megatron"),
        ({"fan_in_fan_out": True}, r"stored \[K, N\]"),
        ({"inference_mode": True}, "is_trainable=False"),
        ({"init_lora_weights": "eva"}, "init_lora_weights must be .* got 'eva'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights must be .* got 'corda'"),
        ({"init_lora_weights": "orthogonal"}, "init_lora_weights must be .* got 'orthogonal'"),
        ({"lora_dropout": 1.0}, r"lora_dropout must be in \[0, 1\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.filterwarnings("ignore:.*(eva|corda|CorDA|EVA)")
def test_fields_that_ours_lacks_are_refused_by_name(change: Any, message: str) -> None:
    model = Model()
    with pytest.raises(ValueError, match=message):
        apply_lora(model, peft.LoraConfig(**{"target_modules": ["q"]} | change))
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    "config",
    [{"r": 8}, None, peft.LoraConfig, peft.IA3Config(), peft.AdaLoraConfig(total_step=9)],
    ids=["dict", "None", "a class", "IA3", "AdaLoRA"],
)
def test_other_configs_are_refused(config: Any) -> None:
    with pytest.raises(TypeError, match=r"config must be a LoRAConfig or a peft.LoraConfig, found"):
        apply_lora(Model(), config)


def test_a_registered_config_is_get_peft_models() -> None:
    with pytest.raises(ValueError, match="given to `register`, which is for get_peft_model"):
        apply_lora(Model(), register(peft.LoraConfig(target_modules=["q"])))


def test_another_recipe_is_given_beside_it() -> None:
    config = LoRAConfig.from_peft(peft.LoraConfig(target_modules=["q"]), fp8=BlockScaling())
    assert config.fp8 == BlockScaling()


def test_peft_says_what_to_do_with_a_config_of_ours() -> None:
    with pytest.raises(TypeError, match=r"apply_lora\(model, config\), or .*register\(peft"):
        peft.get_peft_model(Model(), LoRAConfig(target_modules=["q"]))


@pytest.mark.parametrize("given", ["CAUSAL_LM", peft.TaskType.CAUSAL_LM], ids=["str", "enum"])
def test_task_type_is_kept_as_a_string(given: Any) -> None:
    assert type(LoRAConfig(task_type=given).task_type) is str
    assert LoRAConfig(task_type=given) == LoRAConfig(task_type="CAUSAL_LM")


def test_task_type_is_one_of_peft_s() -> None:
    with pytest.raises(ValueError, match=r"task_type must be None or one of .*, got 'CHAT'"):
        LoRAConfig(task_type="CHAT")


def test_layers_of_two_task_types_say_which_one_is_saved(tmp_path: Path) -> None:
    model = Model()
    for layer, task in zip(model.layers, ("CAUSAL_LM", "SEQ_CLS"), strict=True):
        apply_lora(layer, LoRAConfig(target_modules=["q"], fp8=None, task_type=task))
    with pytest.warns(UserWarning, match=r"differ in task_type: \['CAUSAL_LM', 'SEQ_CLS'\]"):
        save_adapter(model, tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["task_type"] == "CAUSAL_LM"
    save_adapter(nn.Sequential(model.layers[1]), tmp_path, task_type="TOKEN_CLS")
    assert json.loads((tmp_path / CONFIG).read_text())["task_type"] == "TOKEN_CLS"


def test_an_import_says_the_right_name() -> None:
    with pytest.raises(ImportError, match="no attribute 'LoraConfig': here it is LoRAConfig"):
        from lorakernels import LoraConfig  # noqa: F401
    with pytest.raises(AttributeError, match="here it is LoRAConfig"):
        lorakernels.LoraConfig  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from lorakernels import Nothing  # noqa: F401
    assert not hasattr(lorakernels, "LoraConfig") and not hasattr(lorakernels, "Nothing")


@pytest.mark.parametrize(
    ("task", "kind", "head"),
    [
        ("SEQ_CLS", "SequenceClassification", "score"),
        ("TOKEN_CLS", "TokenClassification", "score"),
        ("QUESTION_ANS", "QuestionAnswering", "qa_outputs"),
    ],
)
def test_the_head_of_a_task_trains_as_in_peft(
    task: str, kind: str, head: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    made = transformers.LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0)
    options = {"target_modules": ["q_proj"], "task_type": task}
    for config in (peft.LoraConfig(**options), LoRAConfig(**options)):
        model = getattr(transformers, f"LlamaFor{kind}")(made)
        theirs = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options))
        apply_lora(model, config)
        assert model.get_submodule(head).weight.requires_grad
        trained = theirs.get_nb_trainable_parameters()[0]
        assert model.get_nb_trainable_parameters()[0] == trained
        save_adapter(model, tmp_path / "ours")
        theirs.save_pretrained(tmp_path / "theirs")
        load_adapter(model, tmp_path / "theirs")
        again = peft.PeftModel.from_pretrained(theirs.unload(), tmp_path / "ours")
        assert type(again) is type(theirs)


def test_a_file_without_its_task_s_head_stays_without(tmp_path: Path) -> None:
    model = Model()
    apply_lora(model, LoRAConfig(target_modules=["q"], fp8=None))
    save_adapter(model, tmp_path, task_type="SEQ_CLS")
    model = Model()
    model.score = nn.Linear(2, 2)
    load_adapter(model, tmp_path)
    assert not model.score.weight.requires_grad
