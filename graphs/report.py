# SPDX-License-Identifier: Apache-2.0
"""What a manager has captured, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphReport:
    """One graph. `capture_s` is wall time in seconds, instantiation and upload included."""

    layer: str
    microbatch: int
    direction: str
    nodes: dict[str, int]
    kernels: dict[str, int]
    capture_s: float


@dataclass(frozen=True)
class Report:
    """`pool_bytes`: what the graphs' pool holds, activations included; `driver_bytes`: what the driver took for the
    graphs beside it; `grad_bytes`: the slabs for gradients. `buffers` and `buffer_bytes` are the inputs, outputs and
    gradients that layers hand on, `unshared_*` what they were if every call had its own."""

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
        lines += [f"handed out as copies: {', '.join(self.copied)}"] if self.copied else []
        for g in self.graphs:
            nodes = ", ".join(f"{count} {kind}" for kind, count in sorted(g.nodes.items()))
            lines.append(f"  {g.layer} microbatch {g.microbatch} {g.direction}: {nodes}")
        return "\n".join(lines)
