# SPDX-License-Identifier: Apache-2.0
"""The phases of a run and how long each still takes: lines where there is no terminal, else bars.

A phase is called with (done, total), as `load_quantized` calls its `progress`. It reads a clock and nothing else, so
that no device is waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from lorakernels.train.errors import require

FIRST = 2.0  # seconds of a phase before its first line; a shorter one has none
SOONEST, LATEST = 10.0, 30.0  # seconds between lines
APART, MOST = 0.1, 512  # seconds between the marks of an estimate, and how many it keeps

Observer = Callable[[int, int], None]  # called with (done, total)
Amount = Callable[[int, int], str]  # writes (done, total)
Say = Callable[[str], None]
Clock = Callable[[], float]


def nobody(done: int, total: int) -> None:
    """An observer that shows nothing."""


def in_bytes(done: int, total: int) -> str:
    size, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{done / size:,.1f} of {total / size:,.1f} {name}"


def in_batches(done: int, total: int) -> str:
    return f"{done:,} of {total:,} batches"


def in_steps(done: int, total: int) -> str:
    return f"step {done}/{total}"


def duration(seconds: float) -> str:
    """Seconds in words: 25 s, 4 min 10 s or 1 h 02 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


class Estimate:
    """The time left, by the later half of what was seen.

    First steps, which compile kernels and capture graphs, are soon no part of it. Evaluations and checkpoints between
    steps are.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=MOST)
        self._count = 0

    def add(self, now: float, done: int) -> None:
        marks = self._marks
        if marks and done < marks[-1][1]:  # the run went back
            marks.clear()
            self._count = 0
        if marks and now - marks[-1][0] < APART:
            return
        marks.append((now, done))
        self._count += 1
        if len(marks) > max(2, self._count // 2):
            marks.popleft()

    def left(self, total: int) -> float | None:
        """Seconds; None before two parts of the work were timed. The first part does not count."""
        if self._count < 3:
            return None
        (start, before), (stop, done) = self._marks[0], self._marks[-1]
        return (total - done) * (stop - start) / (done - before) if done > before else None


class Phase:
    """One phase of a run. This base class shows nothing.

    Attributes:
        name: what is written before the amounts.
        amount: writes them.
        began: whether a part was done.
        note, more: what else is written of the part done last; a bar has no room for `more`.
    """

    def __init__(self, name: str, amount: Amount = in_bytes) -> None:
        self.name, self.amount = name, amount
        self.began = False
        self.note = self.more = ""

    def __enter__(self) -> Phase:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self, done: int, total: int) -> None:
        """The amount that was done earlier, as in a resumed run."""

    def __call__(self, done: int, total: int) -> None:
        self.began = True

    def close(self) -> None:
        pass


class Lines(Phase):
    """A phase in lines: after FIRST seconds, then every LATEST, and one at its end.

    With `every`, as of training, a line may follow after SOONEST seconds where `every` divides what is done, and the
    last part has a line in any case.
    """

    def __init__(
        self, name: str, amount: Amount, every: int, say: Say, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(name, amount)
        self.every, self.say, self.clock = every, say, clock
        self.estimate, self._ended = Estimate(), False
        self._began = clock()
        self._said: float | None = None

    def start(self, done: int, total: int) -> None:
        self.estimate.add(self.clock(), done)

    def __call__(self, done: int, total: int) -> None:
        super().__call__(done, total)
        if self._ended:
            return
        now = self.clock()
        self.estimate.add(now, done)
        self._ended = done >= total
        if self._ended:
            self._end(done, total, now - self._began)
        else:
            self._show(done, total, now)

    def _end(self, done: int, total: int, seconds: float) -> None:
        if self.every or seconds >= FIRST:
            self.say(self._text(done, total, self.note, self.more, f"in {duration(seconds)}"))

    def _show(self, done: int, total: int, now: float) -> None:
        if self._is_due(done, total, now):
            self._said = now
            self.say(self._text(done, total, self.note, self.more, self._left(total)))

    def _is_due(self, done: int, total: int, now: float) -> bool:
        left = self.estimate.left(total)
        if left is not None and left < FIRST:  # the line of its end follows soon
            return False
        if self._said is None:
            waited = now - self._began
            return waited >= LATEST or (left is not None and waited >= FIRST)
        divides = self.every and done % self.every == 0
        return now - self._said >= (SOONEST if divides else LATEST)

    def _left(self, total: int) -> str:
        left = self.estimate.left(total)
        return f"{duration(left)} left" if left else ""

    def _text(self, done: int, total: int, *more: str) -> str:
        return "  ".join(filter(None, [f"{self.name} {self.amount(done, total)}", *more]))


class Bars:
    """The bars of a terminal, one for each open phase. The bar of a phase that ended disappears."""

    def __init__(self, console: Any) -> None:
        self.console = console
        self._shown: Any = None

    def add(self, name: str) -> Any:
        if self._shown is None:
            rich = require("rich.progress")
            text = rich.TextColumn("{task.fields[text]}", markup=False)
            columns = rich.TextColumn("{task.description}", markup=False), rich.BarColumn(), text
            self._shown = rich.Progress(*columns, console=self.console, transient=True)
            self._shown.start()
        return self._shown.add_task(name, total=None, text="")

    def update(self, bar: Any, done: int, total: int, text: str) -> None:
        self._shown.update(bar, completed=done, total=total, text=text)

    def remove(self, bar: Any) -> None:
        if len(self._shown.tasks) > 1:
            self._shown.remove_task(bar)
            return
        self._shown.stop()
        self._shown = None


class Bar(Lines):
    """A phase as a bar, with a line at its end."""

    def __init__(
        self, name: str, amount: Amount, every: int, say: Say, clock: Clock, bars: Bars
    ) -> None:
        super().__init__(name, amount, every, say, clock)
        self._bars, self._bar = bars, bars.add(name)

    def start(self, done: int, total: int) -> None:
        super().start(done, total)
        self._show(done, total, self.clock())

    def _end(self, done: int, total: int, seconds: float) -> None:
        self._show(done, total, seconds)
        super()._end(done, total, seconds)

    def _show(self, done: int, total: int, _now: float) -> None:
        parts = self.amount(done, total), self.note, self._left(total)
        self._bars.update(self._bar, done, total, "  ".join(filter(None, parts)))

    def close(self) -> None:
        self._bars.remove(self._bar)
