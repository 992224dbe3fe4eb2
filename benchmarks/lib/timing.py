# SPDX-License-Identifier: Apache-2.0
"""How long a step takes, on the device and on the host.

On a GPU a sample is the time between two events on the stream. Before the first event, the stream is given work: the
L2 cache is overwritten, as often as it takes. The host then has enqueued the whole step and the second event before
the device reaches the first. So the step's kernels run back to back, and no launch is in their time. That is checked
for every sample. One that fails is thrown away, and the work before the next is doubled. The host's time for a call is
measured apart.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.lib.rows import Row

SCRUB_BYTES = 256 << 20  # an H200's L2 holds 50 MiB
MAX_SCRUBS = 256  # 20 ms of lead on an H200; a step that is still late waits for the device
COPY_BYTES = {
    "cuda": 192 << 20,
    "cpu": 8 << 20,
}  # moves what 8192 × 8192 bf16 forward does: twice that


@dataclass(frozen=True)
class Timing:
    """Seconds. `median`, `low` (20th percentile) and `high` (80th) of the device (nan if the host could not get ahead
    of it), `host` of the calling thread per call. On a CPU both are the time of the call."""

    median: float
    low: float
    high: float
    host: float

    @classmethod
    def of(cls, samples: list[float], host: float) -> Timing:
        ordered, last = sorted(samples), len(samples) - 1
        return cls(
            statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], host
        )

    @classmethod
    def of_samples(cls, runs: list[tuple[list[float], list[float]]]) -> Timing:
        """Of the (device, host) samples of several runs together; nan if the device caught up in one of them."""
        late = not all(device for device, _ in runs)
        samples = [sample for device, _ in runs for sample in device]
        host = statistics.median([sample for _, samples in runs for sample in samples])
        return cls.of([math.nan] if late else samples, host)

    def columns(self) -> Row:
        ms = (self.median, self.low, self.high)
        named = zip(("ms", "p20 ms", "p80 ms"), ms, strict=True)
        values = {name: "host-bound" if math.isnan(v) else round(v * 1e3, 5) for name, v in named}
        return {**values, "CPU µs": round(self.host * 1e6, 1)}


# Of a provider that is not timed; the column before these says why
NOT_TIMED: Row = {"ms": "", "p20 ms": "", "p80 ms": "", "CPU µs": ""}


def time_of(
    step: Callable[[], object],
    device: torch.device,
    repetitions: int,
    setup: Callable[[], object] = lambda: None,
) -> Timing:
    """Time `step`; `setup` runs before each call and is not in its time."""
    return Timing.of_samples([samples_of(step, device, repetitions, setup)])


def samples_of(
    step: Callable[[], object],
    device: torch.device,
    repetitions: int,
    setup: Callable[[], object] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Seconds of the device and of the host, after three calls that are not timed; see `_device_samples`."""
    for _ in range(3):
        setup()
        step()
    host = _host_samples(step, setup, device, repetitions)
    on_gpu = device.type == "cuda"
    return (_device_samples(step, setup, device, repetitions) if on_gpu else host), host


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU is always done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def repetitions_within(
    seconds: float, step: Callable[[], object], device: torch.device, at_most: int
) -> int:
    """How often `step` fits into `seconds`, by one call that waits for the device; at least 3."""
    step()
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return max(3, min(at_most, int(seconds / max(time.perf_counter() - start, 1e-9))))


def _host_samples(
    step: Callable[[], object],
    setup: Callable[[], object],
    device: torch.device,
    repetitions: int,
) -> list[float]:
    samples = []
    for _ in range(repetitions):
        setup()
        synchronize(device)
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    return samples


def _device_samples(
    step: Callable[[], object],
    setup: Callable[[], object],
    device: torch.device,
    repetitions: int,
) -> list[float]:
    """Seconds per call; empty when the device caught up with the host however long its lead."""
    scrub = torch.empty(SCRUB_BYTES, dtype=torch.uint8, device=device)
    scrubs, pairs = 2, []
    while len(pairs) < repetitions:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        setup()
        for _ in range(scrubs):
            scrub.zero_()
        scrub.max()  # its lines leave the L2 cache written back: nobody else's sample pays for that
        start.record()
        step()
        end.record()
        if not start.query():  # the device has yet to begin, and everything is enqueued
            pairs.append((start, end))
        elif scrubs < MAX_SCRUBS:
            scrubs *= 2
        else:
            return []
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def heat(device: torch.device, seconds: float = 0.5) -> None:
    """Keep a GPU busy, so that what is timed first does not profit from the clock of a cold one."""
    if device.type != "cuda":
        return
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(50):
            torch.mm(a, a)
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, repetitions: int) -> float:
    """Bytes per second, read and written ones together, of a copy on the device."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = time_of(lambda: target.copy_(source), device, repetitions).median
    return 2 * source.numel() / seconds


def measured_floor(device: torch.device, repetitions: int) -> tuple[float, dict[str, str]]:
    """(copy bandwidth in bytes per second, that and the time of an empty sample as facts of the run)."""
    bandwidth = copy_bandwidth(device, repetitions)
    empty = time_of(lambda: None, device, repetitions).median
    return bandwidth, {
        "copy GB/s": f"{bandwidth / 1e9:.0f}",
        "empty sample µs": f"{empty * 1e6:.2f}",
    }
