# SPDX-License-Identifier: Apache-2.0
"""Parts of which only some gradients are needed: they are the bits of the backward that computes all of them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lorakernels import FrozenFP8Linear
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.layers import KINDS, cut
from lorakernels.values import Weight
from tests.distributed.tensor_layers import ADAPTER, CLASSES, K, N, Way, make, own, step_data
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
WAYS = [Way(by, sequence) for by in CLASSES for sequence in (False, True)]
FULL = frozenset(("x", *ADAPTER))


def gradients(layer: Any, x: Tensor, dy: Tensor, needs: frozenset[str]) -> dict[str, Tensor | None]:
    """{name: gradient} of a forward and backward of which these are needed."""
    torch.manual_seed(7)
    x = x.clone().requires_grad_("x" in needs)
    trained = {n: p for n in ADAPTER if (p := getattr(layer, n, None)) is not None}
    for name, parameter in trained.items():
        parameter.requires_grad_(name in needs).grad = None
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(dy)
    return {"x": x.grad} | {name: parameter.grad for name, parameter in trained.items()}


def equal(grad: Tensor | None, expected: Tensor | None) -> bool:
    if grad is None or expected is None:
        return grad is expected
    return torch.equal(grad, expected)


def frozen_part(way: Way, ranks: Ranks) -> Any:
    torch.manual_seed(3)
    bias = torch.nn.Parameter(torch.randn(N))
    layer = FrozenFP8Linear.from_weight(Weight(torch.randn(N, K)), bias, FrozenSpec(None))
    cut(layer, KINDS[way.by, False], ranks)
    return layer.train()


def compare(rank: int, device: torch.device) -> list[str]:
    """What differs from the gradients of a backward that computes all."""
    wrong = []
    for way in WAYS:
        adapted = make(
            CLASSES[way.by], way, device, tp_group=dist.group.WORLD, sequence_parallel=way.sequence
        )
        for layer in (adapted, frozen_part(way, adapted.ranks)):
            column, rows = way.by == "column", 0 if way.sequence else None
            x, dy = step_data(0, way, device)
            x = own(adapted.ranks, x, rows if column else 1)
            dy = own(adapted.ranks, dy, 1 if column else rows)
            all_of_them = gradients(layer, x, dy, FULL)
            assert all(grad is not None for grad in all_of_them.values())
            for chosen in product((False, True), repeat=len(all_of_them)):
                needs = frozenset(n for n, take in zip(all_of_them, chosen, strict=True) if take)
                if not needs:
                    continue
                for name, grad in gradients(layer, x, dy, needs).items():
                    if not equal(grad, all_of_them[name] if name in needs else None):
                        wrong.append(f"{way}, {type(layer).__name__}: {name} of {sorted(needs)}")
    return wrong


def test_each_gradient_alone_is_that_of_all() -> None:
    """Every subset: ranks enter the same exchanges, and what a gradient reads is saved."""
    assert on_ranks(compare, 2, "gloo") == [[], []]
