# SPDX-License-Identifier: Apache-2.0
"""timing.py: what a sample is, what is said where the device was not measured, how often a step is repeated."""

from __future__ import annotations

import math
import time

import pytest
import torch

from benchmarks.lib import timing as timed
from benchmarks.lib.rows import ratio

CPU = torch.device("cpu")


def test_spread_and_what_could_not_be_measured() -> None:
    timing = timed.Timing.of([5e-3, 1e-3, 2e-3, 3e-3, 4e-3, 6e-3], 7e-6)
    assert timing.columns() == {"ms": 3.5, "p20 ms": 2.0, "p80 ms": 5.0, "CPU µs": 7.0}
    late = timed.Timing.of([math.nan], 7e-6).columns()
    assert late["ms"] == "host-bound" and late["CPU µs"] == 7.0
    assert ratio(late["ms"], 2.0) == "" and ratio(3.0, 2.0) == 1.5


def test_samples_of_two_runs_are_one_timing() -> None:
    both = timed.Timing.of_samples([([1.0, 2.0], [9.0]), ([3.0], [7.0, 8.0])])
    assert (both.low, both.median, both.high, both.host) == (1.0, 2.0, 3.0, 8.0)
    late = timed.Timing.of_samples([([1.0], [5.0]), ([], [7.0])])
    assert math.isnan(late.median) and late.host == 6.0, "one run that the host fell behind in"


def test_as_many_repetitions_as_the_time_allows() -> None:
    within = timed.repetitions_within
    assert within(0.02, lambda: time.sleep(2e-3), CPU, 50) in range(3, 11)
    assert within(1.0, lambda: None, CPU, 50) == 50
    assert within(0.0, lambda: None, CPU, 50) == 3


@pytest.mark.gpu
def test_a_slow_host_is_not_in_the_device_s_time() -> None:
    device = torch.device("cuda")
    x = torch.zeros(1024, device=device)

    def dawdle() -> None:
        x.add_(1)
        time.sleep(2e-3)
        x.add_(1)

    timing = timed.time_of(dawdle, device, 5)
    assert timing.host > 2e-3
    assert timing.high < 0.2e-3  # two tiny kernels: some µs


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_is_host_bound() -> None:
    timing = timed.time_of(lambda: torch.cuda.synchronize(), torch.device("cuda"), 2)
    assert timing.columns()["ms"] == "host-bound"
