# SPDX-License-Identifier: Apache-2.0
"""`save="offload"`: the input of a layer waits for the layer's backward in host memory.

    forward of layer i     its input is copied to the host, beside its kernels
    backward of layer i    the input of layer i - 1 is copied to the device, beside its kernels

The copies run on a stream of their own. When a layer ends, the layers' stream waits for the copy that ran beside it.
So memory is reused in the order of one stream, and a layer can be captured alone. The newest input also stays on the
device until another is kept, since its backward comes first.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from lorakernels.fusion.pinned import HostBuffers
from lorakernels.graphs import pool_in_use


class Inputs:
    """The inputs of a model's layers, in the order of their forwards."""

    def __init__(self) -> None:
        self._waiting: list[weakref.ref[Input]] = []
        self._buffers = HostBuffers()
        self._beside: dict[torch.device, torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model, or a loaded one, begins without inputs."""
        return Inputs, ()

    def keep(self, x: Tensor) -> Input:
        """Start to copy `x`, the input of a layer whose forward is about to run.

        Raises:
            RuntimeError: the host has no memory to pin, or a graph is captured by another library.
        """
        if x.is_cuda and torch.cuda.is_current_stream_capturing() and pool_in_use() is None:
            raise RuntimeError(
                'save="offload" in a graph of torch.cuda: capture it with lorakernels.graphs, which keeps the host '
                "memory of its graphs apart"
            )
        made = Input(self, x.detach().contiguous(), x.requires_grad)
        live = self._live()
        if live:
            live[-1].leave_device()
        self._waiting = [weakref.ref(other) for other in (*live, made)]
        return made

    def leave(self, arrived: Input) -> Input | None:
        """`arrived` waits no longer. Returns the input that was kept before it and waits still."""
        live = self._live()
        at = live.index(arrived) if arrived in live else 0
        self._waiting = [weakref.ref(other) for other in live if other is not arrived]
        return live[at - 1] if at else None

    def take(self, like: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Host memory for `like`, and the list that it is to be given back to."""
        return self._buffers.take(like)

    def copy(self, to: Tensor, source: Tensor, device: torch.device) -> torch.cuda.Event | None:
        """Copy beside the layers, after what their stream was given so far. The event is the copy's end."""
        if device.type != "cuda":
            to.copy_(source)
            return None
        if device not in self._beside:
            self._beside[device] = torch.cuda.Stream(device)
        stream = self._beside[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        return stream.record_event()

    def _live(self) -> list[Input]:
        return [found for found in (ref() for ref in self._waiting) if found is not None]


class Input:
    """One layer's input. It lives as long as the autograd graph of the layer's forward."""

    def __init__(self, inputs: Inputs, x: Tensor, requires_grad: bool) -> None:
        self._inputs, self._device, self._requires_grad = inputs, x.device, requires_grad
        self._host, self._free = inputs.take(x)
        self._here: Tensor | None = x  # on the device
        self._earlier: Input | None = None  # whose copy runs beside this one's layer
        self._end = inputs.copy(self._host, x, self._device)

    def __del__(self) -> None:
        if hasattr(self, "_host"):
            self._free.append(self._host)

    def joined(self, x: Tensor) -> Tensor:
        """`x`, the layer's input. When its gradient is there, the copy beside the layer's backward is waited for."""
        joined: Tensor = _Joined.apply(x, self) if self._requires_grad else x
        return joined

    def settle(self) -> None:
        """The layers' stream waits for the copy that was started last."""
        if self._end is not None:
            torch.cuda.current_stream(self._device).wait_event(self._end)
            self._end = None

    def leave_device(self) -> None:
        self._here = None

    def bring(self) -> Tensor:
        """The input on the device, for the recomputation of its layer. The one before it begins to come as well."""
        earlier = self._inputs.leave(self)
        self._fetch()
        self.settle()
        x, self._here = self._here, None
        assert x is not None
        if earlier is not None and self._requires_grad:
            earlier._fetch()
            self._earlier = earlier
        return x.detach().requires_grad_(self._requires_grad)

    def settle_earlier(self) -> None:
        """At the end of the layer's backward."""
        if self._earlier is not None:
            self._earlier.settle()
            self._earlier = None

    def _fetch(self) -> None:
        if self._here is None:
            self._here = torch.empty_like(self._host, device=self._device, pin_memory=False)
            self._end = self._inputs.copy(self._here, self._host, self._device)


class _Joined(torch.autograd.Function):
    """The identity. Of the nodes of a layer, its backward runs last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Input) -> Tensor:
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.kept.settle_earlier()
        return dx, None
