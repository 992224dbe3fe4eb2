# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for tensors of which a rank reads a part or nothing, until adapters are drawn for the whole model.

They hold no values of the model. All FP8 matrices are views of one block of bytes. Any other tensor is one number,
expanded to its shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.modules.linear.weights import scales_shape
from lorakernels.recipes import BlockScaling
from lorakernels.values import Weight


class StandIns:
    """Stand-ins on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def weight(self, shape: torch.Size, blocks: BlockScaling | None) -> Weight:
        """A stand-in for an FP8 weight [N, K]."""
        size = shape.numel()
        if size > self._bytes.numel():
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._device)
        data = self._bytes[:size].view(shape)
        scales = (1,) if blocks is None else scales_shape(data)
        return Weight(data, torch.ones(scales, device=self._device))

    def tensor(self, like: Tensor, shape: torch.Size | None = None) -> Tensor:
        """A stand-in for any other tensor, with the dtype of `like`, and its shape unless another is given."""
        zero = torch.zeros((), dtype=like.dtype, device=self._device)
        return zero.expand(like.shape if shape is None else shape)
