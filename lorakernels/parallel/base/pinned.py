# SPDX-License-Identifier: Apache-2.0
"""Pinned memory of the host, from which copy engines read while layers run.

Pages are allocated from the system and pinned span by span (`device.pin`). A copy must stay within one span.
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
    """Host memory, uint8 [size] in `memory`, pinned for `device` if that is a GPU.

    The memory is freed by `close`, when this object is collected, or when the process ends.

    Args:
        spans: the ranges that are pinned one by one; they begin and end at multiples of PAGE.
        size: bytes, a multiple of PAGE.
        device: the GPU that reads the memory. For a CPU nothing is pinned.
        progress: called after each span.
        runtime: an object with `cudaHostRegister` and `cudaHostUnregister`; None takes torch's.

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
        """Unpin the memory once the GPU has finished all work that was enqueued so far."""
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
