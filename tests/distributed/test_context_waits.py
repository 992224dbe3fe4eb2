# SPDX-License-Identifier: Apache-2.0
"""How often the host waits for the device in a forward over shared rows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import fuse
from lorakernels.parallel import context_parallel
from tests.distributed.context_models import DOCUMENTS, Way, batch, make, positions
from tests.processes import backend_on_gpus, on_ranks

pytestmark = pytest.mark.slow


def waits(rank: int, device: torch.device) -> dict[str, list[str]]:
    """Where the host waits, for each kind of call."""
    model = make(Way("fused, bf16", fused=True, dtype=torch.bfloat16), device)
    fuse(model)
    context = context_parallel(model, init_device_mesh(device.type, (2,)))
    tokens, labels = batch(0, device)
    starts = torch.tensor(DOCUMENTS, dtype=torch.int32, device=device)
    documents = {
        "cu_seq_lens_q": starts,
        "max_length_q": 12,
        "position_ids": positions().to(device),
    }
    placed = {"position_ids": torch.arange(tokens.shape[1], device=device)[None]}
    calls: dict[str, tuple[bool, dict[str, Any]]] = {
        "whole rows": (True, {}),
        "items": (True, {"items": 7}),
        "documents": (True, documents),
        "positions": (True, placed),
        "documents, not looked at": (False, {**documents, "items": 7}),
    }
    found = {}
    for name, (looks, inputs) in calls.items():
        context.checks_places = looks
        context.loss(labels, input_ids=tokens, **inputs)  # memory grows, kernels are compiled
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            context.loss(labels, input_ids=tokens, **inputs)
            torch.cuda.set_sync_debug_mode("default")
        found[name] = [
            f"{w.filename}:{w.lineno}" for w in said if "called a synchronizing" in str(w.message)
        ]
    return found


@pytest.mark.gpu
def test_the_host_waits_once_where_it_has_to_look() -> None:
    expected = {"documents": 1, "positions": 1}
    for found in on_ranks(waits, 2, backend_on_gpus(2)):
        counts = {name: len(places) for name, places in found.items() if places}
        assert counts == expected, found
