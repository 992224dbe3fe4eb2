# SPDX-License-Identifier: Apache-2.0
"""How a recorder sees a backward: by a node on a layer's outputs, and by what runs on the Python stack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree


def mark_outputs(output: Any, reached: Callable[[], None]) -> Any:
    """`output`, with all tensors that require grad as outputs of one new node; None if no tensor requires grad.

    `reached` is called when a backward comes to that node.
    """
    leaves, spec = pytree.tree_flatten(output)
    tensors = {id(x): x for x in leaves if isinstance(x, Tensor) and x.requires_grad}
    if not tensors:
        return None
    marks = dict(zip(tensors, _BackwardMark.apply(reached, *tensors.values()), strict=True))
    return pytree.tree_unflatten([marks.get(id(x), x) for x in leaves], spec)


class _BackwardMark(torch.autograd.Function):
    """Passes tensors and gradients through, and calls `reached` when autograd arrives."""

    @staticmethod
    def forward(ctx: Any, reached: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reached = reached
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.reached()
        return None, *grads


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def enclosing_contexts() -> list[BackwardCFunction]:
    """Contexts of the autograd Functions whose forward or backward is running, innermost first."""
    contexts: dict[BackwardCFunction, None] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, BackwardCFunction):
                contexts[first] = None
        frame = frame.f_back
    return list(contexts)
