# SPDX-License-Identifier: Apache-2.0
"""The position of a replay: in its block of steps, and in the iteration that is made of blocks."""

from __future__ import annotations

from typing import NoReturn

import torch

from ..device.backend import Backend
from ..interface.errors import ReplayError
from ..plan.order import Order, ReplayOrderError, Step
from .buffers import ExposedBuffer, storage_uses


class IterationProgress:
    """How far an iteration has come, over all captured blocks that replay in it."""

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.done = 0  # microbatches replayed
        self.eager = False  # some ran eagerly, in place of a block
        self.stream: int | None = None

    def restart(self) -> None:
        self.done, self.eager = 0, False

    @property
    def partial(self) -> bool:
        return bool(self.done % self.num_microbatches) and not self.eager


class ReplayCursor:
    """The next step of a captured block, and the buffers that eager code must have let go of before it.

    `order` counts the microbatches of one block. The first replayed iteration is the trial. In it every buffer is
    handed out as a copy, and the cursor finds out which of them eager code keeps.
    """

    def __init__(self, order: Order, progress: IterationProgress, backend: Backend) -> None:
        self.order, self.progress, self.backend = order, progress, backend
        self.anchor = torch.zeros((), device=backend.device, requires_grad=True)
        self.microbatches = order.num_microbatches
        self.repeats = max(1, progress.num_microbatches // self.microbatches)
        self.position = self.blocks = 0
        # Chained buffers, each with the last step at which eager code may hold it
        self.exposed: list[tuple[int, ExposedBuffer]] = []
        self.checks: list[list[ExposedBuffer]] = [[] for _ in order]
        self.trial, self.dropped = True, False

    def start(self) -> None:
        """The capture is complete: the trial begins."""
        for death, exposed in self.exposed:
            self.checks[(death + 1) % len(self.order)].append(exposed)

    def stream(self) -> int:
        """The current stream, as an integer; ReplayError if it changes within an iteration."""
        stream, progress = self.backend.stream(), self.progress
        if stream != progress.stream:
            if progress.stream is not None and (
                self.position or progress.done % progress.num_microbatches
            ):
                name = self.order.layers[self.order[self.position].layer]
                raise ReplayError(name, "stream", hex(progress.stream), hex(stream))
            progress.stream = stream
        return stream

    def advance(self, position: int) -> None:
        """The step at `position` was launched."""
        self.position = position + 1
        if self.position == len(self.checks):
            self.position = 0
            self.blocks += 1
            self.progress.done += self.microbatches
            if self.trial and self.blocks > self.repeats:
                self.end_trial()

    def end_trial(self) -> None:
        """From now on, buffers that eager code did not keep are handed out without a copy."""
        self.trial = False
        for _, exposed in self.exposed:
            exposed.copy, exposed.version = exposed.kept, -1
        self.checks = [[x for x in exposed if not x.copy] for exposed in self.checks]

    def check_released(self, checks: list[ExposedBuffer]) -> None:
        """Refuse to launch while somebody has a buffer that this launch may overwrite."""
        for exposed in checks:
            if exposed.copy:
                if self.trial:
                    exposed.probe()
            elif storage_uses(exposed.cdata) > exposed.base:
                self._refuse_held(exposed)
            elif exposed.version >= 0 and exposed.alias._version != exposed.version:
                raise ReplayError(
                    exposed.layer,
                    exposed.name,
                    "the values that its graph wrote, which a backward may need",
                    "modified in place since (graphs/README.md, rule 6): discard_iteration()",
                )

    def _refuse_held(self, exposed: ExposedBuffer) -> NoReturn:
        exposed.copy = True
        raise ReplayError(
            exposed.layer,
            exposed.name,
            "no reference to it once the next layer has read it, as in the iteration after capture",
            "something that does (a variable, a list, an autograd graph of eager code); it is handed out as a copy "
            "from now on: discard_iteration() and repeat this one",
        )

    def refuse_order(self, step: Step, stale: bool = False) -> NoReturn:
        if self.dropped:
            name = self.order.layers[step.layer]
            raise ReplayError(name, "graphs", "captured ones", "graphs that reset() has dropped")
        expected = self.order[self.position]
        reason = "replay of a forward that is over" if stale else "replay out of order"
        raise ReplayOrderError(reason, self.position, expected, step, self.order.layers)
