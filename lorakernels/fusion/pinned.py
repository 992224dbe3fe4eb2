# SPDX-License-Identifier: Apache-2.0
"""Host memory that GPUs copy from and to while they compute, and that is used again.

The memory is torch's, and is pinned here. torch's own pinned memory is rounded up to a power of two, and its record of
uses does not work inside a captured graph.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from lorakernels.graphs import Pool, pool_in_use

Lists = dict[tuple[Any, ...], list[Tensor]]  # free buffers by device, dtype and shape


class HostBuffers:
    """Buffers that are free now. Those of captured graphs are apart: a replay uses them unasked.

    A graph's buffers belong to the pool that its memory is of. When the pool goes, they are free for all.
    """

    def __init__(self) -> None:
        self.free: Lists = defaultdict(list)
        self._of_pools: weakref.WeakKeyDictionary[Pool, Lists] = weakref.WeakKeyDictionary()

    def take(self, like: Tensor) -> tuple[Tensor, list[Tensor]]:
        """A buffer for `like`, and the list to append it to when it is free again.

        Raises:
            RuntimeError: the host has no memory to pin.
        """
        key = (like.device, like.dtype, like.shape)
        free, pool = self.free[key], pool_in_use()
        own = free if pool is None else self._of(pool, key)
        for there in (own, free):
            if there:
                return there.pop(), own
        return _host_like(like), own

    def _of(self, pool: Pool, key: tuple[Any, ...]) -> list[Tensor]:
        lists = self._of_pools.setdefault(pool, {})
        if key not in lists:
            lists[key] = []
            weakref.finalize(pool, self.free[key].extend, lists[key]).atexit = False
        return lists[key]


def _host_like(like: Tensor) -> Tensor:
    found = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    if like.is_cuda and found.nbytes:
        runtime: Any = torch.cuda.cudart()
        code = runtime.cudaHostRegister(found.data_ptr(), found.nbytes, 0)
        if int(code):
            raise RuntimeError(
                f"{found.nbytes:,} bytes of host memory cannot be pinned: CUDA error {int(code)}. Fuse without "
                "offload_activations, or with smaller microbatches"
            )
        weakref.finalize(found, runtime.cudaHostUnregister, found.data_ptr()).atexit = False
    return found
