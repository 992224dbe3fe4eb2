# SPDX-License-Identifier: Apache-2.0
"""Tensors derived from others that are made anew, and keep their memory: captured graphs read it at its address."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def form_of(x: Tensor | None) -> tuple[Any, ...] | None:
    """Shape, dtype and device; None of None."""
    return None if x is None else (x.shape, x.dtype, x.device)


def renewed(held: Tensor | None, made: Tensor) -> Tensor:
    """`held`, with the values of `made`, or `made` where `held` has another form.

    A tensor of torch's inference mode is not written either: autograd could not notice that.
    """
    if held is None or form_of(held) != form_of(made) or held.is_inference():
        return made
    return held.copy_(made)
