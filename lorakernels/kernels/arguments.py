# SPDX-License-Identifier: Apache-2.0
"""What csrc takes instead of tensors and values: addresses, dtype names and a stream, as integers and strings."""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.numerics.dropout import dropout_threshold
from lorakernels.values import Dropout, Scaling


def address(tensor: Tensor | None) -> int:
    """0 for a tensor that is not there or has no elements."""
    return 0 if tensor is None else tensor.data_ptr()


def state_address(scaling: Scaling | None, row: int) -> int:
    """Address of this tensor's element in a row of its FP8 state; 0 where the state is neither read nor written."""
    if scaling is None or not scaling.delayed:
        return 0
    state = scaling.state
    return state.data_ptr() + 4 * (row % state.shape[0] * state.stride(0) + scaling.column)


def draw(dropout: Dropout | None) -> tuple[int, int, int, int, int]:
    """(slot's address, site, threshold, row0, col0): what a kernel draws a mask from."""
    if dropout is None:
        return 0, 0, 0, 0, 0
    slot, p, site, row0, col0, _ = dropout
    return slot.data_ptr(), site, dropout_threshold(p), row0, col0


def name(dtype: torch.dtype) -> str:
    """torch's, without "torch."."""
    return str(dtype).removeprefix("torch.")


def stream(device: torch.device) -> int:
    """The current stream of `device`, which has an index; as Triton asks for it, without a torch.cuda.Stream."""
    return torch._C._cuda_getCurrentRawStream(device.index)
