# SPDX-License-Identifier: Apache-2.0
"""How adapter files come to disk and back: synced and in order, wrappers and shared memory, values or nothing."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lorakernels import LoRAConfig, apply_lora
from lorakernels.checkpoints.adapters import files as adapters_module
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
    randomize,
    tensor_bytes,
)
from tests.checkpoints.test_adapters_refused import assert_refused

A = "base_model.model.layers.0.q.lora_A.weight"


@pytest.mark.parametrize("exists", [True, False], ids=["over an adapter", "new"])
def test_files_are_synced_before_they_get_their_names(exists, tmp_path, monkeypatch):
    """A power cut after a rename must not find empty files; weights are replaced before their config."""
    folder, model = tmp_path / "adapter", adapted(Model())
    if exists:
        save_adapter(model, folder)
    events: list[str] = []
    fsync, replace, rename = os.fsync, os.replace, Path.rename

    def synced(fd: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    def replaced(source: Path, target: Path) -> None:
        events.append(f"replace {target.name}")
        replace(source, target)

    def renamed(source: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(Path, "rename", renamed)
    save_adapter(model, folder)
    last = [f"replace {WEIGHTS}", f"replace {CONFIG}", "adapter"]
    if not exists:
        last = ["rename adapter", tmp_path.name, "adapter"]
    assert events == [WEIGHTS, CONFIG, *last]


def test_a_new_directory_has_the_rights_of_any_other(tmp_path):
    save_adapter(adapted(Model()), tmp_path / "adapter")
    (tmp_path / "other").mkdir()
    assert (tmp_path / "adapter").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("case", ["every bias", "saved modules", "adapted biases"])
def test_wrappers_leave_no_names_in_the_file(case, tmp_path):
    wrappers = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    base = Model()
    plain = adapted(base, case)
    save_adapter(plain, tmp_path / "plain")

    def wrapped(model: nn.Module) -> nn.Module:
        model.layers[0] = torch.compile(model.layers[0], backend="eager")
        model.layers[1].norm = wrappers.checkpoint_wrapper(model.layers[1].norm)
        return model

    first = wrapped(copy.deepcopy(plain))
    save_adapter(wrappers.checkpoint_wrapper(first), tmp_path / "wrapped")
    assert tensor_bytes(tmp_path / "wrapped") == tensor_bytes(tmp_path / "plain")
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "wrapped" / name).read_bytes() == (
            tmp_path / "plain" / name
        ).read_bytes()
    again = wrapped(copy.deepcopy(base))
    load_adapter(again, tmp_path / "wrapped", fp8=None)
    assert_same_outputs(again, plain)
    assert_same_outputs(peft_load(base, tmp_path / "wrapped"), plain)


def test_peft_s_copies_inside_a_saved_module_are_left_out_under_wrappers(tmp_path):
    base = Model()
    theirs = peft_adapted(base, **CASES["every bias and a saved module"])
    theirs.save_pretrained(tmp_path)
    ours = copy.deepcopy(base)
    ours.head = torch.compile(ours.head, backend="eager")
    for _ in range(2):  # into the plain model, then over its adapter
        load_adapter(ours, tmp_path, fp8=None)
        assert_same_outputs(ours, theirs)


def test_layers_that_share_a_matrix_are_saved_whole(tmp_path):
    model = adapted(Model())
    model.layers[1].q.lora_A = model.layers[0].q.lora_A
    save_adapter(model, tmp_path)
    found = load_file(tmp_path / WEIGHTS)
    assert torch.equal(found[A], found[A.replace("layers.0", "layers.1")])


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.int64, torch.complex64, torch.float64], ids=str
)
@pytest.mark.parametrize("fresh", [True, False], ids=["plain model", "adapted model"])
def test_other_dtypes_are_refused(dtype, fresh, tmp_path):
    base = Model()
    save_adapter(adapted(base), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    save_file(tensors | {A: tensors[A].to(dtype)}, tmp_path / WEIGHTS)
    message = f"1 not float32, bfloat16 or float16:.*{A}: {dtype}"
    assert_refused(base if fresh else adapted(base), tmp_path, message)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["lora_A", "lora_B"])
def test_an_adapter_that_is_not_finite_is_refused(value, name, tmp_path):
    base, key = Model(), A.replace("lora_A", name)
    save_adapter(adapted(base), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors[key][1, 2] = value
    save_file(tensors, tmp_path / WEIGHTS)
    assert_refused(base, tmp_path, f"1 with inf or NaN:.*{key}")


class Counting(nn.LayerNorm):
    """A saved module whose buffers are an integer and a mask of -inf."""

    def __init__(self) -> None:
        super().__init__(12)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.full((2,), float("-inf")))


def test_buffers_of_a_saved_module_keep_their_dtype_and_their_infinities(tmp_path):
    base = Model()
    base.layers[0].norm = Counting()
    model = adapted(base, "saved modules")
    model.layers[0].norm.count.fill_(7)
    save_adapter(model, tmp_path)
    again = copy.deepcopy(base)
    load_adapter(again, tmp_path, fp8=None)
    assert again.layers[0].norm.count == 7 and again.layers[0].norm.mask.isneginf().all()
    tensors, key = load_file(tmp_path / WEIGHTS), "base_model.model.layers.0.norm.count"
    save_file(tensors | {key: tensors[key].float()}, tmp_path / WEIGHTS)
    assert_refused(
        base, tmp_path, f"1 of another dtype:.*{key}: torch.float32, expected torch.int64"
    )


def test_values_are_copied_all_or_none(tmp_path, monkeypatch):
    base = Model()
    save_adapter(adapted(base), tmp_path)
    model = adapted(base)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    like, calls = adapters_module._like, []

    def interrupted(value: Tensor, *arguments: Any) -> Tensor:
        calls.append(value)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return like(value, *arguments)

    monkeypatch.setattr(adapters_module, "_like", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_adapter(model, tmp_path, is_trainable=False)
    assert model.layers[0].q.lora_A.requires_grad
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_frozen_adapters_say_what_is_in_them(tmp_path):
    base = Model()
    model = adapted(base, "saved modules")
    save_adapter(model, tmp_path)
    again = copy.deepcopy(base)
    report = load_adapter(again, tmp_path, is_trainable=False)
    assert report.trainable_parameters == 0 and not again.training
    rows = {row.name: row.action for row in report.modules}
    assert (
        rows["head"] == "saved" and rows["layers.1.v"] == "lora" and rows["layers.0.q"] == "frozen"
    )


def test_one_layer_in_another_dtype(tmp_path):
    model = Model()
    apply_lora(model, LoRAConfig(target_modules=["q"], fp8=None), adapter_dtype=torch.bfloat16)
    randomize(model)
    save_adapter(model, tmp_path)
    again = Model()
    load_adapter(again, tmp_path, fp8=None)
    assert again.layers[1].q.lora_A.dtype == torch.float32
    assert torch.equal(again.layers[1].q.lora_A, model.layers[1].q.lora_A.float())


def test_another_scaling_is_refused_and_rounding_is_not(tmp_path):
    base = Model()
    model = adapted(base)
    save_adapter(model, tmp_path)
    model.layers[1].v.scaling *= 1 + 1e-4
    assert_refused(model, tmp_path, r"layers\.1\.v has scaling 2\.33357, the file's is 2\.33333")
    model.layers[1].v.scaling /= (
        1 + 1.0001e-4
    )  # 1e-8 off: alpha / r and scaling · r / r round apart
    load_adapter(model, tmp_path)
