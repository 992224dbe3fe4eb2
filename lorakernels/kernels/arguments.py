# SPDX-License-Identifier: Apache-2.0
"""Arguments that csrc takes in place of tensors: dtypes by name, a stream, a tensor's part of an FP8 state."""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.values import Scale, Scaling, Where


def scale_of(scaling: Scaling | None, partials: Tensor | None = None) -> Scale:
    """A tensor's own elements of its FP8 state; none where the state is neither read nor written."""
    if scaling is None or not scaling.delayed:
        return Scale(0, 0, partials)
    state, column, _ = scaling
    first = state.data_ptr() + 4 * column
    return Scale(first, first + 4 * (state.shape[0] - 1) * state.stride(0), partials)


def name(dtype: torch.dtype) -> str:
    """torch's, without "torch."."""
    return str(dtype).removeprefix("torch.")


def format_of(fp8_dtype: torch.dtype) -> str:
    """ "e4m3fn" or "e5m2"."""
    return name(fp8_dtype).removeprefix("float8_")


def where(tensor: Tensor) -> Where:
    """The current stream of its GPU; as Triton asks for it, without a torch.cuda.Stream."""
    index = tensor.get_device()
    return Where(torch._C._cuda_getCurrentRawStream(index), index)
