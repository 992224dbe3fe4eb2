# SPDX-License-Identifier: Apache-2.0
"""energy.py: what is counted on a GPU, and what is said where nothing counts."""

from __future__ import annotations

import math
import time

import pytest
import torch

from benchmarks.lib import energy

CPU = torch.device("cpu")


def test_a_cpu_counts_no_joules_and_runs_nothing_for_it() -> None:
    calls: list[int] = []
    assert math.isnan(energy.joules(CPU))
    assert math.isnan(energy.joules_of(lambda: calls.append(1), CPU)) and not calls
    assert energy.shown(math.nan, 2) == "" and energy.shown(1.234, 2) == 1.23


@pytest.mark.parametrize("at", [0.0, 0.01, 0.05, 0.09])
def test_a_counter_that_steps_ten_times_a_second_is_off_by_little(
    monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    """Whenever it is read first. 700 W and steps of 1 ms are 0.7 J; 0.4 s from any time would be off by a quarter."""
    now = at

    def step() -> None:
        nonlocal now
        now += 1e-3

    monkeypatch.setattr(energy.time, "perf_counter", lambda: now)
    monkeypatch.setattr(energy, "joules", lambda device: 70.0 * math.floor(now * 10))
    assert energy.joules_of(step, CPU) == pytest.approx(0.7, rel=0.02)
    monkeypatch.setattr(energy, "joules", lambda device: 70.0)
    assert math.isnan(energy.joules_of(step, CPU)), "it stands still"


@pytest.mark.gpu
def test_what_is_counted_is_joules() -> None:
    """A board takes 20 to 2,000 W, whatever other processes do on it; so a unit that is wrong by 1,000 is seen."""
    device = torch.device("cuda")
    if math.isnan(energy.joules(device)):
        pytest.skip("NVML has no energy counter for this GPU")
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    steps, began = 0, time.perf_counter()

    def step() -> None:
        nonlocal steps
        steps += 1
        torch.mm(a, a)

    taken = energy.joules_of(step, device)
    assert 20 < taken * steps / (time.perf_counter() - began) < 2000
