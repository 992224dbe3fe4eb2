# SPDX-License-Identifier: Apache-2.0
"""Masks and documents lie where the call's rows lie, also where it is computed again; a copied model has the ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import fuse
from lorakernels.parallel import ContextParallel, context_parallel, parallelize
from lorakernels.parallel.ranks import comm
from tests.distributed.context_models import DOCUMENTS, LENGTH, ROWS, Way, batch, make, positions
from tests.fusion.fused_models import an_adapter, fp8_state
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
DROPOUT = {"dropout": 0.3, "checkpoint": True}
WAYS = {
    2: (
        Way("layers", **DROPOUT),
        Way("fused", fused=True, **DROPOUT),
        Way("fused, checkpoint", dropout=0.3, fused=True, save="checkpoint"),
    ),
    4: (Way("2 x 2", vocabulary=False, **DROPOUT), Way("2 x 2, fused", vocabulary=False, fused=True, **DROPOUT)),
}  # fmt: skip


def gradients(
    model: nn.Module, context: ContextParallel, device: torch.device, late: bool
) -> dict[str, Tensor]:
    """Of microbatches of 2, 1 and 2 rows, the last of half as many tokens, and an evaluation of a quarter.

    `late`: all forwards come before the first backward.
    """
    torch.manual_seed(5)
    model.zero_grad()
    losses = []
    for step, (rows, length) in enumerate(((ROWS, LENGTH), (1, LENGTH), (ROWS, LENGTH // 2))):
        tokens, labels = (x[:rows, :length] for x in batch(step, device))
        losses.append(context.loss(labels, input_ids=tokens))
        if not late:
            losses.pop().backward()
    model.eval()
    with torch.no_grad():
        context.loss(labels[:, : LENGTH // 4], input_ids=tokens[:, : LENGTH // 4])
    model.train()
    while losses:
        losses.pop(0).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def recomputed(rank: int, device: torch.device, ways: list[Way]) -> dict[str, list[str]]:
    """For each way the gradients which depend on when backward ran."""
    world, found = dist.get_world_size(), {}
    for way in ways:
        tp = 1 if way.vocabulary is None else 2
        mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("cp", "tp"))
        model = make(way, device)
        if way.fused:
            fuse(model, save=way.save)
        if tp > 1:
            parallelize(model, mesh["tp"], vocabulary=False)
        context = context_parallel(model, mesh["cp"])
        early = gradients(model, context, device, late=False)
        late = gradients(model, context, device, late=True)
        assert early.keys() == late.keys() and early
        found[str(way)] = [name for name in early if not torch.equal(early[name], late[name])]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", WAYS)
def test_a_recomputation_draws_the_masks_of_its_own_rows(world: int) -> None:
    for found in on_ranks(recomputed, world, "gloo", [*WAYS[world]]):
        assert found == {str(way): [] for way in WAYS[world]}


def said(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing"


def on_one_rank(
    context: ContextParallel, rank: int, tokens: Tensor, labels: Tensor
) -> Iterator[tuple[str, Any]]:
    """Calls that are wrong on rank 1 alone: no rank may wait for another one."""
    whole = torch.arange(LENGTH)[None].repeat(ROWS, 1)
    rows, own = context.shard(tokens), context.shard(whole)
    starts = torch.tensor([*DOCUMENTS, ROWS * LENGTH], dtype=torch.int32)
    turned = whole + torch.tensor([[0], [1]]) if rank else whole + torch.tensor([[1], [0]])
    wrong: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "positions of other rows": (rows, {"position_ids": own[:, :-1]}),
        "no positions": (rows, {}),
        "int64 on one": (rows, {"cu_seq_lens_q": starts.long(), "position_ids": own}),
        "a mask": (rows, {"position_ids": own, "attention_mask": torch.ones_like(rows)}),
        "odd": (rows[:, 1:], {"position_ids": own[:, 1:]}),
        "empty": (rows[:, :0], {"position_ids": own[:, :0]}),
        "one dimension": (rows.flatten(), {"position_ids": own.flatten()}),
        "a list of starts": (rows, {"cu_seq_lens_q": starts.tolist(), "position_ids": own}),
        "a list of positions": (rows, {"position_ids": own.tolist()}),
        "length in words": (
            rows,
            {"cu_seq_lens_q": starts, "max_length_q": "all", "position_ids": own},
        ),
        "two lengths": (
            rows,
            {"cu_seq_lens_q": starts, "max_length_q": torch.tensor([9, 9]), "position_ids": own},
        ),
        "fewer rows": (rows[:1], {"position_ids": own[:1]}),
        "fewer tokens": (rows[:, :4], {"position_ids": own[:, :4]}),
        "starts on one": (rows, {"cu_seq_lens_q": starts, "position_ids": own}),
        "unknown token": (rows.clone().fill_(64), {"position_ids": own}),
        "negative token": (rows.clone().fill_(-1), {"position_ids": own}),
        "rows in turn": (rows, {"position_ids": context.shard(turned)}),
    }
    for name, (tokens, inputs) in wrong.items():
        right = name != "rows in turn" and not rank
        given = (rows, {"position_ids": context.shard(whole)}) if right else (tokens, inputs)
        yield name, lambda given=given: context.model(given[0], **given[1])


def wrong_losses(
    context: ContextParallel, rank: int, tokens: Tensor, labels: Tensor
) -> Iterator[tuple[str, Any]]:
    """Calls of `loss` that are wrong on rank 1 alone, or where the ranks differ: no rank may wait for another one."""
    right: dict[str, Any] = {"labels": labels, "input_ids": tokens}
    starts = torch.tensor([*DOCUMENTS, ROWS * LENGTH], dtype=torch.int32)
    wrong: dict[str, dict[str, Any]] = {
        "short labels": {"labels": labels[:, 1:]},
        "labels of fp32": {"labels": labels.float()},
        "labels elsewhere": {"labels": labels.to("meta")},
        "no labels": {"labels": None},
        "a mask for loss": {"attention_mask": torch.ones_like(tokens)},
        "no rows": {"input_ids": None},
        "odd rows": {"labels": labels[:, 1:], "input_ids": tokens[:, 1:]},
        "items in words": {"items": "many"},
        "one row": {"labels": labels[:1], "input_ids": tokens[:1]},
        "fewer tokens for loss": {"labels": labels[:, :8], "input_ids": tokens[:, :8]},
        "loss with starts": {"cu_seq_lens_q": starts, "position_ids": positions()},
        "loss with positions": {"position_ids": torch.arange(LENGTH)[None]},
        "token of loss": {"input_ids": tokens.clone().index_fill_(1, torch.tensor(5), 64)},
        "other rows for loss": {"labels": labels.flip(0), "input_ids": tokens.flip(0)},
        "label of loss": {"labels": labels.clone().index_fill_(1, torch.tensor(5), 64)},
        "negative label": {"labels": labels.clone().index_fill_(1, torch.tensor(5), -7)},
    }
    for name, change in wrong.items():
        given = right | change if rank else right
        yield name, lambda given=given: context.loss(**given)


def documents(rank: int, device: torch.device, fused: bool) -> dict[str, str]:
    model = make(Way(""), device)
    if fused:
        fuse(model)
    context = context_parallel(model, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"])
    tokens, labels = batch(0, device)
    whole = torch.arange(LENGTH)[None]
    middle = whole.clone()
    middle[:, 6:8] = torch.arange(2)  # tokens of rank 1 alone
    end = ROWS * LENGTH
    given: dict[str, Any] = {
        "packed": {"position_ids": positions()},
        "in the middle": {"position_ids": middle},
        "at a chunk's start": {"position_ids": torch.cat([whole[:, :4], whole[:, :12]], 1)},
        "other rows": {"position_ids": whole[:, :8].repeat(3, 2)},
        "from 7": {"position_ids": whole + torch.tensor([[7], [0]])},
        "whole": {"position_ids": whole},
        "short": {"cu_seq_lens_q": [0, 5, 20]},
        "late": {"cu_seq_lens_q": [1, 5, end]},
        "down": {"cu_seq_lens_q": [0, 20, 5, end]},
        "far": {"cu_seq_lens_q": [0, end + 4]},
        "on one rank": {"cu_seq_lens_q": [0, end - rank]},
        "one number": {"cu_seq_lens_q": [0]},
        "empty ones": {"cu_seq_lens_q": [*DOCUMENTS, end, end], "position_ids": positions()},
    }
    found = {}
    for name, inputs in given.items():
        if "cu_seq_lens_q" in inputs:
            starts = torch.tensor(inputs["cu_seq_lens_q"], dtype=torch.int32)
            longest = max([1, *(b - a for a, b in pairwise(starts.tolist()))])
            inputs |= {"cu_seq_lens_q": starts, "max_length_q": longest}
        found[name] = said(lambda inputs=inputs: context.loss(labels, input_ids=tokens, **inputs))
    starts = torch.tensor(DOCUMENTS)
    found["int64"] = said(lambda: context.loss(labels, input_ids=tokens, cu_seq_lens_q=starts))
    given = {"cu_seq_lens_q": torch.tensor([*DOCUMENTS, end], dtype=torch.int32), "max_length_q": 2}
    found["too long"] = said(lambda: context.loss(labels, input_ids=tokens, **given))
    found |= {name: said(call) for name, call in on_one_rank(context, rank, tokens, labels)}
    found |= {name: said(call) for name, call in wrong_losses(context, rank, tokens, labels)}
    found["right again"] = said(lambda: context.loss(labels, input_ids=tokens).backward())
    context.checks_places = False
    given = {"input_ids": tokens, "position_ids": positions()}
    with mock.patch.object(comm, "maximum") as asked:
        found["unlooked"] = said(lambda: context.loss(labels, **given))
    asked.assert_not_called()
    return found


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_documents_that_are_not_said_are_refused_on_all_ranks(fused: bool) -> None:
    jump = "position_ids must go up by one from token to token of a row, found a jump"
    ends = "cu_seq_lens_q must go up from 0 to all 32 tokens of 2 rows over 2 ranks, found "
    expected = {
        "packed": jump,
        "in the middle": jump,
        "at a chunk's start": jump,
        "other rows": "position_ids must be [1 or 2, 8] as this rank's tokens, found [3, 8]",
        "from 7": "nothing",
        "whole": "nothing",
        "short": ends + "0 to 20",
        "late": ends + "1 to 32",
        "down": ends + "0 to 32",
        "far": ends + "0 to 36",
        "on one rank": "must have equal rows, found other values of cu_seq_lens_q on rank 1 than on rank 0",
        "one number": "cu_seq_lens_q must be int32 [documents + 1], found torch.int32 [1]",
        "empty ones": "nothing",
        "int64": "cu_seq_lens_q must be int32 [documents + 1], found torch.int64 [7]",
        "too long": "max_length_q must be at least the tokens of each document in cu_seq_lens_q, found 2 for one of ",
        "positions of other rows": "position_ids must be [1 or 2, 8] as this rank's tokens, found [2, 7]",
        "no positions": "position_ids must be given",
        "int64 on one": "cu_seq_lens_q must be int32 [documents + 1], found torch.int64 [8]",
        "a mask": "attention_mask must be None over ranks",
        "odd": "a rank has two chunks of a row, found 7 tokens",
        "empty": "a rank has two chunks of a row, found 0 tokens",
        "one dimension": "rows must be [B, S/n] or [B, S/n, H], found [16]",
        "a list of starts": "cu_seq_lens_q must be int32 [documents + 1], found list",
        "a list of positions": "position_ids must be [1 or 2, 8] as this rank's tokens, found list",
        "length in words": "max_length_q must be an integer, found 'all'",
        "two lengths": "max_length_q must be an integer, found tensor([9, 9])",
        "fewer rows": "ranks with [1, 8] to [2, 8]",
        "fewer tokens": "ranks with [2, 4] to [2, 8]",
        "starts on one": "cu_seq_lens_q on all or on none",
        "unknown token": "input_ids must be in [0, 64) on all ranks, found others",
        "negative token": "input_ids must be in [0, 64) on all ranks, found others",
        "rows in turn": jump,
        "short labels": "labels must be int64 [2, 16] as the rows, found torch.int64 [2, 15]",
        "labels of fp32": "labels must be int64 [2, 16] as the rows, found torch.float32 [2, 16]",
        "labels elsewhere": "labels must be on cpu as the rows, found meta",
        "no labels": "labels must be int64 [2, 16] as the rows, found None",
        "a mask for loss": "of whole rows, found attention_mask",
        "no rows": "loss needs input_ids or inputs_embeds",
        "odd rows": "must have a positive multiple of 4 tokens, found (2, 15)",
        "items in words": "items must be a number, found 'many'",
        "one row": "found by rank [[2, 16, 'neither'], [1, 16, 'neither']]",
        "fewer tokens for loss": "found by rank [[2, 16, 'neither'], [2, 8, 'neither']]",
        "loss with starts": "found by rank [[2, 16, 'neither'], [2, 16, 'cu_seq_lens_q']]",
        "loss with positions": "found by rank [[2, 16, 'neither'], [2, 16, 'position_ids']]",
        "token of loss": "input_ids must be in [0, 64), found ",
        "other rows for loss": "found other values of labels, input_ids on rank 1 than on rank 0",
        "label of loss": "labels must be -100 or in [0, 64), found ",
        "negative label": "labels must be -100 or in [0, 64), found -7 to ",
        "right again": "nothing",
        "unlooked": "nothing",
    }
    for found in on_ranks(documents, 2, "gloo", fused):
        assert found.keys() == expected.keys()
        for name, text in expected.items():
            assert text in found[name], (name, found[name])


def unknown_tokens(rank: int, device: torch.device) -> list[str]:
    """What is said of packed rows with a token that rank 0 alone would look up, and then of right ones."""
    context = context_parallel(make(Way(""), device), init_device_mesh(device.type, (2,)))
    tokens, labels = batch(0, device)
    starts = torch.tensor(DOCUMENTS, dtype=torch.int32, device=device)
    given = {"cu_seq_lens_q": starts, "position_ids": positions().to(device), "max_length_q": 12}
    found = []
    for token in (64, -1, 0):
        rows = tokens.clone()
        rows[0, 0] = token
        found.append(said(lambda rows=rows: context.loss(labels, input_ids=rows, **given)))  # type: ignore[misc]
    return found


@pytest.mark.gpu
def test_an_unknown_token_is_refused_on_all_ranks_before_a_device_asserts() -> None:
    """The host waits for the device there in any case, to know where documents begin."""
    refused = "input_ids must be in [0, 64) on all ranks, found others"
    for found in on_ranks(unknown_tokens, 2, "cuda:gloo"):
        assert found == [refused, refused, "nothing"]


def copied(rank: int, device: torch.device, fused: bool) -> list[bool]:
    """Whether a copy trains over the ranks by itself, and closing it leaves the first one over them."""
    way = Way("", fp8=True, dropout=0.1, fused=fused)
    model, alone = make(way, device), make(way, device)
    for each in (model, alone):
        if fused:
            fuse(each)
    context = context_parallel(model, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"])
    twin = copy.deepcopy(model)
    theirs = ContextParallel.of(twin)
    assert theirs is not None and theirs.model is twin
    tokens, labels = batch(0, device)

    def steps(each: ContextParallel) -> list[Tensor]:
        torch.manual_seed(4)
        found = []
        for _ in range(2):
            loss = each.loss(labels, input_ids=tokens)
            loss.backward()
            each.reduce_gradients()
            fp8_state(each.model).reduce_and_update()
            found.append(loss.detach())
        grads = [p.grad for p in each.model.parameters() if p.requires_grad]
        return [*found, fp8_state(each.model).forward.clone(), *grads]

    untouched = [p.grad for p in twin.parameters()]
    first, second = steps(context), steps(theirs)
    same = all(map(torch.equal, first, second))
    theirs.close()
    rows = an_adapter(twin).chunks, an_adapter(model).chunks
    shared = fp8_state(twin).shared_over, len(fp8_state(model).shared_over)
    whole = [twin.eval(), alone.eval()]
    logits = [each(tokens).logits for each in whole]
    context.loss(labels, input_ids=tokens).backward()
    return [
        same,
        untouched == [None] * len(untouched),
        rows == ((), (rank, 2, LENGTH // 4)),
        shared == ((), 1),
        ContextParallel.of(twin) is None and ContextParallel.of(model) is context,
        torch.equal(*logits),
    ]


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_a_copied_model_runs_over_the_same_ranks(fused: bool) -> None:
    for found in on_ranks(copied, 2, "gloo", fused):
        assert found == [True] * 6
