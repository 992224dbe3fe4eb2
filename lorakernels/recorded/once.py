# SPDX-License-Identifier: Apache-2.0
"""once_differentiable: torch's decorator of a backward, for one that reads tensors which train."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward(ctx, *grads)` with results that raise RuntimeError when they are differentiated.

    torch's own raises only if an incoming gradient requires grad. Under `create_graph=True` a constant one, such as
    a loss's, would give constants. But dx depends on A, B and x, so that a penalty on it would train nothing. As with
    torch's own, a call that names its inputs, as `backward(inputs=…)`, does not reach them. It does not raise.
    """
    once = function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            grads = tuple(map(_trained, grads))
        return once(ctx, *grads)

    return run


def _trained(grad: Tensor | None) -> Tensor | None:
    if grad is None or not grad.is_floating_point():
        return grad
    return grad.detach().requires_grad_()
