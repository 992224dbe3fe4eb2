# SPDX-License-Identifier: Apache-2.0
"""Adapter files: PEFT reads ours, we read PEFT's, nothing is half written."""

from __future__ import annotations

import copy
import json
import resource

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lorakernels import DelayedScaling, LoRAConfig, LoRALinear, apply_lora, disable_lora
from lorakernels.checkpoints.adapters.files import load_adapter, save_adapter
from tests.adapter_files import (
    CASES,
    CONFIG,
    WEIGHTS,
    Model,
    adapted,
    assert_same_outputs,
    peft_adapted,
    peft_load,
    tensor_bytes,
)
from tests.processes import on_ranks


@pytest.mark.parametrize("case", CASES)
def test_peft_reads_what_we_save(case, tmp_path):
    base = Model()
    ours = adapted(base, case)
    save_adapter(ours, tmp_path / "ours")
    theirs = peft_load(base, tmp_path / "ours")
    assert_same_outputs(ours, theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    assert tensor_bytes(tmp_path / "theirs") == tensor_bytes(tmp_path / "ours")


@pytest.mark.parametrize("case", CASES)
def test_we_read_what_peft_saves(case, tmp_path):
    base = Model()
    theirs = peft_adapted(base, **CASES[case])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = copy.deepcopy(base)
    load_adapter(ours, tmp_path / "theirs", fp8=None, is_trainable=False)
    assert not ours.training and not any(p.requires_grad for p in ours.parameters())
    assert_same_outputs(ours, theirs)
    save_adapter(ours, tmp_path / "ours")
    assert tensor_bytes(tmp_path / "ours") == tensor_bytes(tmp_path / "theirs")


@pytest.mark.parametrize("case", ["plain", "saved modules", "adapted biases"])
def test_fp8_base_saves_and_loads(case, tmp_path):
    base = Model()
    ours = adapted(base, case, fp8=DelayedScaling())
    save_adapter(ours, tmp_path)
    again = copy.deepcopy(base).eval()
    report = load_adapter(again, tmp_path)
    assert report.fp8_state is not None and report.trainable_parameters > 0
    assert_same_outputs(ours, again, fp8=True)


def test_files_are_pefts(tmp_path):
    save_adapter(
        adapted(Model()), tmp_path, base_model_name_or_path="org/base", task_type="CAUSAL_LM"
    )
    text = (tmp_path / CONFIG).read_text()
    config = json.loads(text)
    assert text == json.dumps(config, indent=2) and list(config) == sorted(config)
    assert config["base_model_name_or_path"] == "org/base" and config["task_type"] == "CAUSAL_LM"
    assert config["peft_type"] == "LORA" and config["inference_mode"] is True
    header = (tmp_path / WEIGHTS).read_bytes()
    assert b'"__metadata__":{"format":"pt"}' in header
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS]
    assert "base_model.model.layers.0.q.lora_A.weight" in load_file(tmp_path / WEIGHTS)


def test_bf16_file_stays_bf16_when_asked(tmp_path):
    base = Model()
    theirs = peft_adapted(base, **CASES["plain"]).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = copy.deepcopy(base)
    load_adapter(ours, tmp_path / "theirs", fp8=None, adapter_dtype=None)
    assert ours.layers[0].q.lora_A.dtype == torch.bfloat16
    save_adapter(ours, tmp_path / "ours")
    assert tensor_bytes(tmp_path / "ours") == tensor_bytes(tmp_path / "theirs")


def test_a_file_s_dtype_is_that_of_its_adapters_whatever_modules_are_called(tmp_path):
    base = Model()
    base.lora_A = nn.Sequential(nn.Linear(3, 3))
    ours = copy.deepcopy(base)
    config = LoRAConfig(target_modules=["q"], modules_to_save=["lora_A.0"], fp8=None)
    apply_lora(ours, config, adapter_dtype=torch.bfloat16)
    save_adapter(ours, tmp_path)
    load_adapter(base, tmp_path, fp8=None, adapter_dtype=None)
    dtypes = {base.layers[0].q.lora_A.dtype, base.layers[1].q.lora_B.dtype}
    assert dtypes == {torch.bfloat16} and base.lora_A[0].weight.dtype == torch.float32


def test_layers_made_by_hand_describe_themselves(tmp_path):
    base = Model()
    base.q = nn.Linear(12, 12)  # a name that is the tail of others
    ours = copy.deepcopy(base)
    ours.q = LoRALinear.from_linear(ours.q, LoRAConfig(r=2, lora_alpha=6, fp8=None))
    ours.layers[1].v = LoRALinear.from_linear(ours.layers[1].v, LoRAConfig(r=5, fp8=None))
    for parameter in (ours.q.lora_B, ours.layers[1].v.lora_B):
        nn.init.normal_(parameter)
    save_adapter(torch.compile(ours), tmp_path)
    theirs = peft_load(base, tmp_path)
    assert_same_outputs(ours, theirs)
    x = torch.randn(3, 12)
    torch.testing.assert_close(ours.q(x), theirs.base_model.model.q(x), rtol=1e-5, atol=1e-5)


def test_loading_over_an_adapter_copies_in_place(tmp_path):
    base = Model()
    saved = adapted(base, "saved modules")
    save_adapter(saved, tmp_path)
    model = adapted(base, "saved modules")
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    load_adapter(model, tmp_path)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert_same_outputs(model, saved, fp8=True)
    with disable_lora(model):
        assert_same_outputs(model, base)


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_the_same_parameters_are_trained_as_in_peft(bias):
    base = Model()
    base.position_bias = nn.Embedding(3, 4)  # "bias" in its path is not a bias
    fields = {"target_modules": ["q"], "bias": bias, "modules_to_save": ["head"]}
    theirs, ours = peft_adapted(base, **fields), copy.deepcopy(base)
    apply_lora(ours, LoRAConfig(**fields, fp8=None))
    trained = {
        name.removeprefix("base_model.model.")
        .replace(".default", "")
        .replace(".base_layer", "")
        .replace(".modules_to_save", "")
        .removesuffix(".weight")
        for name, p in theirs.named_parameters()
        if p.requires_grad and "original_module" not in name
    }
    found = {name.removesuffix(".weight") for name, p in ours.named_parameters() if p.requires_grad}
    assert found == trained


@pytest.mark.parametrize("exists", [True, False], ids=["over an adapter", "new"])
def test_full_disk_leaves_the_old_adapter(exists, tmp_path):
    folder = tmp_path / "adapter"
    first, second = adapted(Model()), adapted(Model())
    if exists:
        save_adapter(first, folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()} if exists else None
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # the kernel refuses the rest
        with pytest.raises(OSError, match="adapter not saved") as raised:
            save_adapter(second, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(folder)
    assert ({p.name: p.read_bytes() for p in folder.iterdir()} if exists else None) == before
    assert [p.name for p in tmp_path.iterdir()] == (["adapter"] if exists else [])


def test_a_file_is_not_a_directory(tmp_path):
    (tmp_path / "adapter").write_text("")
    with pytest.raises(OSError, match="is a file, expected a directory"):
        save_adapter(adapted(Model()), tmp_path / "adapter")


def sharded_rank(rank: int, device: torch.device, folder: str) -> None:
    """Save from FSDP2 shards, load into other shards; rank 0 also loads into a plain model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    base = Model(width=8)
    first = adapted(base, "saved modules")
    x = torch.randn(3, 12)
    y = first(x)
    fully_shard(first, mesh=mesh)
    save_adapter(first, f"{folder}/adapter")
    torch.distributed.barrier()
    again = adapted(base, "saved modules")
    fully_shard(again, mesh=mesh)
    load_adapter(again, f"{folder}/adapter")
    plain = copy.deepcopy(base)
    load_adapter(plain, f"{folder}/adapter", fp8=None)
    for model in (again, plain):
        torch.testing.assert_close(model(x), y, rtol=1e-5, atol=1e-5)


def test_sharded_parameters_are_saved_whole(tmp_path):
    on_ranks(sharded_rank, 2, "gloo", str(tmp_path))
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [CONFIG, WEIGHTS]
