# SPDX-License-Identifier: Apache-2.0
"""alpha · a b with fp32 accumulation and one rounding, on the tensor cores: what the PyTorch forms of the ops share."""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha · a b, [M, K] × [K, N] of one dtype; cuBLAS multiplies alpha before it rounds."""
    out = a.new_empty(a.shape[0], b.shape[1])
    return torch.addmm(out, a, b, beta=0.0, alpha=alpha)
