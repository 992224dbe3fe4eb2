# SPDX-License-Identifier: Apache-2.0
"""Token losses of a chunk of logits, and the logits' gradient in their place, on CUDA (cross_entropy_triton.py).

logits [M, V] of bf16, fp16 or fp32, labels int64 [M], losses fp32 [M]. One kernel reads the logits twice, the second
time
mostly from L2, and writes dz over them: 6MV bytes in bf16, where PyTorch's fp32 log-softmax, its exponential and the
one-hot subtraction move 26MV and hold 8MV.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import checks, reference_layer

BLOCK = 8192  # logits a program holds at a time
WARPS = 16


def cross_entropy_(
    logits: Tensor, labels: Tensor, factor: Tensor | None, ignore_index: int, gradient: bool
) -> Tensor:
    """`reference_layer.cross_entropy_` in one kernel; float64 takes the reference itself."""
    if logits.dtype == torch.float64:
        return reference_layer.cross_entropy_(logits, labels, factor, ignore_index, gradient)
    checks.cross_entropy(logits, labels, factor)
    if not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous, found strides {logits.stride()}")
    losses = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    if labels.numel() == 0:
        return losses
    from lorakernels.kernels.cross_entropy_triton import launch

    with torch.cuda.device(logits.device):
        launch(losses, logits, labels, factor, ignore_index, gradient, BLOCK, WARPS)
    return losses
