# SPDX-License-Identifier: Apache-2.0
"""Parameters as the rows of one matrix, in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _storage_of(x: Tensor) -> int:
    """The address of the memory that x is in, wherever x begins there."""
    return x.untyped_storage().data_ptr()


@torch.no_grad()
def join_rows(parameters: Sequence[Tensor]) -> Tensor:
    """One contiguous matrix. Each parameter becomes a view of its rows.

    Parameters that lie one behind the other stay where they are. The others are copied.
    """
    counts = [p.shape[0] for p in parameters]
    if _are_adjacent(parameters):
        first = parameters[0].data
        return first.as_strided((sum(counts), first.shape[1]), first.stride())
    whole = parameters[0].data.new_empty(sum(counts), parameters[0].shape[1])
    for parameter, part in zip(parameters, whole.split(counts), strict=True):
        part.copy_(parameter.data)
        parameter.data = part
    return whole


def _are_adjacent(parameters: Sequence[Tensor]) -> bool:
    """Whether each parameter begins where the one before it ends, in one storage."""
    at = parameters[0].data_ptr()
    for parameter in parameters:
        elsewhere = parameter.data_ptr() != at or _storage_of(parameter) != _storage_of(
            parameters[0]
        )
        if elsewhere or not parameter.is_contiguous():
            return False
        at += parameter.numel() * parameter.element_size()
    return True
