# SPDX-License-Identifier: Apache-2.0
"""`lora_linear` by plans (plans/node.py): its ops are asked once a shape, and each way is one call of csrc."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.autograd.linear_node import LinearNode
from lorakernels.autograd.linear_values import Adapter, Call, SharedNumbers
from lorakernels.plans.node import UNPLANNED, Misaligned, NodePlan, NodeRun, Operands, apply_planned
from lorakernels.plans.routing import are_plain, is_plain
from lorakernels.plans.stand_in import Recording, Site, column_address
from lorakernels.values import Weight

MAX_PLANS = 1024  # a plan has a few KB


class Shapes(NamedTuple):
    """All that a linear layer's launches depend on, but for the addresses, the FP8 column and the dropout site.

    Attributes:
        rows: M.
        weight: (N, K).
        rank: R; 0 without an adapter.
        dtypes: of x, bias, A and B; None for what is not there.
        layout: whether the layer keeps Wᵀ.
        drops: whether a mask is drawn.
        state: shape of the FP8 state's tensors.
        numbers: of the call, as `LoRASpec.numbers` has them.
        needs: which of x, bias, A and B need a gradient.
        device: index of the GPU.
    """

    rows: int
    weight: torch.Size
    rank: int
    dtypes: tuple[torch.dtype | None, ...]
    layout: bool
    drops: bool
    state: torch.Size
    numbers: SharedNumbers
    needs: tuple[bool, ...]
    device: int

    def operands(self, recording: Recording) -> Operands:
        (n, k), r = self.weight, self.rank
        x, bias, A, B = self.dtypes
        tensors = [
            None if x is None else recording.tensor((self.rows, k), x),
            None if bias is None else recording.tensor((n,), bias),
            None if A is None else recording.tensor((r, k), A),
            None if B is None else recording.tensor((n, r), B),
        ]
        weight = Weight(
            recording.tensor((n, k), torch.uint8),
            recording.tensor((1,), torch.float32),
            recording.tensor((k, n), torch.uint8) if self.layout else None,
        )
        slot = recording.tensor((2,), torch.int64) if self.drops else None
        states = [recording.column(self.state) for _ in range(2)]
        spec = replace(self.numbers.spec, site=Site(0))
        given = [t for t in (*tensors, *weight, slot, *states) if t is not None]
        return Operands(given, (*tensors, weight, Call(spec, slot, *states)), (0, 1, 2, 3))


@lru_cache(MAX_PLANS)
def linear_plan(shapes: Shapes) -> NodePlan | None:
    """The plan of a linear layer; None where its ops do not run on kernels that can be recorded."""
    device = torch.device("cuda", shapes.device)
    try:
        return NodePlan(LinearNode, device, shapes.operands, (*shapes.needs, False, False))
    except UNPLANNED:
        return None


def planned_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, adapter: Adapter, call: Call
) -> Tensor | None:
    """y [M, N] of a contiguous x [M, K] on a GPU; None where the ops have to run."""
    lora_A, lora_B, _ = adapter
    spec, slot, state, state_dy = call
    if (
        state is None
        or state_dy is None
        or weight.scale_inv is None
        or not len(x)
        or not is_plain()
    ):
        return None
    others = [t for t in (*weight, slot) if t is not None]
    if not are_plain(x, bias, lora_A, lora_B, state, *others):
        return None
    tensors, grad = (x, bias, lora_A, lora_B), torch.is_grad_enabled()
    shapes = Shapes(
        x.shape[0],
        weight.data.shape,
        0 if lora_A is None else lora_A.shape[0],
        tuple([None if t is None else t.dtype for t in tensors]),
        weight.t is not None,
        slot is not None,
        state.shape,
        spec.numbers,
        tuple([grad and t is not None and t.requires_grad for t in tensors]),
        x.get_device(),
    )
    plan = linear_plan(shapes)
    if plan is None:
        return None
    addresses = (column_address(state, spec.column), column_address(state_dy, spec.column))
    attributes: dict[str, Any] = {"state_dy": state_dy, "spec": spec}
    run = NodeRun(plan, others, addresses, (spec.site,), attributes)
    try:
        y: Tensor = apply_planned(run, *tensors)
    except Misaligned:
        return None
    return y
