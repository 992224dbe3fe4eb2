# SPDX-License-Identifier: Apache-2.0
"""Graphs and context_parallel: which comes first, two lengths, what `close` tells; and a rank that fails in between."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from lorakernels.graphs import GraphManager, ReplayError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import PhiloxState, fuse
from lorakernels.parallel import ContextParallel, context_parallel
from lorakernels.parallel.context import changes as context_changes
from lorakernels.parallel.ranks import comm
from tests.distributed.context_models import LENGTH, Way, batch, make
from tests.distributed.test_split_graphs import own_rows_of_the_sum
from tests.fusion.fused_models import an_adapter
from tests.graphs.layers import managed
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
LENGTHS = (LENGTH, LENGTH // 2, LENGTH, LENGTH // 2, LENGTH // 2, LENGTH)


def fused(device: torch.device, dropout: float = 0.3) -> nn.Module:
    model = make(Way("", dropout=dropout), device)
    fuse(model)
    return model


def manager_of(model: nn.Module, device: torch.device, **how: Any) -> GraphManager:
    states = {"rng_states": [an_adapter(model).rng_state]}
    return managed(model.get_submodule("model.layers"), device, **states, **how)


def constant_slot(state: PhiloxState) -> Tensor:
    """Which no generator changes: a replay has the nonce of its capture, an eager step another one."""
    return state.tensor.clone()


def gradients(context: ContextParallel, manager: GraphManager | None) -> list[list[Tensor]]:
    """Of steps with rows of several lengths."""
    found = []
    for step, length in enumerate(LENGTHS):
        context.model.zero_grad(set_to_none=False)
        tokens, labels = (x[:, :length] for x in batch(step, torch.device("cpu")))
        context.loss(labels, input_ids=tokens).backward()
        found.append([p.grad.clone() for p in context.model.parameters() if p.grad is not None])
        if manager is not None:
            manager.end_iteration()
    return found


@pytest.mark.filterwarnings("ignore:replay of layer:RuntimeWarning")
def two_lengths(rank: int, device: torch.device) -> tuple[list[bool], int, str]:
    """(whether each step has the bits of an eager one, how many were replayed, what a call says after `close`)."""
    with (
        mock.patch.object(PhiloxState, "slot", constant_slot),
        mock.patch.object(PhiloxState, "advance"),
        mock.patch.object(comm, "sum_rows", own_rows_of_the_sum),  # gloo's would be recorded
    ):
        mesh, ran = init_device_mesh("cpu", (2,)), []
        for replayed in (False, True):
            context, manager = context_parallel(fused(device), mesh), None
            if replayed:
                how = {"on_new_shape": "capture", "together": context.together}
                manager = manager_of(context.model, device, **how)
            ran.append(gradients(context, manager))
    assert manager is not None
    context.close()
    tokens, _ = batch(0, device)
    base: Any = context.model.base_model
    with pytest.raises(ReplayError) as error:
        base(input_ids=tokens[:, : LENGTH // 2], use_cache=False)  # as many as a rank had
    same = [all(map(torch.equal, *each)) for each in zip(*ran, strict=True)]
    return same, manager.replayed, str(error.value)


def test_replays_of_two_lengths_have_the_masks_of_their_own() -> None:
    """Each length once eagerly: the others are replayed."""
    for same, replayed, said in on_ranks(two_lengths, 2, "gloo"):
        assert same == [True] * len(LENGTHS) and replayed == len(LENGTHS) - 2
        assert "expected lorakernels=<context_attention: ContextAttention>, found no" in said


def captured_before(rank: int, device: torch.device) -> tuple[str, float, float]:
    """What context_parallel says of layers that graphs hold; the loss over ranks after they are let go, and alone."""
    model, alone = fused(device, 0.0), fused(device, 0.0)
    mesh, manager = init_device_mesh("cpu", (2,)), manager_of(model, device)
    tokens, labels = batch(0, device)
    half, base = tokens[:, : LENGTH // 2], model.base_model
    base(input_ids=half, use_cache=False).last_hidden_state.sum().backward()  # type: ignore[operator]
    manager.end_iteration()
    assert manager.phase == "replaying"
    with pytest.raises(ValueError) as error:
        context_parallel(model, mesh)
    manager.close()
    losses = [context_parallel(m, mesh).loss(labels, input_ids=tokens) for m in (model, alone)]
    return str(error.value), *map(float, losses)


def test_graphs_of_whole_rows_are_refused() -> None:
    """A rank's tokens may have the shape of rows that were captured, and the replay would gather no keys."""
    for said, ours, other in on_ranks(captured_before, 2, "gloo"):
        assert "layers.0 is managed by attach or lorakernels.graphs" in said
        assert ours == other


def held(model: nn.Module) -> dict[str, Any]:
    """Names of attributes, hooks and masks' places of all modules, and what attends. () stands for no chunks."""
    config: Any = model.config
    found = {
        path: ({*vars(m)} - {"chunks"}, [*m._forward_pre_hooks], getattr(m, "chunks", None))
        for path, m in model.named_modules()
    }
    return {**found, "attention": config._attn_implementation}


def failing(rank: int, device: torch.device, fuses: bool) -> tuple[str, bool, bool, bool]:
    """What is said where rank 1 alone has no memory; whether the model is as before, works, and is closed then."""
    model, mesh = make(Way("", dropout=0.3), device), init_device_mesh("cpu", (2,))
    if fuses:
        fuse(model)
    before, raised = held(model), MemoryError("no memory") if rank else None
    with (
        mock.patch.object(context_changes, "share_state", side_effect=raised),
        pytest.raises(Exception, match="no memory") as error,
    ):
        context_parallel(model, mesh)
    same = held(model) == before
    tokens, labels = batch(0, device)
    context = context_parallel(model, mesh)
    loss = context.loss(labels, input_ids=tokens)
    open_ = held(model)
    context.close()
    return str(error.value), same, bool(loss.isfinite()), held(model) == before != open_


@pytest.mark.parametrize("fuses", [False, True], ids=["layers", "fused"])
def test_a_rank_that_fails_leaves_all_models_as_they_were(fuses: bool) -> None:
    for said, *right in on_ranks(failing, 2, "gloo", fuses):
        assert "no memory" in said and right == [True] * 3
