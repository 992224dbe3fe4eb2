# SPDX-License-Identifier: Apache-2.0
"""Pinned memory of the host, out of which copy engines read while layers run.

Pages are taken from the system and pinned span by span (`device.pin`). A copy must not cross two spans.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lorakernels.device import pin, unpin

PAGE = 4096
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
        storage = self.memory.untyped_storage()  # keeps the pages until they are unpinned
        self._release = weakref.finalize(self, _release, addresses, device, runtime, storage)
        if device.type != "cuda":
            return
        try:
            for span in spans:
                self._pin(span, device, runtime, addresses)
                if progress is not None and span.stop > span.start:
                    progress(span.stop, len(self.memory))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unpin, after what the GPU was given so far."""
        self._release()

    def _pin(self, span: slice, device: torch.device, runtime: Any, addresses: list[int]) -> None:
        part = self.memory[span]
        if not part.numel():
            return
        if code := pin(part.data_ptr(), part.numel(), device, runtime):
            raise OSError(
                f"the system did not pin {part.numel():,} bytes of host memory, after {span.start:,} of "
                f"{len(self.memory):,}: CUDA error {code}; offload less"
            )
        addresses.append(part.data_ptr())


def _release(addresses: list[int], device: torch.device, runtime: Any, storage: Any) -> None:
    unpin(addresses, device, runtime)
