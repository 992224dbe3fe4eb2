# SPDX-License-Identifier: Apache-2.0
"""Output during a run: bars on a terminal, otherwise lines, and on other ranks than the first nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from lorakernels.train.errors import require
from lorakernels.train.progress import Amount, Bar, Bars, Clock, Lines, Phase, in_bytes, in_steps
from lorakernels.train.run.loop import StepResult


class Reporter:
    """Shows how far a run is. ``say`` works at any time, ``step`` between ``start`` and ``stop``."""

    def __init__(
        self,
        label: str,
        log_every: int,
        quiet: bool = False,
        console: Any = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.label, self.log_every, self.clock = label, log_every, clock
        self.console = console or require("rich.console").Console(quiet=quiet)
        self._bars = Bars(self.console)
        self._training = Phase(label)

    def say(self, text: str) -> None:
        """Print one line as it is, without wrapping or markup."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = require("rich.table").Table(title=title)
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def phase(self, name: str, amount: Amount = in_bytes, every: int = 0) -> Phase:
        """A phase, to be entered as a context and called with (done, total). `every`: see `Lines`."""
        if self.console.quiet:
            return Phase(name, amount)
        arguments = name, amount, every, self.say, self.clock
        return Bar(*arguments, self._bars) if self.console.is_interactive else Lines(*arguments)

    def start(self, done: int, total: int) -> None:
        self._training = self.phase(self.label, in_steps, self.log_every)
        self._training.start(done, total)

    def step(self, step: int, total: int, result: StepResult, rates: dict[str, float]) -> None:
        loss = f"{result.loss:.4f}" if math.isfinite(result.loss) else str(result.loss)
        if result.skipped:
            self.say(
                f"step {step}: loss {loss}, gradient norm {result.grad_norm}: not finite, step skipped"
            )
        self._training.note = f"loss {loss}  {_speed(rates)}"
        self._training.more = (
            f"{result.seconds:.2f} s/step  lr {result.lr:.2e}  grad norm {result.grad_norm:.3g}"
        )
        self._training(step, total)

    def stop(self) -> None:
        self._training.close()
        self._training = Phase(self.label)


def _speed(rates: dict[str, float]) -> str:
    tflops = f", {rates['tflops']:.3g} TFLOP/s" if "tflops" in rates else ""
    mfu = f", MFU {100 * rates['mfu']:.2g} %" if "mfu" in rates else ""
    return f"{rates['tokens_per_s']:.0f} tokens/s{tflops}{mfu}"
