# SPDX-License-Identifier: Apache-2.0
"""A dropout mask as bits, for ops that read it instead of drawing it."""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, why_not_csrc
from lorakernels.kernels.arguments import where
from lorakernels.numerics.dropout import drawn_mask, dropped_bits, dropped_words, drops
from lorakernels.values import Dropout, Sizes

COLUMN_MULTIPLE = 8  # of col0, for csrc to draw the mask


def drawn_by_csrc(dropout: Dropout) -> bool:
    """Whether csrc's kernels draw this mask as bits."""
    return drops(dropout) and dropout.col0 % COLUMN_MULTIPLE == 0


def drawn_bits(dropout: Dropout, rows: int, cols: int) -> Tensor:
    """int32 [rows, dropped_words(cols)]: the mask's bits, drawn by a kernel that does nothing else."""
    slot = dropout.slot
    by_csrc = slot.is_cuda and drawn_by_csrc(dropout)
    if not by_csrc or why_not_csrc(capability_of(slot.device)):
        return dropped_bits(drawn_mask(dropout, rows, cols))
    dropped = slot.new_empty((rows, dropped_words(cols)), dtype=torch.int32)
    extension().dropped_bits(dropped, Sizes(rows, cols), dropout, where(slot))
    return dropped
