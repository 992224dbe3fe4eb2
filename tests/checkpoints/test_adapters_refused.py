# SPDX-License-Identifier: Apache-2.0
"""Adapter files that are of other maths, damaged or for another model: refused, and nothing is half read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lorakernels import LoRAConfig, apply_lora, disable_lora, merge_lora
from lorakernels.checkpoints.adapters.files import load_adapter, save_adapter
from tests.adapter_files import CONFIG, WEIGHTS, Model, adapted, tensor_bytes

REFUSED = [
    ({"use_dora": True}, r"4 missing:\n.*lora_magnitude_vector"),
    ({"alora_invocation_tokens": [5]}, r"alora_invocation_tokens=\[5\]"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"lora_bias": True}, "lora_bias"),
    ({"target_parameters": ["w"]}, "target_parameters: no parameter ends with 'w'"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"use_qalora": True}, "use_qalora"),
    ({"use_bdlora": {"x": 1}}, "use_bdlora"),
    ({"kasa_config": {"x": 1}}, "kasa_config"),
    ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4'.*changed the base weights"),
    ({"init_lora_weights": "PiSSA"}, "'PiSSA'.*changed the base weights"),
    ({"init_lora_weights": "corda"}, "'corda'.*changed the base weights"),
    ({"init_lora_weights": "olora"}, "'olora'.*changed the base weights"),
    ({"init_lora_weights": "loftq"}, "'loftq'.*changed the base weights"),
    ({"peft_type": "IA3"}, "peft_type must be 'LORA', got 'IA3'"),
    ({"peft_type": None}, "peft_type must be 'LORA', got None"),
    ({"r": None}, "r must be set, got null"),
    ({"r": "8"}, "LoRAConfig.r must be an int, got '8'"),
    ({"r": 0}, "LoRAConfig.r must be at least 1"),
    ({"target_modules": ["nothing"]}, "does not fit this model.*matches no module"),
    ({"lora_alpha": 8, "modules_to_save": ["nope"]}, "no module ends with 'nope'"),
]
ACCEPTED = [
    {"init_lora_weights": "eva"},
    {"init_lora_weights": "orthogonal"},
    {"later_field": {}},
    {"rank_pattern": None, "alpha_pattern": None},
]


def edit_config(folder: Path, change: dict) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | change))


def state_of(model: nn.Module) -> dict:
    return {
        name: (type(module), module.training, sorted(module.__dict__))
        for name, module in model.named_modules()
    } | {name: (p.data_ptr(), p.clone(), p.requires_grad) for name, p in model.named_parameters()}


def assert_refused(model: nn.Module, folder: Path, message: str, error=ValueError) -> None:
    before = state_of(model)
    with pytest.raises(error, match=rf"(?s){message}") as raised:
        load_adapter(model, folder)
    assert str(folder) in str(raised.value)
    after = state_of(model)
    assert before.keys() == after.keys()
    for name, (first, *rest) in before.items():
        assert after[name][0] == first and str(after[name][1:]) == str(tuple(rest)), name


@pytest.mark.parametrize("change, message", REFUSED, ids=lambda value: str(value)[:40])
def test_other_maths_is_refused_by_name(change, message, tmp_path):
    base = Model()
    save_adapter(adapted(base), tmp_path)
    edit_config(tmp_path, change)
    assert_refused(base, tmp_path, message)


@pytest.mark.parametrize("change", ACCEPTED, ids=str)
def test_what_does_not_matter_is_read(change, tmp_path):
    base = Model()
    save_adapter(adapted(base), tmp_path)
    edit_config(tmp_path, change)
    load_adapter(base, tmp_path)


def damage(folder: Path, what: str) -> None:
    weights, config = folder / WEIGHTS, folder / CONFIG
    data, tensors = weights.read_bytes(), load_file(weights)
    first = next(iter(tensors))
    writes = {
        "truncated": lambda: weights.write_bytes(data[: len(data) - 9]),
        "cut in the header": lambda: weights.write_bytes(data[:40]),
        "empty": lambda: weights.write_bytes(b""),
        "header length": lambda: weights.write_bytes(b"\xff" * 8 + data[8:]),
        "header text": lambda: weights.write_bytes(data[:8] + b"\x00" * 50 + data[58:]),
        "a pickle": lambda: weights.write_bytes(b"\x80\x04."),
        "no weights": weights.unlink,
        "only a .bin": lambda: weights.rename(folder / "adapter_model.bin"),
        "no config": config.unlink,
        "config cut": lambda: config.write_text(config.read_text()[:-20]),
        "config no object": lambda: config.write_text("[1]"),
        "config no text": lambda: config.write_bytes(b"\xff\xfe\x00"),
        "a key less": lambda: save_file({k: v for k, v in tensors.items() if k != first}, weights),
        "a key more": lambda: save_file(tensors | {"base_model.model.z": torch.ones(1)}, weights),
        "a shape": lambda: save_file(tensors | {first: torch.ones(3, 13)}, weights),
        "turned round": lambda: save_file(
            tensors | {first: tensors[first].t().contiguous()}, weights
        ),
        "a dtype": lambda: save_file(
            tensors | {first: tensors[first].to(torch.float8_e4m3fn)}, weights
        ),
    }
    writes[what]()


DAMAGED = {
    "truncated": "not a whole safetensors file",
    "cut in the header": "not a whole safetensors file",
    "empty": "not a whole safetensors file",
    "header length": "not a whole safetensors file",
    "header text": "not a whole safetensors file",
    "a pickle": "not a whole safetensors file",
    "no weights": "has no adapter_model.safetensors",
    "only a .bin": "adapter_model.bin is a pickle, which is not read",
    "no config": "has no adapter_config.json",
    "config cut": "adapter_config.json",
    "config no object": "expected a JSON object, found list",
    "config no text": "adapter_config.json",
    "a key less": "does not fit this model:.*1 missing:.*lora_A.weight",
    "a key more": "1 unexpected:.*base_model.model.z",
    "a shape": r"1 of another shape:.*: \(3, 13\), expected \(3, 12\)",
    "turned round": r"1 of another shape:.*: \(12, 3\), expected \(3, 12\)",
    "a dtype": "1 not float32, bfloat16 or float16:.*float8_e4m3fn",
}


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("fresh", [True, False], ids=["plain model", "adapted model"])
def test_damaged_files_change_nothing(what, fresh, tmp_path):
    base = Model()
    save_adapter(adapted(base), tmp_path)
    damage(tmp_path, what)
    error = (
        FileNotFoundError if "has no" in DAMAGED[what] or "pickle," in DAMAGED[what] else ValueError
    )
    assert_refused(base if fresh else adapted(base), tmp_path, DAMAGED[what], error)


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_value_that_is_not_finite_is_named_in_every_tensor_of_an_adapter(dtype, value, tmp_path):
    config = LoRAConfig(r=2, target_modules=["q"], use_dora=True, fp8=None)
    model = Model()
    apply_lora(model, config)
    save_adapter(model, tmp_path)
    tensors = {key: t.to(dtype) for key, t in load_file(tmp_path / WEIGHTS).items()}
    ends = {key.partition("layers.0.q.")[2] for key in tensors} - {""}
    assert ends == {"lora_A.weight", "lora_B.weight", "lora_magnitude_vector"}
    for end in ends:
        key = f"base_model.model.layers.0.q.{end}"
        broken = tensors[key].clone()
        broken.view(-1)[-1] = value
        save_file(tensors | {key: broken}, tmp_path / WEIGHTS)
        assert_refused(model, tmp_path, f"1 with inf or NaN:\n *{key}$")


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"use_dora": True},
            r"use_dora=True and bias='none':\n.*4 missing:.*lora_magnitude_vector",
        ),
        ({"bias": "lora_only"}, r"use_dora=False and bias='lora_only':\n.* missing:.*layer\.bias"),
        ({"bias": "all"}, r"use_dora=False and bias='all':\n.* missing:.*\.bias"),
    ],
    ids=["DoRA", "biases of layers", "all biases"],
)
def test_a_file_without_what_its_config_says_is_refused(change, message, tmp_path):
    """Also over an adapter that has no such tensors, which reads none of them."""
    model = adapted(Model())
    save_adapter(model, tmp_path)
    edit_config(tmp_path, change)
    assert_refused(model, tmp_path, "has not what its config says, " + message)


@pytest.mark.parametrize(
    "model, message",
    [
        (lambda: nn.Sequential(nn.Linear(3, 3)), "does not fit this model.*matches no module"),
        (lambda: Model(width=9), "does not fit this model.*head.weight: .7, 12., expected .9, 12."),
        (lambda: nn.Sequential(Model()), "10 missing.*10 unexpected"),
        (lambda: Model().to("meta"), "layers.0.q.weight is on the meta device"),
        (lambda: adapted(Model(), "scaled"), "layers.0.v has scaling 2, the file's is 1"),
        (lambda: adapted(Model(), "plain"), "4 missing:.*6 unexpected:.*4 of another shape"),
    ],
    ids=["other names", "other width", "one level down", "meta", "other scaling", "other targets"],
)
def test_adapter_for_another_model(model, message, tmp_path):
    save_adapter(adapted(Model(), "saved modules"), tmp_path)
    assert_refused(model(), tmp_path, message)


def test_merged_and_disabled_models_say_so(tmp_path):
    model = adapted(Model())
    save_adapter(model, tmp_path)
    merge_lora(model)
    assert_refused(model, tmp_path, r"layers.0.q is merged \(and 3 more\): call unmerge_lora first")
    before = tensor_bytes(tmp_path)
    save_adapter(model, tmp_path)  # a merged model still has its adapter
    assert tensor_bytes(tmp_path) == before
    with disable_lora(model), pytest.raises(ValueError, match="leave disable_lora first"):
        save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="Model has no LoRALinear"):
        save_adapter(Model(), tmp_path)
