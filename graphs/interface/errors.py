# SPDX-License-Identifier: Apache-2.0
"""The errors of graph managers. Each names the layer, what was expected and what was found."""

from __future__ import annotations

import re

from ..plan.order import OrderError


class GraphError(RuntimeError):
    """Base of the errors below; `plan.order.OrderError` is the one for steps that run out of turn."""


class CaptureError(GraphError):
    """A layer could not be captured; nothing of the attempt is left and the layers run eagerly.

    Attributes: `layer`, `phase` ("check", "warm-up", "forward", "backward", …), `cuda` (CUDA's error name or None).
    """

    def __init__(self, layer: str, phase: str, reason: str, hint: str = "") -> None:
        super().__init__(layer, phase, reason, hint)
        self.layer, self.phase, self.reason, self.hint = layer, phase, reason, hint
        match = re.search(r"\bcudaError\w+", reason)
        self.cuda = match[0] if match else None

    def __str__(self) -> str:
        reason = self.reason.split("\n", 1)[0]
        if self.cuda and self.cuda not in reason:
            reason = f"{reason} ({self.cuda})"
        end = f". {self.hint}" if self.hint else ""
        return f"capture of layer {self.layer!r}, {self.phase}: {reason}{end}"


class ReplayError(GraphError):
    """A replay would compute something else than the eager layer; nothing has been launched.

    Attributes: `layer`, `what` (the thing that differs), `expected`, `actual`, and `recapture`: whether
    `GraphManager.recapture()` makes the present state the expected one.
    """

    def __init__(
        self, layer: str, what: str, expected: object, actual: object, recapture: bool = False
    ) -> None:
        super().__init__(layer, what, expected, actual, recapture)
        self.layer, self.what, self.expected, self.actual = layer, what, expected, actual
        self.recapture = recapture

    def __str__(self) -> str:
        end = "; manager.recapture() takes the present state" if self.recapture else ""
        return (
            f"replay of layer {self.layer!r}: {self.what}: expected {self.expected}, "
            f"found {self.actual}{end}"
        )


def explain(error: BaseException) -> str:
    """An explanation of an error of this package, and what to do about it."""
    if isinstance(error, CaptureError):
        return f"{error}\nNothing was changed. The layers run eagerly until capture() succeeds."
    if isinstance(error, ReplayError):
        todo = (
            "If the change is meant: recapture() between iterations."
            if error.recapture
            else "Discard the iteration, then call the layers as they were recorded, or inside disabled()."
        )
        return f"{error}\nNothing was launched. {todo}"
    if isinstance(error, OrderError):
        return (
            f"{error}\nGraphs share memory, so they replay in the recorded order only. discard_iteration() "
            "starts the next iteration; for another schedule: reset()."
        )
    return f"{type(error).__name__}: {error}\nNot an error of lorakernels.graphs."


_HINTS = (
    (
        (
            "CUDA generator",
            "CUDAGraph object",
            "offset for a CUDA generator",
            "seed during capture",
        ),
        "The layer draws from torch's CUDA generator, whose numbers a raw capture would freeze. Draw from a state in "
        "device memory (lorakernels: `layer.rng_state = PhiloxState(seed)`), or set that dropout to 0",
    ),
    (
        ("cudaErrorStreamCaptureImplicit",),
        "Work reached the default stream: a tensor or an autograd node that was made there was used again. "
        "Do not keep outputs of the layer's inner modules between calls",
    ),
    (
        ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
        "The layer waits for the device (.item(), .cpu(), print of a tensor, a shape that depends on data) or "
        "calls what a capture cannot hold",
    ),
    (
        ("cudaErrorStreamCaptureInvalidated",),
        "An earlier call inside the layer has broken the capture, usually one that waits for the device",
    ),
    (
        ("cudaErrorStreamCaptureUnjoined",),
        "Work forked to another stream was not joined: let the capture stream wait for that one at the end",
    ),
)


def hint_for(reason: str) -> str:
    """The usual cause of an error with this text; empty if it is unknown."""
    for signs, hint in _HINTS:
        if any(sign in reason for sign in signs):
            return hint
    return ""
