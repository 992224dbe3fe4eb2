# SPDX-License-Identifier: Apache-2.0
"""Joules that a GPU took, by NVML's counter of the whole board since the driver was loaded.

Under a power limit a kernel's time moves with the clock's history by several percent. The energy of a fixed amount of
work does not. The counter steps every few tens of milliseconds, so work is repeated for SECONDS between two readings.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from benchmarks.lib.timing import synchronize

SECONDS = 0.4


def joules(device: torch.device) -> float:
    """Since the driver was loaded; nan on a CPU, and where NVML has no such counter."""
    if device.type != "cuda":
        return math.nan
    found = _counter(str(torch.cuda.get_device_properties(device).uuid))
    if found is None:
        return math.nan
    library, handle = found
    energy = ctypes.c_ulonglong()
    failed = library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy))
    return math.nan if failed else energy.value / 1e3


@cache
def _counter(uuid: str) -> tuple[Any, ctypes.c_void_p] | None:
    """(NVML, its handle of the GPU)."""
    handle = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(
            f"GPU-{uuid}".encode(), ctypes.byref(handle)
        )
    except (OSError, AttributeError):
        return None
    return None if failed else (library, handle)


def joules_of(step: Callable[[], object], device: torch.device, seconds: float = SECONDS) -> float:
    """Of one step among steps that follow each other; nan where nothing counts."""
    if math.isnan(joules(device)):
        return math.nan
    step()
    synchronize(device)
    before, steps, until = joules(device), 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(4):
            step()
        steps += 4
        synchronize(device)
    return (joules(device) - before) / steps


def shown(value: float, digits: int) -> float | str:
    """A column's value: "" where nothing was counted."""
    return "" if math.isnan(value) else round(value, digits)
