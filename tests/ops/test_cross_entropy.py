# SPDX-License-Identifier: Apache-2.0
"""What cross_entropy_'s kernel alone refuses; tests/ops/cases/cross_entropy.py has the rest."""

from __future__ import annotations

import pytest
import torch

from lorakernels import ops


def test_on_cuda_logits_with_gaps_are_refused() -> None:
    logits, labels = torch.ones(5, 3).t(), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"logits must be contiguous, found strides \(1, 3\)"):
        ops.cross_entropy_.run(logits, labels, None, -100, True)
