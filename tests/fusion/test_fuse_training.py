# SPDX-License-Identifier: Apache-2.0
"""Fused layers in training loops: recomputed, in two microbatches, changed in between, by transformers' Trainer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lorakernels import DelayedScaling, fuse
from tests.fusion.fused_models import (
    LINEARS,
    PACKINGS,
    adapted,
    fp8_state,
    fused_copy,
    named,
    run,
    tokens,
)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("save", ["recompute", "checkpoint"])
@pytest.mark.parametrize("family", PACKINGS)
def test_transformers_own_checkpointing(family: str, save: str, reentrant: bool) -> None:
    model = adapted(family, LINEARS, lora_dropout=0.3, fp8=DelayedScaling())
    fuse(model, save=save)
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    x, found = tokens(), []
    for each in (model, twin):
        torch.manual_seed(3)
        found.append(run(each, x))
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
    states = [fp8_state(m) for m in (model, twin)]
    assert torch.equal(states[0].forward, states[1].forward)
    assert torch.equal(states[0].backward, states[1].backward)


@pytest.mark.parametrize("family", PACKINGS)
def test_two_microbatches_in_flight(family: str) -> None:
    """Forward, forward, backward, backward: as one after the other, scales and masks too."""
    model = adapted(family, LINEARS, lora_dropout=0.3, fp8=DelayedScaling(amax_history_len=4))
    fuse(model)
    fp8_state(model).reduce_and_update()
    batches, found = (tokens(), tokens()), []
    for nested in (False, True):
        torch.manual_seed(3)
        model.zero_grad()
        losses = []
        for x in batches:
            losses.append(model(x, labels=x, use_cache=False).loss)
            if not nested:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("family", PACKINGS)
def test_a_parameter_changed_between_forward_and_backward_is_noticed(family: str) -> None:
    model = adapted(family)
    fuse(model)
    x = tokens()
    loss = model(x, labels=x, use_cache=False).loss
    with torch.no_grad():
        (name,) = named(("k_proj",), family)
        model.model.layers[0].self_attn.get_submodule(name).lora_B.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("family", PACKINGS)
def test_trainer_trains_a_fused_model(family: str, tmp_path) -> None:
    def trained(model: nn.Module) -> list[float]:
        data = [{"input_ids": row, "labels": row} for row in torch.arange(12).repeat(8, 1)]
        arguments = __import__("transformers").TrainingArguments(
            output_dir=str(tmp_path),
            num_train_epochs=1,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=0,
        )
        trainer = __import__("transformers").Trainer(model, arguments, train_dataset=data)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    model = adapted(family, LINEARS)
    twin, _ = fused_copy(model)
    losses = trained(model), trained(twin)
    assert len(losses[0]) == 4 and losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
