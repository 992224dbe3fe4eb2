# SPDX-License-Identifier: Apache-2.0
"""Inside AdapterBatch.only a model has one adapter of a batch alone."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import lorakernels
from lorakernels import LoRALinear
from tests.modules.batched_models import NAMES, adapted, alone, batched, rows, tiny_llama


def test_what_needs_all_adapters_says_so_inside_only() -> None:
    model, batch = batched()
    optimizer = torch.optim.SGD(batch.param_groups(), lr=0.1)
    batch.follow(optimizer)
    before = copy.deepcopy(model.state_dict())
    with batch.only("fr"):
        model(input_ids=rows(model, 1)).logits.sum().backward()
        for call in (
            optimizer.step,
            batch.param_groups,
            batch.give_gradients,
            lambda: batch.only("de").__enter__(),
        ):
            with pytest.raises(RuntimeError, match=r"q_proj\.lora_A is one adapter's: inside"):
                call()
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.parametrize("use_rslora", [False, True], ids=["", "rslora"])
def test_files_are_peft_s(tmp_path: Any, use_rslora: bool) -> None:
    """The scaling stays that of the layers, whatever an adapter's own rank is."""
    peft = pytest.importorskip("peft")
    model = adapted(use_rslora=use_rslora)
    batch = lorakernels.batch_adapters(model, NAMES, ranks={"de": 2})
    for name in NAMES:
        for key, value in batch.parameters(name).items():
            if key.endswith("lora_B"):
                torch.nn.init.normal_(value.data[:, : batch.ranks.get(name)], std=0.1)
    ids = rows(model)
    out = model(input_ids=ids).logits
    base = tiny_llama()
    for i, name in enumerate(NAMES):
        with batch.only(name):
            lorakernels.save_adapter(model, tmp_path / name)
            alone = next(m for m in model.modules() if isinstance(m, LoRALinear))
            expected = alone.scaling * (alone.r**0.5 if use_rslora else alone.r)
            assert alone.lora_alpha == expected
        config = peft.PeftConfig.from_pretrained(tmp_path / name)
        assert config.r == (2 if name == "de" else 4)
        assert config.lora_alpha == pytest.approx(expected, rel=1e-12)  # an int where it is whole
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name)
        torch.testing.assert_close(theirs(input_ids=ids[i : i + 1]).logits, out[i : i + 1])


def test_what_is_loaded_inside_only_stays(tmp_path: Any) -> None:
    model, batch = batched()
    with batch.only("it"):
        lorakernels.save_adapter(model, tmp_path)
    with batch.only("fr"):
        lorakernels.load_adapter(model, tmp_path)
    for one, other in zip(
        batch.parameters("fr").values(), batch.parameters("it").values(), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
def test_one_that_is_merged_serves_no_others(fused: bool) -> None:
    model, batch = batched()
    if fused:
        lorakernels.fuse(model)
    ids = rows(model)
    before = model(input_ids=ids).logits
    with batch.only("fr"):
        lorakernels.merge_lora(model)
        torch.testing.assert_close(model(input_ids=ids[:1]).logits, before[:1])
    with pytest.raises(RuntimeError, match="q_proj has several adapters, and one is merged"):
        model(input_ids=ids)
    lorakernels.unmerge_lora(model)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_an_exception_inside_only_gives_the_batch_back() -> None:
    model, batch = batched()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="inside"), batch.only("de"):
        raise RuntimeError("inside")
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert next(iter(batch.layers.values())).lora_A.shape[0] == 3


@pytest.mark.parametrize("call", ["batch_adapters", "only"])
def test_an_exception_in_the_middle_leaves_the_model_as_it_was(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = batched() if call == "only" else (adapted(), None)
    before = copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters())
    fails = torch.Tensor.clone
    calls = iter(range(100))

    def clone(tensor: Tensor, **options: Any) -> Tensor:
        if next(calls) == 9:  # of the fifth layer
            raise torch.OutOfMemoryError("full")
        return fails(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        if batch is None:
            lorakernels.batch_adapters(model, NAMES)
        else:
            with batch.only("de"):
                raise AssertionError("not reached")
    monkeypatch.undo()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.parametrize("kind", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_a_recomputation_belongs_where_its_forward_was(inside: str, kind: bool) -> None:
    model, batch = batched()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind})
    model.enable_input_require_grads()
    only = batch.only("de")
    with only if inside == "forward" else nullcontext():
        loss = model(input_ids=rows(model)).logits.square().sum()
    only = batch.only("de")
    message = "are not known" if inside == "forward" else "its forward was outside"
    with (
        pytest.raises(RuntimeError, match=message),
        only if inside == "backward" else nullcontext(),
    ):
        loss.backward()


@pytest.mark.parametrize("kind", [True, False], ids=["reentrant", "not reentrant"])
def test_one_alone_trains_with_checkpoints(kind: bool) -> None:
    """Inside, and as a copy."""
    model, batch = batched()
    single = alone(model, batch, "de")
    ids = rows(model)
    single(input_ids=ids).logits.square().sum().backward()
    expected = {name: p.grad for name, p in single.named_parameters() if p.requires_grad}
    single.zero_grad()
    for each in (single, model):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind})
        each.enable_input_require_grads()
    single(input_ids=ids).logits.square().sum().backward()
    with batch.only("de"):
        model(input_ids=ids).logits.square().sum().backward()
        for each in (single, model):
            for name, grad in expected.items():
                assert torch.equal(each.get_parameter(name).grad, grad), name
