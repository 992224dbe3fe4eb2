# SPDX-License-Identifier: Apache-2.0
"""energy.py: what is counted on a GPU, and what is said where nothing counts."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.lib import energy

CPU = torch.device("cpu")


def test_a_cpu_counts_no_joules_and_runs_nothing_for_it() -> None:
    calls: list[int] = []
    assert math.isnan(energy.joules(CPU))
    assert math.isnan(energy.joules_of(lambda: calls.append(1), CPU)) and not calls
    assert energy.shown(math.nan, 2) == "" and energy.shown(1.234, 2) == 1.23


@pytest.mark.gpu
def test_twice_the_work_takes_more_energy() -> None:
    device = torch.device("cuda")
    if math.isnan(energy.joules(device)):
        pytest.skip("NVML has no energy counter for this GPU")
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    once = energy.joules_of(lambda: a @ a, device)
    assert 0 < 1.5 * once < energy.joules_of(lambda: a @ a @ a, device)
