# SPDX-License-Identifier: Apache-2.0
"""Options that `GraphManager` and `StepGraph` have in common."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ..device.backend import Backend, CudaBackend, check_device
from ..plan.order import check_count


@dataclass(frozen=True)
class GraphOptions:
    """Options: how calls of new shapes are treated, and how graphs are captured.

    Args:
        on_new_shape: what a call does that is like no captured one: "error" refuses it; "eager" runs it eagerly and
            warns once; "capture" runs it eagerly and captures further graphs for it, with a pool of their own.
        max_shapes: how many shapes "capture" captures; at least 1. Further shapes run eagerly, after one warning.
        mode: which CUDA calls of other threads a capture tolerates, "relaxed" or "thread_local"; see `CudaBackend`.
        backend: makes the backend of each capture; by default CUDA graphs on the device of the parameters.
        together: for layers that communicate with other ranks: makes a context that raises on all ranks what one raises
            inside. A capture that fails on one rank then fails on all. All ranks have to capture at the same time.

    Raises:
        ValueError: an argument is not one of the above.
    """

    on_new_shape: str = "error"
    max_shapes: int = 8
    mode: str = "relaxed"
    backend: Callable[[], Backend] | None = None
    together: Callable[[], AbstractContextManager[None]] = nullcontext

    def __post_init__(self) -> None:
        check_choice("on_new_shape", self.on_new_shape, ("error", "eager", "capture"))
        check_choice("mode", self.mode, ("relaxed", "thread_local"))
        check_count("max_shapes", self.max_shapes)

    def check(self, device: torch.device) -> None:
        """ValueError unless tensors on `device` can be captured."""
        if self.backend is None:
            check_device(device)

    def make_backend(self, device: torch.device) -> Backend:
        return CudaBackend(device, self.mode) if self.backend is None else self.backend()


class WarnOnce:
    """Warns about each `key` once. The warning points three frames up, at the user's call of a layer or a step."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
