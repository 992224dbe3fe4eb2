# SPDX-License-Identifier: Apache-2.0
"""Joules that a GPU took, by NVML's counter of the whole board since the driver was loaded.

Under a power limit a kernel's time moves with the clock's history by several percent. The energy of a fixed amount of
work does not. The counter steps about ten times a second: 0.4 s between two readings at any time were off by up to a
quarter (fp8_grad_input.csv at cd7df5b). So work is counted from one of its steps to another, SECONDS later at least.
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

SECONDS = 0.3
BATCH_SECONDS = 5e-3  # of steps between two readings
STUCK = 2.0  # seconds after which a counter that has not moved does not count


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
    steps = _Steps(step, device)
    first = steps.until_it_moves(0.0)
    before = steps.done
    last = steps.until_it_moves(max(seconds, 50 * steps.seconds))  # a count is off by a step or two
    synchronize(device)
    return (last - first) / (steps.done - before)


class _Steps:
    """Steps that follow each other, some of them always enqueued: a reading of the counter takes a millisecond or more,
    in which the GPU must not rest."""

    def __init__(self, step: Callable[[], object], device: torch.device) -> None:
        self.step, self.device, self.done = step, device, 0
        step()
        synchronize(device)
        began = time.perf_counter()
        for _ in range(4):
            step()
        synchronize(device)
        self.seconds = max(time.perf_counter() - began, 1e-9) / 4
        self.batch = math.ceil(BATCH_SECONDS / self.seconds)
        self.ahead = self._enqueue()

    def _enqueue(self) -> torch.cuda.Event | None:
        """Another batch; the event behind it."""
        for _ in range(self.batch):
            self.step()
        return torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None

    def until_it_moves(self, seconds: float) -> float:
        """The counter when it moves, `seconds` after now at the earliest; nan if it does not."""
        seen, began = joules(self.device), time.perf_counter()
        while True:
            behind, self.ahead = self.ahead, self._enqueue()
            if behind is not None:
                behind.synchronize()
            self.done += self.batch
            now, passed = joules(self.device), time.perf_counter() - began
            if now != seen and passed >= seconds:
                return now
            if passed >= seconds + STUCK:
                return math.nan
            seen = now


def shown(value: float, digits: int) -> float | str:
    """A column's value: "" where nothing was counted."""
    return "" if math.isnan(value) else round(value, digits)
