# SPDX-License-Identifier: Apache-2.0
"""Pinned memory of the host, out of which copy engines read while layers run.

torch's own pinned memory is not used: its allocator rounds to a power of two and gives nothing back. Here pages are
taken from the system and pinned span by span. A copy must not cross two spans.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

import torch

PAGE = 4096
PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs
Progress = Callable[[int, int], None]  # (bytes pinned, bytes in all)


class Pinned:
    """uint8 [size] of the host in `memory`, pinned for `device` where that is a GPU.

    The memory is given back by `close`, when this object is collected, or when the process ends.

    Args:
        spans: what is pinned by itself; begins and ends are multiples of PAGE.
        size: in bytes, a multiple of PAGE.
        device: of the GPU that reads it. For a CPU nothing is pinned.
        progress: called after each span.
        runtime: has `cudaHostRegister` and `cudaHostUnregister`; None is torch's.

    Raises:
        OSError: the system did not pin a span. Nothing is pinned then.
    """

    def __init__(
        self,
        spans: Iterable[slice],
        size: int,
        device: torch.device,
        progress: Progress | None = None,
        runtime: Any = None,
    ) -> None:
        # shared, so that a fork does not copy pinned pages
        self.memory = torch.frombuffer(mmap.mmap(-1, max(size, PAGE)), dtype=torch.uint8)[:size]
        addresses: list[int] = []
        if device.type == "cuda" and runtime is None:
            runtime = torch.cuda.cudart()
        self._release = weakref.finalize(
            self, _unpin, runtime, addresses, device, self.memory.untyped_storage()
        )
        if device.type != "cuda":
            return
        there = torch.cuda.device(device) if torch.cuda.is_initialized() else nullcontext()
        try:
            with there:  # a call makes a context on the current GPU
                self._pin(spans, runtime, addresses, progress)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unpin, after what the GPU was given so far."""
        self._release()

    def _pin(
        self, spans: Iterable[slice], runtime: Any, addresses: list[int], progress: Progress | None
    ) -> None:
        for span in spans:
            part = self.memory[span]
            if not part.numel():
                continue
            code = int(runtime.cudaHostRegister(part.data_ptr(), part.numel(), PORTABLE))
            if code != 0:
                _clear_error()
                raise OSError(
                    f"the system did not pin {part.numel():,} bytes of host memory, after {span.start:,} of "
                    f"{len(self.memory):,}: CUDA error {code}; offload less"
                )
            addresses.append(part.data_ptr())
            if progress is not None:
                progress(span.stop, len(self.memory))


def _unpin(runtime: Any, addresses: list[int], device: torch.device, storage: Any) -> None:
    """`storage` keeps the pages until they are unpinned."""
    if not addresses:
        return
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # at the end of a process that failed
            torch.cuda.synchronize(device)
    while addresses:
        runtime.cudaHostUnregister(addresses.pop())


def _clear_error() -> None:
    """The runtime keeps a call's error for the next launch that asks, which would raise in place of that call."""
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
