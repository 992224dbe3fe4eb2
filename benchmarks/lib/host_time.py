# SPDX-License-Identifier: Apache-2.0
"""The time that the host needs to enqueue a forward and its backward, while it waits for nothing.

A chain of a few layers is enqueued behind a kernel that spins, so that the device is never idle. After the backward,
the device must still spin. Else the host may have waited: for a value, or for room in the driver's queue of about
1,024 launches. Such a sample is thrown away, and the next spin is twice as long.

A whole step has more launches than that queue holds. Behind a spin the host would wait for room, so a step has none.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from benchmarks.lib.rows import Row
from benchmarks.lib.timing import synchronize

CYCLES = 2e9  # a second of the fastest clock; a slower one spins for longer than asked
LEAD = 2.0  # seconds of the first spin over those of the host's last call
LONGEST = 1.0  # seconds; a host that is not done by then waits for the device
FEWEST = 3  # rounds, however little time there is
COLUMNS = ("least µs", "µs", "fwd µs", "allocations", "behind µs", "samples")


class HostWaited(Exception):
    """No spin was long enough: the host's time has waiting in it."""


class Sample(NamedTuple):
    """Seconds of the host for the forward and for both, and until the device was done after that; what the caching
    allocator was asked for meanwhile."""

    forward: float
    both: float
    behind: float
    allocations: int


@dataclass
class Work:
    """What is timed: `forward()`, then `backward` of its result.

    `before` and `after` belong to an iteration and are not timed. All of it runs inside a context of `within`. `units`
    is the number of layers. `spins` says whether the device spins ahead of it, and `lead` for how many seconds.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], object] | None
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None
    within: Callable[[], AbstractContextManager[None]] = nullcontext
    units: int = 1
    spins: bool = True
    lead: float = field(default=0.0, init=False)
    samples: list[Sample] = field(default_factory=list, init=False)

    def run(self) -> Any:
        """An iteration that is not timed; returns the forward's result."""
        with self.within():
            self.before()
            y = self.forward()
            if self.backward is not None:
                self.backward(y)
            self.after()
        return y

    def sample(self, device: torch.device) -> None:
        """Add a sample.

        Raises:
            HostWaited: it was not done in LONGEST.
        """
        found, waited = self._timed(device)
        if not self.lead:  # the first call only tells how long the spin must be
            self.lead = LEAD * found.both
            found, waited = self._timed(device)
        while waited:
            if self.lead >= LONGEST:
                raise HostWaited(
                    f"the host waits for the device, or for room in its queue ({LONGEST:g} s)"
                )
            self.lead = min(2 * self.lead, LONGEST)
            found, waited = self._timed(device)
        self.samples.append(found)

    def _timed(self, device: torch.device) -> tuple[Sample, bool]:
        """(a sample, whether the device was done with its spin before the host was done)."""
        with self.within():
            self.before()
            synchronize(device)
            asked = _allocations(device)
            gate = _spin(self.lead, device) if self.spins else None
            gc.disable()
            try:
                began = time.perf_counter()
                y = self.forward()
                between = time.perf_counter()
                if self.backward is not None:
                    self.backward(y)
                ended = time.perf_counter()
            finally:
                gc.enable()
            waited = gate is not None and gate.query()
            synchronize(device)
            behind = time.perf_counter() - ended
            asked = _allocations(device) - asked
            del y
            self.after()
        return Sample(between - began, ended - began, behind, asked), waited


def _spin(seconds: float, device: torch.device) -> torch.cuda.Event | None:
    """Keep a GPU busy; the event is reached when it is not any more."""
    if device.type != "cuda" or not seconds:
        return None
    gate = torch.cuda.Event()
    torch.cuda._sleep(int(seconds * CYCLES))
    gate.record()
    return gate


def _allocations(device: torch.device) -> int:
    """How often the caching allocator was asked for memory so far."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))


def sample_in_turn(
    works: dict[str, list[Work]], device: torch.device, rounds: int, until: float
) -> dict[str, Exception]:
    """Sample each once a round, in order and then in reverse order.

    There are `rounds` rounds, or as many as begin before `time.monotonic()` is `until`, but FEWEST at least. Returns
    why one could not be sampled, by name; its samples are gone.
    """
    failed: dict[str, Exception] = {}
    names = list(works)
    for number in range(rounds):
        if number >= FEWEST and time.monotonic() > until:
            break
        for name in names if number % 2 == 0 else names[::-1]:
            try:
                for work in works[name] if name not in failed else ():
                    work.sample(device)
            except Exception as why:
                failed[name] = why
                for work in works[name]:
                    work.samples.clear()
    return failed


def columns(works: list[Work], device: torch.device) -> Row:
    """µs and allocations per layer: of one work, or the slope between a short and a long one."""
    if not works or not works[-1].samples:
        return dict.fromkeys(COLUMNS, "")
    long, short = works[-1], works[0] if len(works) > 1 else None
    units = long.units - (short.units if short else 0)

    def per_unit(of: Callable[[list[float]], float], pick: Callable[[Sample], float]) -> float:
        taken = of([pick(s) for s in short.samples]) if short else 0.0
        return (of([pick(s) for s in long.samples]) - taken) / units

    median: Any = statistics.median
    split, on_gpu = long.backward is not None, device.type == "cuda"
    behind = median([sample.behind for sample in long.samples])
    return {
        "least µs": round(per_unit(min, lambda s: s.both) * 1e6, 1),
        "µs": round(per_unit(median, lambda s: s.both) * 1e6, 1),
        "fwd µs": round(per_unit(median, lambda s: s.forward) * 1e6, 1) if split else "",
        "allocations": round(per_unit(median, lambda s: s.allocations), 1) if on_gpu else "",
        "behind µs": "" if long.spins else round(behind * 1e6, 1),
        "samples": len(long.samples),
    }
