# SPDX-License-Identifier: Apache-2.0
"""The graphs of one captured block of steps."""

from __future__ import annotations

from typing import Any, NoReturn

from ..device.backend import Backend
from ..plan.order import Direction, Order, ReplayOrderError, Step
from .cursor import IterationProgress, ReplayCursor
from .graphed_call import GraphedCall


class NoGraphs:
    """Stands in for a block's graphs while a block is recorded: it takes no call."""

    position = 0
    forwards = (None,)


class BlockGraphs(ReplayCursor):
    """The captured calls of one block, and where their replay stands. `forwards`: by the position of the forward."""

    def __init__(self, order: Order, progress: IterationProgress, backend: Backend) -> None:
        super().__init__(order, progress, backend)
        self.calls: list[GraphedCall] = []
        self.forwards: list[GraphedCall | None] = [None] * len(order)

    def refuse_forward(self, layer: int) -> NoReturn:
        """A forward of `layer` is not the next step."""
        done = sum(
            s.layer == layer and s.direction is Direction.FORWARD
            for s in self.order.steps[: self.position]
        )
        self.refuse_order(Step(layer, done, Direction.FORWARD))

    def end_iteration(self) -> None:
        """ReplayOrderError unless the iteration is complete."""
        if self.position or self.progress.partial:
            actual, expected = None, self.order[self.position]
            reason = "replay ended early"
            raise ReplayOrderError(reason, self.position, expected, actual, self.order.layers)
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
        self.dropped = True
        for call in self.calls:
            call.drop(graphs)
        self.calls.clear()
        self.forwards.clear()
        self.exposed.clear()
        self.checks.clear()
        self.backend.release()
