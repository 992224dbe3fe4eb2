# SPDX-License-Identifier: Apache-2.0
"""Output during a run: a progress bar on a terminal, otherwise a line every few steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lorakernels.train.errors import require
from lorakernels.train.loop import StepResult


class Reporter:
    """Shows the progress between ``start`` and ``stop``. ``say`` works at any time."""

    def __init__(self, label: str, log_every: int, quiet: bool = False) -> None:
        self.label, self.log_every = label, log_every
        self.console = require("rich.console").Console(quiet=quiet)
        self._bar: Any = None
        self._task: Any = None

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

    def start(self, done: int, total: int) -> None:
        if not self.console.is_terminal or self.console.quiet:
            return
        rich = require("rich.progress")
        self._bar = rich.Progress(
            rich.TextColumn(self.label),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[numbers]}"),
            rich.TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task(self.label, total=total, completed=done, numbers="")
        self._bar.start()

    def step(self, step: int, total: int, result: StepResult, rates: dict[str, float]) -> None:
        loss = f"{result.loss:.4f}" if math.isfinite(result.loss) else str(result.loss)
        mfu = f", MFU {100 * rates['mfu']:.2g} %" if "mfu" in rates else ""
        numbers = (
            f"loss {loss}  {rates['tokens_per_s']:.0f} tokens/s, {rates['tflops']:.3g} TFLOP/s{mfu}"
        )
        if result.skipped:
            self.say(
                f"step {step}: loss {loss}, gradient norm {result.grad_norm}: not finite, step skipped"
            )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
        elif step % self.log_every == 0 or step == total:
            self.say(
                f"{self.label} step {step}/{total}  {numbers}  {result.seconds:.2f} s/step  "
                f"lr {result.lr:.2e}  grad norm {result.grad_norm:.3g}"
            )

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Reading:
    """Progress of `load_quantized`.

    It notes whether a value was read. On a terminal it shows one line that overwrites itself.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.began, self._console, self._shown = False, reporter.console, -1

    def __call__(self, done: int, total: int) -> None:
        self.began = True
        percent = 100 * done // max(total, 1)
        if percent == self._shown or not self._console.is_terminal:
            return
        self._shown = percent
        end = "\n" if done == total else "\r"
        self._console.print(
            f"loading {done / 1e9:.1f} of {total / 1e9:.1f} GB, {percent} %", end=end
        )
