# SPDX-License-Identifier: Apache-2.0
"""The one place that knows torch's allocator calls for private pools; semi-public, the same in torch 2.8 … 2.13.

`_cuda_beginAllocateCurrentStreamToPool` sends every allocation made on the current stream, by any thread (autograd's
too), to the pool, and `_cuda_endAllocateToPool` ends that. Each begin takes a reference to the pool, which
`_cuda_releasePool` gives back. The memory can be freed when no reference is left. Around the captures of its own
CUDAGraph, torch 2.13 makes one more call, which Python cannot reach. Under relaxed capture the allocator works without
it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.torch_version import TorchVersion

_NEEDED = (
    "_cuda_beginAllocateCurrentStreamToPool",
    "_cuda_endAllocateToPool",
    "_cuda_releasePool",
    "_cuda_getCurrentRawStream",
)


def check_torch() -> None:
    """RuntimeError if this torch lacks what the pool needs."""
    missing = [name for name in _NEEDED if not hasattr(torch._C, name)]
    if missing or TorchVersion(torch.__version__) < "2.8":
        raise RuntimeError(
            f"lorakernels.graphs needs torch >= 2.8 built for CUDA, found {torch.__version__} without {missing}"
        )


_in_use: list[
    Pool
] = []  # a plain global, as the backward of a captured step runs in autograd's threads


def pool_in_use() -> Pool | None:
    """The pool of the graph that is being captured now, or None."""
    return _in_use[-1] if _in_use else None


class Pool:
    """A private pool of the caching allocator on one device; released when it goes, if not before."""

    _references = 0

    def __init__(self, device: int) -> None:
        check_torch()
        self.device = device
        self.id = torch.cuda.graph_pool_handle()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()

    @contextmanager
    def routing(self) -> Iterator[None]:
        """Allocations on the stream that is current now come from the pool."""
        torch._C._cuda_beginAllocateCurrentStreamToPool(self.device, self.id)
        self._references += 1
        _in_use.append(self)
        try:
            yield
        finally:
            _in_use.remove(self)
            torch._C._cuda_endAllocateToPool(self.device, self.id)

    def release(self) -> None:
        """Nobody replays into this memory any more: as its tensors die it can be freed."""
        while self._references:
            self._references -= 1
            torch._C._cuda_releasePool(self.device, self.id)
