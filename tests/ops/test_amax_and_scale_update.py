# SPDX-License-Identifier: Apache-2.0
"""When amax_and_scale_update does nothing; tests/csrc/test_amax_and_scale_update.py has its numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorakernels import ops


def updated(states: list[Tensor], gated: bool) -> None:
    ops.amax_and_scale_update(*states, None, gated, 448.0, 57344.0, 0, False)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("gated", [False, True], ids=["asked for", "automatic"])
def test_recomputed_inside_a_backward_an_automatic_update_does_nothing(gated, compiled, device):
    torch._dynamo.reset()
    states = [torch.ones(3, 2, device=device) for _ in range(2)]
    before = [state.clone() for state in states]
    update = torch.compile(updated, fullgraph=True, backend="aot_eager") if compiled else updated
    x = torch.ones(1, device=device, requires_grad=True)
    x.register_hook(lambda grad: update(states, gated))
    (2 * x).sum().backward()
    for state, old in zip(states, before, strict=True):
        assert torch.equal(state, old) == gated
    update(states, gated)
    assert not any(map(torch.equal, states, before)), "outside of a backward it runs"
