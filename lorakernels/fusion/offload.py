# SPDX-License-Identifier: Apache-2.0
"""Activation offload: a layer's input, or its gate and up, wait for backward in host memory.

    forward of layer i     activations of layer i - 1 are copied to the host while the layer computes
    backward of layer i    activations of layer i - 1 are copied to the device while the layer computes

The copies run on a stream of their own. When a layer ends, the layers' stream waits for the copies that ran during it.
So memory is reused in the order of one stream, and a layer can be captured alone. Activations of the newest layer stay
on the device until another layer runs, since its backward comes first.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from lorakernels.fusion.host_buffers import HostBuffers
from lorakernels.graphs import Pool, pool_in_use


class ActivationOffload:
    """The activations of one model's layers, in the order of their forwards, and the host buffers for them."""

    def __init__(self) -> None:
        self._visits: list[weakref.ref[Visit]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.buffers = HostBuffers()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model, or a loaded one, keeps nothing yet."""
        return ActivationOffload, ()

    def visit(self, h: Tensor) -> Visit:
        """Begin a layer's forward with input `h`, and start to copy the previous layer's activations to the host.

        Raises:
            RuntimeError: the host has no memory to pin, or a graph is captured by another library.
        """
        pool = pool_in_use()
        if h.is_cuda and pool is None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "offload_activations in a graph of torch.cuda: capture it with lorakernels.graphs, which keeps the "
                "host memory of its graphs apart"
            )
        live = self._live(pool)
        made = Visit(self, h, pool, live[-1] if live else None)
        self._visits = [ref for ref in self._visits if ref() is not None] + [weakref.ref(made)]
        return made

    def before(self, visit: Visit) -> Visit | None:
        """The visit of the previous layer, which runs backward next."""
        live = self._live(visit.pool)
        index = live.index(visit) if visit in live else 0
        return live[index - 1] if index else None

    def copy(self, to: Tensor, source: Tensor, device: torch.device) -> torch.cuda.Event | None:
        """Copy on a side stream, after everything that the layers' stream has queued so far.

        Returns the event that marks the end of the copy. A CPU copies at once, and there is no event.
        """
        if device.type != "cuda":
            to.copy_(source)
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        return stream.record_event()

    def _live(self, pool: Pool | None) -> list[Visit]:
        """Visits in `pool` that have not begun backward. Graphs that were captured into a pool see their own only."""
        visits = [visit for visit in (ref() for ref in self._visits) if visit is not None]
        return [visit for visit in visits if visit.pool is pool and not visit.is_back]


class Visit:
    """One forward of one layer, until its backward. It lives as long as the autograd graph."""

    def __init__(
        self, offload: ActivationOffload, h: Tensor, pool: Pool | None, before: Visit | None
    ) -> None:
        self.offload, self.device, self.pool = offload, h.device, pool
        self.is_back = self._is_joined = False
        self._kept: list[weakref.ref[Kept]] = []
        self._copies = [] if before is None else before.kept()
        for kept in self._copies:
            kept.send()

    def keep(self, x: Tensor) -> Kept:
        """`x` for the layer's backward."""
        made = Kept(self, x)
        self._kept.append(weakref.ref(made))
        return made

    def kept(self) -> list[Kept]:
        """The tensors that are still needed."""
        return [kept for kept in (ref() for ref in self._kept) if kept is not None]

    def joined(self, h: Tensor) -> Tensor:
        """`h`, the layer's input. Its gradient is ready once the copies during the layer's backward are done."""
        self._is_joined = h.requires_grad
        joined: Tensor = _Joined.apply(h, self) if h.requires_grad else h
        return joined

    def end(self) -> None:
        """At the end of the layer, in forward and in backward: wait for the copies that ran during it."""
        for kept in self._copies:
            kept.settle()
        self._copies = []

    def begin_backward(self) -> None:
        """Start to copy the previous layer's activations back, if the end of this backward waits for them."""
        if self.is_back:
            return
        before = self.offload.before(self) if self._is_joined else None
        self.is_back = True
        self._copies = [] if before is None else before.kept()
        for kept in self._copies:
            kept.fetch()


class Kept:
    """One tensor: on the device, on the host, or on both while it is copied."""

    def __init__(self, visit: Visit, x: Tensor) -> None:
        self._visit = visit
        self._here: Tensor | None = x.detach().contiguous()
        self._host: Tensor | None = None  # a view of _buffer
        self._buffer: Tensor | None = None
        self._free: list[Tensor] = []
        self._is_leaving = False
        self._end: torch.cuda.Event | None = None

    def __del__(self) -> None:
        end: torch.cuda.Event | None = self.__dict__.get("_end")
        if end is not None and self._visit.pool is None:
            end.synchronize()  # a backward ended early, and the memory that the copy writes to is freed now
        buffer: Tensor | None = self.__dict__.get("_buffer")
        if buffer is not None:
            self._free.append(buffer)

    def send(self) -> None:
        """Start to copy it to the host."""
        if self._host is None and self._here is not None:
            offload, x = self._visit.offload, self._here
            self._buffer, self._free = offload.buffers.take(x)
            self._host = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
            self._end, self._is_leaving = offload.copy(self._host, x, self._visit.device), True

    def fetch(self) -> None:
        """Start to copy it to the device."""
        if self._here is None:
            assert self._host is not None
            self._here = torch.empty_like(self._host, device=self._visit.device, pin_memory=False)
            self._end = self._visit.offload.copy(self._here, self._host, self._visit.device)

    def settle(self) -> None:
        """Let the layers' stream wait for the copy. Then device memory that was copied to the host is free."""
        if self._end is not None:
            torch.cuda.current_stream(self._visit.device).wait_event(self._end)
            self._end = None
        if self._is_leaving:
            self._here, self._is_leaving = None, False

    def bring(self) -> Tensor:
        """The tensor on the device, in its layer's backward. The previous layer's activations begin to come back."""
        self.fetch()
        x = self._here
        self.settle()
        assert x is not None
        if self._host is not None:
            self._here = None
        self._visit.begin_backward()
        return x


class _Joined(torch.autograd.Function):
    """The identity. Its backward runs after all other nodes of the layer."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, visit: Visit) -> Tensor:
        ctx.visit = visit
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None]:
        ctx.visit.end()
        return dh, None
