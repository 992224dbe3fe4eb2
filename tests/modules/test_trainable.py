# SPDX-License-Identifier: Apache-2.0
"""`print_trainable_parameters` where a user of PEFT looks for it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import lorakernels
from lorakernels import DelayedScaling, LoRAConfig, apply_lora
from tests.adapter_files import Model

OPTIONS: dict[str, Any] = {
    "target_modules": ["q"],
    "modules_to_save": ["head"],
    "bias": "lora_only",
}


def adapted(fp8: Any = None) -> Any:
    model = Model()
    apply_lora(model, LoRAConfig(fp8=fp8, **OPTIONS))
    return model


@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "FP8"])
def test_it_counts_what_peft_trains(fp8: Any, capsys: pytest.CaptureFixture[str]) -> None:
    peft = pytest.importorskip("peft")
    theirs = peft.get_peft_model(Model(), peft.LoraConfig(**OPTIONS))
    trained, _ = theirs.get_nb_trainable_parameters()
    total = sum(p.numel() for p in Model().parameters()) + 2 * 8 * (12 + 20)
    model = adapted(fp8)
    model.print_trainable_parameters()
    share = 100 * trained / total
    assert capsys.readouterr().out == (
        f"trainable params: {trained:,} || all params: {total:,} || trainable%: {share:.4f}\n"
    )
    assert model.get_nb_trainable_parameters() == (trained, total)


def test_shared_parameters_count_once() -> None:
    model = nn.ModuleDict({"q": nn.Linear(8, 8), "embed": nn.Embedding(8, 8)})
    model["head"] = nn.Linear(8, 8, bias=False)
    model["head"].weight = model["embed"].weight
    apply_lora(model, LoRAConfig(r=2, target_modules=["q"], fp8=None))
    assert model.get_nb_trainable_parameters() == (2 * 2 * 8, 2 * 64 + 8 + 2 * 2 * 8)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_counts_itself(copied: Any) -> None:
    model = adapted()
    other = copied(model)
    other.extra = nn.Linear(10, 10)
    gained = 0 if copied is copy.copy else 110
    before = model.get_nb_trainable_parameters()
    assert other.get_nb_trainable_parameters()[1] == before[1] + gained


def test_state_and_compiled_models_stay_as_they_are() -> None:
    model = adapted()
    assert not any("trainable" in name for name in model.state_dict())
    compiled: Any = torch.compile(model, backend="eager")
    assert compiled.get_nb_trainable_parameters() == model.get_nb_trainable_parameters()
    x = torch.randn(2, 3, 12)
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("call", [lorakernels.unload, lorakernels.merge_and_unload])
def test_a_plain_model_has_it_no_more(call: Any) -> None:
    model = adapted()
    call(model)
    assert not hasattr(model, "print_trainable_parameters")
    assert not hasattr(model, "get_nb_trainable_parameters")


def test_a_class_keeps_its_own() -> None:
    class Own(Model):
        def print_trainable_parameters(self) -> str:
            return "own"

    model = Own()
    apply_lora(model, LoRAConfig(fp8=None, **OPTIONS))
    assert model.print_trainable_parameters() == "own"
    lorakernels.unload(model)
    assert model.print_trainable_parameters() == "own"


def test_a_call_that_fails_leaves_none() -> None:
    model = Model()
    with pytest.raises(ValueError, match="matches no module"):
        apply_lora(model, LoRAConfig(target_modules=["nothing"]))
    assert not hasattr(model, "print_trainable_parameters")
