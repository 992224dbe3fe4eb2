# SPDX-License-Identifier: Apache-2.0
"""What several ops ask before anything is changed: ValueError naming argument, what was found, what is expected."""

from __future__ import annotations

import torch

from lorakernels.numerics.dropout import dropped_words
from lorakernels.values import Dropout


def slot(dropout: Dropout | None, device: torch.device) -> None:
    """A slot is int64 [2] on the tensors' device."""
    if dropout is None:
        return
    slot = dropout.slot
    if slot.shape != (2,) or slot.dtype != torch.int64 or slot.device != device:
        raise ValueError(
            f"slot must be int64 [2] on {device}, found {slot.dtype} {list(slot.shape)} on {slot.device}"
        )


def dropped(dropout: Dropout | None, rows: int, cols: int, device: torch.device) -> None:
    """A mask of [rows, cols] that is handed over is int32 [rows, dropped_words(cols)] without gaps on that device."""
    if dropout is None or dropout.dropped is None:
        return
    mask, shape = dropout.dropped, (rows, dropped_words(cols))
    fits = mask.shape == shape and mask.dtype == torch.int32 and mask.is_contiguous()
    if not fits or mask.device != device:
        raise ValueError(
            f"dropped must be contiguous int32 {list(shape)} on {device}, found {mask.dtype} "
            f"{list(mask.shape)} with strides {mask.stride()} on {mask.device}"
        )
