# SPDX-License-Identifier: Apache-2.0
"""The check of what attention is told of the longest packed document.

FlashAttention-2 computes no token behind that length, without a word. Where documents begin is known to the device
alone as a rule, so that the host cannot compare. There it is a device assertion, which a CUDA graph holds, too.
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

    On a GPU the host does not wait: a later call of CUDA's says "device-side assert triggered", and the rule that is
    broken stands on stderr. The process needs a restart then.

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
        if (found := int(np.diff(starts.numpy()).max())) > longest:
            raise ValueError(f"{_RULE}, found {longest} for one of {found}")
    elif why_not_csrc(capability(index)) is None:
        starts = starts.contiguous()
        extension().check_longest_document(
            starts.data_ptr(), documents, max(longest, 0), where(starts)
        )
    else:
        torch._assert_async((starts.diff() <= longest).all(), _RULE)
