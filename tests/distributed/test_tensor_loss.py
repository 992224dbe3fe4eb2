# SPDX-License-Identifier: Apache-2.0
"""What the loss of a split model cannot take on one rank is refused on all, and none waits for another."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lorakernels.parallel import parallelize
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.tensor.known_tokens import Turns
from tests.distributed.tensor_models import Way, batch, make
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
FORM = "all ranks must pass arguments of equal shapes and dtypes, found by rank ["
OTHER = "all ranks that have parts of its layers must have equal rows, found other values of {} on rank 1 than"
SAID = {
    "short labels": "labels must be int64 [2, 12] on cpu as the rows [B, S], found int64 [2, 11] on cpu",
    "labels of fp32": "labels must be int64 [2, 12] on cpu as the rows [B, S], found float32 [2, 12] on cpu",
    "labels elsewhere": "labels must be int64 [2, 12] on cpu as the rows [B, S], found int64 [2, 12] on meta",
    "no labels": "labels must be int64 [2, 12] on cpu as the rows [B, S], found None",
    "one dimension": "labels must be int64 [24] on cpu as the rows [B, S], found int64 [24] on cpu",
    "no rows": "loss needs a tensor of input_ids or inputs_embeds, found none",
    "a list": "loss needs a tensor of input_ids or inputs_embeds, found list",
    "items in words": "items must be a number, found 'many'",
    "an unknown token": "input_ids must be in [0, 64), found ",
    "a negative token": "input_ids must be in [0, 64), found -1 to ",
    "an unknown label": "labels must be -100 or in [0, 64), found ",
    "other tokens": OTHER.format("input_ids"),
    "other labels": OTHER.format("labels"),
    "other items of a tensor": OTHER.format("items"),
    "one row": FORM,
    "a mask": FORM,
    "an option": FORM,
    "other items": FORM,
    "no items": FORM,
    "evaluation": FORM,
    "no gradients": FORM,
}


def losses(rank: int, device: torch.device, save: str | None) -> dict[str, Any]:
    """What ranks hear of calls that are wrong on rank 1 alone, or other than on rank 0, and of right ones."""
    group = dist.new_group(timeout=timedelta(seconds=30))  # a rank that waits gives up by then
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = make(Way("", True, save=save, vocabulary=True), device)
    split = parallelize(model, mesh, vocabulary=True)
    tokens = batch(0, device)
    right: dict[str, Any] = {"labels": tokens, "input_ids": tokens, "items": 4}
    wrong: dict[str, dict[str, Any]] = {
        "short labels": {"labels": tokens[:, 1:]},
        "labels of fp32": {"labels": tokens.float()},
        "labels elsewhere": {"labels": tokens.to("meta")},
        "no labels": {"labels": None},
        "one dimension": {"labels": tokens.flatten(), "input_ids": tokens.flatten()},
        "no rows": {"input_ids": None},
        "a list": {"input_ids": tokens.tolist()},
        "items in words": {"items": "many"},
        "an unknown token": {"input_ids": tokens.clone().index_fill_(1, torch.tensor(3), 64)},
        "a negative token": {"input_ids": tokens.clone().index_fill_(1, torch.tensor(3), -1)},
        "an unknown label": {"labels": tokens.clone().index_fill_(1, torch.tensor(3), 64)},
        "other tokens": {"input_ids": tokens.flip(1)},
        "other labels": {"labels": tokens.flip(1)},
        "other items of a tensor": {},
        "one row": {"labels": tokens[:1], "input_ids": tokens[:1]},
        "a mask": {"attention_mask": torch.ones_like(tokens)},
        "an option": {"output_attentions": False},
        "other items": {"items": 3},
        "no items": {"items": None},
        "evaluation": {},
        "no gradients": {},
    }
    found: dict[str, Any] = {}
    for name, change in wrong.items():
        model.train(not (rank and name == "evaluation"))
        with torch.no_grad() if rank and name == "no gradients" else nullcontext():
            call = right | change if rank else right
            if name == "other items of a tensor":
                call = right | {"items": torch.tensor(3 + rank)}
            try:
                split.loss(**call)
                found[name] = "nothing"
            except (ValueError, TypeError) as error:
                found[name] = str(error)
    model.train()
    torch.manual_seed(3)
    found["checked"] = split.loss(**right).item()
    torch.manual_seed(3)
    split.checks_inputs = False
    with mock.patch.object(comm, "alike") as asked:
        found["unchecked"] = split.loss(**right).item()
    asked.assert_not_called()
    return found


def forwards(rank: int, device: torch.device) -> list[str]:
    """What ranks hear of the model's own forward, where rank 1 has tokens that the model does not know, or others."""
    said = []
    for vocabulary in (False, True):
        group = dist.new_group(timeout=timedelta(seconds=30))
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
        model = make(Way("", True, vocabulary=vocabulary), device).eval()
        split = parallelize(model, mesh, vocabulary=vocabulary)
        tokens = batch(0, device)
        expected = model(tokens).logits
        others = [tokens.clone().index_fill_(1, torch.tensor(3), unknown) for unknown in (64, -1)]
        for other in (*others, tokens.flip(1)):
            try:
                model(other if rank else tokens)
            except ValueError as error:
                said.append(str(error))
        assert torch.equal(model(tokens).logits, expected), "in step"
        split.checks_inputs = False
        with mock.patch.object(comm, "alike") as asked:
            model(tokens)
        asked.assert_not_called()
    return said


def test_other_rows_than_on_the_first_rank_are_refused_in_the_models_own_forward() -> None:
    for rank, said in enumerate(on_ranks(forwards, 2, "gloo")):
        ahead = "" if rank else "rank 1: "
        unknown = f"{ahead}input_ids must be in [0, 64), found "
        for text, start in zip(
            said, [unknown, unknown, OTHER.format("input_ids")] * 2, strict=True
        ):
            assert text.startswith(start)


def test_values_on_a_gpu_are_compared_in_the_first_call_and_in_each_64th() -> None:
    turns = Turns()
    assert [call for call in range(130) if turns.next()] == [0, 64, 128]


@pytest.mark.parametrize("save", [None, "recompute"], ids=["unfused", "fused"])
def test_a_loss_that_one_rank_cannot_compute_is_refused_on_all(save: str | None) -> None:
    for rank, found in enumerate(on_ranks(losses, 2, "gloo", save)):
        for name, said in SAID.items():
            ahead = "" if rank or said.startswith("all ranks") else "rank 1: "
            assert found[name].startswith(ahead + said), (rank, name, found[name])
        assert found["checked"] == found["unchecked"] > 0
