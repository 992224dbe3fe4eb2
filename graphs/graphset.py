# SPDX-License-Identifier: Apache-2.0
"""A captured block of steps, where in it the replay stands, and how far the iteration is that replays blocks."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from .backend import Backend
from .errors import ReplayError
from .handed import ExposedBuffer, storage_uses
from .order import Direction, Order, ReplayOrderError, Step
from .replay import GraphedCall


class IterationProgress:
    """An iteration's, over all sets of graphs that replay in it."""

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


class NoGraphs:
    """In place of a set while a block is recorded: it takes no call."""

    position = 0
    forwards = (None,)


class BlockGraphs:
    """One set of graphs. The microbatches of `order` are those of one block."""

    def __init__(self, order: Order, progress: IterationProgress, backend: Backend) -> None:
        self.order, self.progress, self.backend = order, progress, backend
        self.anchor = torch.zeros((), device=backend.device, requires_grad=True)
        self.microbatches = order.num_microbatches
        self.repeats = max(1, progress.num_microbatches // self.microbatches)
        self.position = self.blocks = 0
        self.calls: list[GraphedCall] = []
        self.forwards: list[GraphedCall | None] = [None] * len(order)
        self.exposed: list[
            tuple[int, ExposedBuffer]
        ] = []  # chained; the step after which nobody may have it
        self.checks: list[list[ExposedBuffer]] = [[] for _ in order]
        self.trial = True

    def start(self) -> None:
        """The first iteration hands out copies only, and finds out who keeps them."""
        for death, exposed in self.exposed:
            self.checks[(death + 1) % len(self.order)].append(exposed)

    def stream(self) -> int:
        found, progress = self.backend.stream(), self.progress
        if found != progress.stream:
            if progress.stream is not None and (
                self.position or progress.done % progress.num_microbatches
            ):
                name = self.order.layers[self.order[self.position].layer]
                raise ReplayError(name, "stream", hex(progress.stream), hex(found))
            progress.stream = found
        return found

    def advance(self, position: int) -> None:
        self.position = position + 1
        if self.position == len(self.checks):
            self.position = 0
            self.blocks += 1
            self.progress.done += self.microbatches
            if self.trial and self.blocks > self.repeats:
                self.end_trial()

    def end_trial(self) -> None:
        """From now on, what nobody kept is handed out without a copy."""
        self.trial = False
        for _, exposed in self.exposed:
            exposed.copy, exposed.version = exposed.kept, -1
        self.checks = [[h for h in exposed if not h.copy] for exposed in self.checks]

    def check_released(self, checks: list[ExposedBuffer]) -> None:
        """Refuse to launch while somebody has what this launch may overwrite."""
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
                    "modified in place since (README, rule 6): discard_iteration()",
                )

    def _refuse_held(self, exposed: ExposedBuffer) -> NoReturn:
        exposed.copy = True
        raise ReplayError(
            exposed.layer,
            exposed.name,
            "nobody to hold it once the next layer has read it, as in the iteration after capture",
            "something that does (a variable, a list, an autograd graph of eager code); it is handed out as a copy "
            "from now on: discard_iteration() and repeat this one",
        )

    def refuse_order(self, step: Step, stale: bool = False) -> NoReturn:
        if not self.calls:
            name = self.order.layers[step.layer]
            raise ReplayError(name, "graphs", "captured ones", "graphs that reset() has dropped")
        expected = self.order[self.position]
        reason = "replay of a forward that is over" if stale else "replay out of order"
        raise ReplayOrderError(reason, self.position, expected, step, self.order.layers)

    def refuse_forward(self, layer: int) -> NoReturn:
        done = sum(
            s.layer == layer and s.direction is Direction.FORWARD
            for s in self.order.steps[: self.position]
        )
        self.refuse_order(Step(layer, done, Direction.FORWARD))

    def end_iteration(self) -> None:
        if self.position or self.progress.partial:
            found, expected = None, self.order[self.position]
            reason = "replay ended early"
            raise ReplayOrderError(reason, self.position, expected, found, self.order.layers)
        self.progress.restart()

    def rewind(self) -> None:
        """Give up the iteration that is running."""
        self.position, self.progress.stream = 0, None
        self.progress.restart()
        for call in self.calls:
            call.generation += 1

    def take_graphs(self) -> dict[Step, Any]:
        """The executable graphs, which then outlive `destroy`."""
        taken: dict[Step, Any] = {}
        for call in self.calls:
            taken |= {
                call.forward_step: call.forward_graph,
                call.backward_step: call.backward_graph,
            }
        self.destroy(graphs=False)
        return taken

    def destroy(self, graphs: bool = True) -> None:
        """Free everything, although the caller's autograd graphs may still hold the calls."""
        for call in self.calls:
            call.drop(graphs)
        self.calls.clear()
        self.forwards.clear()
        self.exposed.clear()
        self.checks.clear()
        self.backend.release()
