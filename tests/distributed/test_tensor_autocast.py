# SPDX-License-Identifier: Apache-2.0
"""A split embedding and head under autocast, beside one process under autocast and one without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels.parallel import parallelize
from tests.distributed.tensor_layers import relative
from tests.distributed.tensor_models import Way, batch, loss_of, make
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
WAY = Way("", False, fp8=False, dropout=0.0)


def gradients(model: nn.Module) -> dict[str, Any]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def errors(rank: int, device: torch.device) -> dict[str, tuple[float, float]]:
    """{loss: largest relative errors of a gradient, of the ranks and of one process} from fp32 without autocast."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, whole, plain = (make(WAY, device) for _ in range(3))
    split = parallelize(model, mesh["tp"], vocabulary=True)
    tokens = batch(0, device)
    loss_of(plain, tokens).backward()
    exact, found = gradients(plain), {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(whole, tokens)
    loss.backward()
    alone = max(relative(g, exact[n]) for n, g in gradients(whole).items())
    for name in ("logits", "loss"):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (
                loss_of(model, tokens) if name == "logits" else split.loss(tokens, input_ids=tokens)
            )
        loss.backward()
        ours = split.whole_gradients()
        assert ours.keys() == exact.keys()
        found[name] = max(relative(g, exact[n]) for n, g in ours.items()), alone
    return found


def test_gradients_under_autocast_are_as_exact_as_those_of_one_process() -> None:
    """Each product rounds to bf16, 2^-9, in both. Their sums have other orders: half as much again is allowed."""
    for found in on_ranks(errors, 2, "gloo"):
        for ranks, alone in found.values():
            assert 0 < ranks <= 1.5 * alone <= 2.0**-4, found
