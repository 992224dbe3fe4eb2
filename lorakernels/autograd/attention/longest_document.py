# SPDX-License-Identifier: Apache-2.0
"""Check `max_length_q`, the tokens of the longest packed document, on the device.

FlashAttention-2 silently skips tokens after that length. The starts of documents are mostly on the device, so the host
cannot compare without waiting. The check is then a device assertion, which a CUDA graph records, too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lorakernels.device import capability, extension, why_not_csrc
from lorakernels.kernels.arguments import where

_RULE = "max_length_q must be at least the tokens of each document in cu_seq_lens_q"


def check_longest(starts: Tensor, longest: int) -> None:
    """Refuse documents of more than `longest` tokens.

    On a GPU the host does not wait: a later call of CUDA's says "device-side assert triggered", and stderr has the
    rule that was broken. The process needs a restart then.

    Args:
        starts: int32 [N + 1], where documents begin and the last one ends.
        longest: tokens, the `max_length_q` of a fused layer.

    Raises:
        ValueError: `starts` are on a CPU, and a document is longer.
    """
    documents, index = len(starts) - 1, starts.get_device()  # -1: of a CPU
    if documents < 1:
        return
    if index < 0:
        if (most := int(np.diff(starts.numpy()).max())) > longest:
            raise ValueError(f"{_RULE}, found {longest} for one of {most}")
    elif why_not_csrc(capability(index)) is None:
        starts = starts.contiguous()
        extension().check_longest_document(
            starts.data_ptr(), documents, max(longest, 0), where(starts)
        )
    else:
        torch._assert_async((starts.diff() <= longest).all(), _RULE)
