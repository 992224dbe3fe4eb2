# SPDX-License-Identifier: Apache-2.0
"""expert_sum and expert_sum_backward: cases, and bounds from float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels import ops
from tests.ops.contract import (
    BF16,
    FP16,
    FP32,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Made,
    Refusal,
    near,
)


class Sum(NamedTuple):
    """As many rows of y as places of M tokens with J each; every fifth token lacks its last."""

    n: int
    j: int
    dtype: torch.dtype = BF16
    weights: torch.dtype | None = FP32

    def __call__(self, m: Made) -> Arguments:
        there = [t % 5 != 4 or j < self.j - 1 for t in range(m.rows) for j in range(self.j)]
        backwards = iter(range(sum(there) - 1, -1, -1))
        places = [next(backwards) if each else -1 for each in there]
        place = torch.tensor(places, dtype=torch.int32, device=m.device).view(m.rows, self.j)
        weights = None
        if self.weights is not None:
            weights = m.randn(m.rows, self.j, dtype=self.weights)
        return m.randn(max(1, sum(there)), self.n, dtype=self.dtype), place, weights


class Backward(NamedTuple):
    forward: Sum

    def __call__(self, m: Made) -> Arguments:
        y, place, weights = self.forward(m)
        return m.randn(m.rows, self.forward.n, dtype=y.dtype), y, place, weights


def rows_of(y: Tensor, place: Tensor) -> Tensor:
    """float64 [T, J, N], zeros for no expert."""
    return y[place.long().clamp(min=0)].double().masked_fill((place < 0)[..., None], 0.0)


def bound(call: Call) -> Iterator[Checked]:
    """One rounding at the store, and fp32 sums of J products."""
    y, place, weights = call.before
    rows = rows_of(y, place)
    if weights is not None:
        rows = torch.where((place < 0)[..., None], 0.0, rows * weights.double()[..., None])
    yield near("out", call.results[0], rows.sum(1), rows.abs().sum(1), 2 * place.shape[1] + 2)


def bound_backward(call: Call) -> Iterator[Checked]:
    """dy: a product of two, rounded once more. dw: an fp32 sum of N products."""
    dout, y, place, weights = call.before
    dy, dweights = call.results
    there = place >= 0
    exact = (dout.double()[:, None] * weights.double()[..., None])[there]
    yield near("dy", dy[place[there].long()], exact, exact.abs(), 2)
    products = dout.double()[:, None] * rows_of(y, place)
    products = torch.where(there[..., None], products, 0.0)
    yield near("dw", dweights, products.sum(2), products.abs().sum(2), dout.shape[1] + 2)


Y, PLACE = torch.zeros(4, 8), torch.zeros(2, 2, dtype=torch.int32)
REFUSALS = {
    "places of floats": Refusal({"place": PLACE.float()}, TypeError, "place must be int32 on cpu, found torch.float32"),
    "weights": Refusal({"weights": torch.ones(3, 2)}, ValueError, r"weights must be \[2, 2\], found \[3, 2\]"),
}  # fmt: skip
CONTRACTS = (
    Contract(
        ops.expert_sum,
        {
            "bf16": Case(Sum(24, 2)),
            "fp16, bf16 weights": Case(Sum(33, 1, FP16, BF16)),
            "no weights, fp32": Case(Sum(24, 3, FP32, None)),
        },
        bound,
        {"500x4096, 8": Case(Sum(4096, 8), 500), "7x1100, 2": Case(Sum(1100, 2, FP16), 7)},
        {"y": Y, "place": PLACE, "weights": torch.ones(2, 2)},
        REFUSALS,
    ),
    Contract(
        ops.expert_sum_backward,
        {
            "bf16": Case(Backward(Sum(24, 2))),
            "fp16, fp16 weights": Case(Backward(Sum(33, 1, FP16, FP16))),
            "fp32": Case(Backward(Sum(24, 3, FP32, FP32))),
        },
        bound_backward,
        {"500x4096, 8": Case(Backward(Sum(4096, 8)), 500)},
        {"dout": torch.zeros(2, 8), "y": Y, "place": PLACE, "weights": torch.ones(2, 2)},
        {
            **REFUSALS,
            "dout": Refusal({"dout": torch.zeros(2, 9)}, ValueError, r"dout must be \[2, 8\], found \[2, 9\]"),
        },
    ),
)  # fmt: skip
