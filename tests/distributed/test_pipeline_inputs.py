# SPDX-License-Identifier: Apache-2.0
"""What a step of a pipeline cannot take on one rank is refused on all. Ranks then go on in step, and none waits."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lorakernels.parallel import Microbatch, PipelineParallel, pipeline_parallel
from lorakernels.parallel.pipeline.stages import microbatches_of, shifted
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.tensor.head import IGNORE
from tests.distributed.pipeline_models import Way, batch, make, step_alone
from tests.distributed.test_pipeline import refused
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
FORM = "all ranks that have stages must run a step of equal rows and options, found by rank ["
SAID = {
    "fewer labels": "labels must be [4, 12] as the rows, found [2, 12]",
    "no rows": "a pipeline needs input_ids",
    "odd rows": "input_ids must be [B, S] with B a positive multiple of the 2 microbatches, found [3, 12]",
    "another input": "a pipeline takes ['input_ids', ",
    "no gradients": "forward_backward needs gradients",
    "a list": "'list' object has no attribute",
    "shorter rows": FORM,
    "a mask": FORM,
    "items": FORM,
    "other rows": "all ranks that have stages must have equal rows, found other values of input_ids on rank 1 than",
    "an unknown label": "labels must be -100 or in [0, 64), found ",
    "labels of int32": "labels must be int64 on cpu as the rows, found int32 [4, 12]",
    "evaluation": FORM,
    "another dtype": FORM,
}


def mesh_of_impatient_ranks() -> Any:
    """A rank that waits gives up by then."""
    group = dist.new_group(timeout=timedelta(seconds=30))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))


def steps(rank: int, device: torch.device) -> dict[str, Any]:
    """What ranks hear of steps that are wrong on rank 1 alone, or other than on rank 0, and losses of right ones."""
    way = Way("", microbatches=2)
    model, whole = make(way, device), make(way, device)
    cut = pipeline_parallel(model, mesh_of_impatient_ranks(), microbatches=2)
    labels, inputs = batch(0, way, device)
    tokens = inputs["input_ids"]
    values = {name: x.clone() for name, x in model.state_dict().items()}
    right: dict[str, Any] = {"labels": labels, "input_ids": tokens}
    expected = step_alone(whole, labels, inputs, way)
    found: dict[str, Any] = {"first": bool(cut.forward_backward(**right) == expected)}
    wrong: dict[str, dict[str, Any]] = {
        "fewer labels": {"labels": labels[:2]},
        "no rows": {"input_ids": None},
        "odd rows": {"labels": labels[:3], "input_ids": tokens[:3]},
        "another input": {"inputs_embeds": tokens},
        "no gradients": {},
        "a list": {"input_ids": tokens.tolist()},
        "shorter rows": {"labels": labels[:, :10], "input_ids": tokens[:, :10]},
        "a mask": {"attention_mask": torch.ones_like(tokens)},
        "items": {"items": 3},
        "other rows": {"input_ids": tokens.flip(0)},
        "an unknown label": {"labels": labels.clone().index_fill_(1, torch.tensor(3), -1)},
        "labels of int32": {"labels": labels.int()},
        "evaluation": {},
        "another dtype": {},
    }
    for name, change in wrong.items():
        model.train(not (rank and name == "evaluation"))
        if rank and name == "another dtype":
            model.bfloat16()
        with torch.no_grad() if rank and name == "no gradients" else nullcontext():
            try:
                cut.forward_backward(**(right | change if rank else right))
                found[name] = "nothing"
            except (ValueError, TypeError, AttributeError, RuntimeError) as error:
                found[name] = str(error)
        model.float().train().load_state_dict(values)
        if name == "fewer labels":  # ranks pair the labels of a batch with its tokens
            other, more = batch(1, way, device)
            loss = cut.forward_backward(other, **more)
            found["next"] = bool(loss == step_alone(whole, other, more, way))
    try:
        (cut.loss if rank else cut.forward_backward)(**right)
    except ValueError as error:
        found["no backward"] = str(error)
    everywhere: dict[
        str, dict[str, Any]
    ] = {  # one rank alone has the embedding, the head or the loss, which would raise
        "int32 everywhere": wrong["labels of int32"],
        "label everywhere": wrong["an unknown label"],
        "token everywhere": {"input_ids": tokens.clone().index_fill_(1, torch.tensor(3), 64)},
    }
    for name, change in everywhere.items():
        try:
            cut.forward_backward(**(right | change))
        except ValueError as error:
            found[name] = str(error)
    found["last"] = bool(cut.forward_backward(**right) == expected)
    cut.checks_inputs = False
    with patch.object(comm, "alike") as asked:
        found["unchecked"] = bool(cut.loss(**right) == expected)
    asked.assert_not_called()
    return found


def test_a_step_that_one_rank_cannot_run_is_refused_on_all() -> None:
    for rank, found in enumerate(on_ranks(steps, 2, "gloo")):
        for name, said in {**SAID, "no backward": FORM}.items():
            ahead = "" if rank or said.startswith("all ranks") else "rank 1: "
            assert found[name].startswith(ahead + said), (rank, name, found[name])
        assert found["int32 everywhere"].startswith(SAID["labels of int32"])
        for name, said, owner in (
            ("label everywhere", SAID["an unknown label"], 1),
            ("token everywhere", "input_ids must be in [0, 64), found ", 0),
        ):
            assert found[name].startswith("" if rank == owner else f"rank {owner}: "), name
            assert said in found[name], (rank, name, found[name])
        for name in ("first", "next", "last", "unchecked"):
            assert found[name] is True, (rank, name)


def another_forward_on(rank: int, last: int, cut: PipelineParallel) -> None:
    """Rank `last` alone has a layer with a forward of its own, which no stage runs."""
    layer = cut.model.get_submodule(cut.stages[cut.ranks.rank][0])
    if rank == last:
        vars(layer)["forward"] = layer.forward


def runs(rank: int, device: torch.device) -> dict[str, Any]:
    """What ranks hear of layers and rows that `run` refuses on rank 1 alone, and whether a right run follows."""
    way = Way("", microbatches=2)
    model, whole = make(way, device), make(way, device)
    cut = pipeline_parallel(model, mesh_of_impatient_ranks(), microbatches=2)
    labels, inputs = batch(0, way, device)
    expected = step_alone(whole, labels, inputs, way)
    wanted = shifted(labels)
    rows = microbatches_of(wanted, inputs, 2)
    items = (wanted != IGNORE).sum()
    short = [Microbatch(x[:, :10], y[:, :10], {}) for x, y, _ in rows] if rank else rows
    found: dict[str, Any] = {"first": bool(cut.run(rows, items, True) == expected)}
    found["shorter rows"] = refused(lambda: cut.run(short, items, True))
    found["no backward"] = refused(lambda: cut.run(rows, items, not rank))
    another_forward_on(rank, 1, cut)
    found["forward of a run"] = refused(lambda: cut.run(rows, items, True))
    found["forward of a step"] = refused(lambda: cut.forward_backward(labels, **inputs))
    for layer in cut.layers.values():
        vars(layer).pop("forward", None)
    found["last"] = bool(cut.run(rows, items, True) == expected)
    cut.checks_inputs = False
    with patch.object(comm, "alike") as asked:
        found["unchecked"] = bool(cut.run(rows, items, True) == expected)
    asked.assert_not_called()
    return found


def test_a_run_that_one_rank_refuses_is_refused_on_all() -> None:
    """`finetune` cuts its rows itself, and calls `run`."""
    own = "model.layers.2 is compiled since it was cut: stages run eagerly, or by GraphManager"
    for rank, found in enumerate(on_ranks(runs, 2, "gloo")):
        heard = f"RuntimeError: {own}" if rank else f"ValueError: rank 1: {own}"
        for name in ("forward of a run", "forward of a step"):
            assert found[name] == heard, (rank, name)
        for name in ("shorter rows", "no backward"):
            assert found[name].startswith(f"ValueError: {FORM}"), (rank, name, found[name])
        for name in ("first", "last", "unchecked"):
            assert found[name] is True, (rank, name)


def converted(rank: int, device: torch.device) -> list[bool]:
    """Whether losses are those of one process, before and after all parameters got another dtype and back."""
    way, found = Way("", microbatches=2), []
    model, whole = make(way, device), make(way, device)
    cut = pipeline_parallel(model, mesh_of_impatient_ranks(), microbatches=2)
    labels, inputs = batch(0, way, device)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for each in (model, whole):
            each.to(dtype)
        loss = cut.forward_backward(labels, **inputs)
        found.append(bool(loss == step_alone(whole, labels, inputs, way)))
    return found


def test_stages_go_on_in_another_dtype() -> None:
    assert on_ranks(converted, 2, "gloo") == [[True] * 3] * 2
