# SPDX-License-Identifier: Apache-2.0
"""What quantize_lora_down does with a dropped NaN; tests/ops/cases/quantize_lora_down.py has the rest."""

from __future__ import annotations

import torch

from lorakernels.numerics.dropout import dropout_keep
from lorakernels.ops import quantize_lora_down
from tests.ops.contract import BF16, Made


def test_a_dropped_nan_stays_out_of_s(device):
    """It is in the amax, as x8 has it."""
    made = Made(device, 64)
    scaling, dropout, lora_A = made.scaling("kept"), made.dropout(0.5), made.randn(16, 128)
    x = torch.where(dropout_keep(dropout, 64, 128), made.randn(64, 128, dtype=BF16), torch.nan)
    _, _, s = quantize_lora_down(x, lora_A, scaling, dropout)
    assert s.isfinite().all() and scaling.state[0, 1].isnan()
