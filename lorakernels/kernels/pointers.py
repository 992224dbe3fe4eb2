# SPDX-License-Identifier: Apache-2.0
"""What csrc takes instead of tensors: addresses, dtype names and a stream, as integers and strings."""

from __future__ import annotations

import torch
from torch import Tensor


def address(tensor: Tensor | None) -> int:
    """0 for a tensor that is not there or has no elements."""
    return 0 if tensor is None else tensor.data_ptr()


def cell(state: Tensor | None, row: int, column: int) -> int:
    """Address of an element of an FP8 state, 0 without one."""
    if state is None:
        return 0
    return state.data_ptr() + 4 * (row % state.shape[0] * state.stride(0) + column)


def name(dtype: torch.dtype) -> str:
    """torch's, without "torch."."""
    return str(dtype).removeprefix("torch.")


def stream(device: torch.device) -> int:
    """The current stream of `device`, which has an index; as Triton asks for it, without a torch.cuda.Stream."""
    return torch._C._cuda_getCurrentRawStream(device.index)
