# SPDX-License-Identifier: Apache-2.0
"""Reports of captured graphs, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GraphReport:
    """One graph.

    Attributes:
        nodes, kernels: how many there are, by kind and by name.
        capture_s: wall time in seconds, instantiation and upload included.
        made: "instantiated"; "updated" if `recapture` gave an executable graph new addresses; "instantiated: …" with
            the reason if it could not.
        shape: the number of the captured shape, counted from 0.
    """

    layer: str
    microbatch: int
    direction: str
    nodes: dict[str, int]
    kernels: dict[str, int]
    capture_s: float
    made: str = "instantiated"
    shape: int = 0


@dataclass(frozen=True)
class Report:
    """The captured graphs, over all shapes.

    Attributes:
        phase: the manager's.
        microbatches_captured: microbatches of the longest captured block.
        buffers, buffer_bytes: the inputs, outputs and gradients that layers hand on.
        unshared_buffers, unshared_bytes: the same if every call had buffers of its own.
        copied: names of the buffers that eager code gets as copies.
        pool_bytes: what the graphs' pools hold, activations included.
        driver_bytes: what the driver took for the graphs besides.
        grad_bytes: the memory for gradients of parameters.
        capture_s: wall time in seconds.
        shapes: the inputs of the first call, for each shape.
    """

    phase: str
    graphs: tuple[GraphReport, ...] = ()
    microbatches_captured: int = 0
    buffers: int = 0
    buffer_bytes: int = 0
    unshared_buffers: int = 0
    unshared_bytes: int = 0
    copied: tuple[str, ...] = ()
    pool_bytes: int = 0
    driver_bytes: int = 0
    grad_bytes: int = 0
    capture_s: float = 0.0
    shapes: tuple[str, ...] = ()

    @classmethod
    def of_shapes(cls, reports: Sequence[Report], **more: Any) -> Report:
        """The sum of the reports of several shapes; `more`: fields that belong to none of them."""
        summed = "graphs shapes buffers buffer_bytes unshared_buffers unshared_bytes pool_bytes"
        values: dict[str, Any] = {
            name: sum((getattr(r, name) for r in reports[1:]), getattr(reports[0], name))
            for name in f"{summed} driver_bytes capture_s".split()
        }
        longest = max(r.microbatches_captured for r in reports)
        return cls(reports[0].phase, microbatches_captured=longest, **values, **more)

    @property
    def saved_bytes(self) -> int:
        return self.unshared_bytes - self.buffer_bytes

    @property
    def kernels(self) -> int:
        return sum(sum(g.kernels.values()) for g in self.graphs)

    def __str__(self) -> str:
        if not self.graphs:
            return f"{self.phase}: nothing captured"
        lines = [
            f"{self.phase}: {len(self.graphs)} graphs of {self.microbatches_captured} microbatch(es), "
            f"{self.kernels} kernels, captured in {self.capture_s:.2f} s",
            f"{self.buffers} buffers of {self.buffer_bytes / 1e6:.1f} MB between layers; "
            f"without sharing {self.unshared_buffers} of {self.unshared_bytes / 1e6:.1f} MB",
            f"pool {self.pool_bytes / 1e6:.1f} MB, driver {self.driver_bytes / 1e6:.1f} MB, "
            f"gradients {self.grad_bytes / 1e6:.1f} MB",
        ]
        if len(self.shapes) > 1:
            lines += [f"shape {i}: {shape}" for i, shape in enumerate(self.shapes)]
        if updated := sum(g.made == "updated" for g in self.graphs):
            lines.append(f"recaptured: {updated} of {len(self.graphs)} graphs by an update")
        lines += [f"handed out as copies: {', '.join(self.copied)}"] if self.copied else []
        for g in self.graphs:
            nodes = ", ".join(f"{count} {kind}" for kind, count in sorted(g.nodes.items()))
            shape = f"shape {g.shape} " if len(self.shapes) > 1 else ""
            why_not = f" ({g.made})" if g.made.startswith("instantiated:") else ""
            lines.append(
                f"  {shape}{g.layer} microbatch {g.microbatch} {g.direction}: {nodes}{why_not}"
            )
        return "\n".join(lines)
