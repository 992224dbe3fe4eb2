# SPDX-License-Identifier: Apache-2.0
"""Buffers in the host's memory that GPUs copy from and to while they compute, and that are used again."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from lorakernels.device import pin, unpin
from lorakernels.graphs import Pool, pool_in_use

Lists = dict[torch.device, list[Tensor]]  # free buffers by the device that copies, uint8 [bytes]


class HostBuffers:
    """Buffers that are free now. Those of captured graphs are apart: a replay uses them unasked.

    A graph's buffers belong to the pool that its memory is of. When the pool goes, they are free for all. A buffer
    serves whatever fits into it, and one that is too small makes room for a larger one. So batches of many lengths take
    no more than the longest.
    """

    def __init__(self) -> None:
        self.free: Lists = {}
        self._of_pools: weakref.WeakKeyDictionary[Pool, Lists] = weakref.WeakKeyDictionary()

    def take(self, like: Tensor) -> tuple[Tensor, list[Tensor]]:
        """A buffer for `like`, uint8 of as many bytes or more, and the list to append it to when it is free again.

        Raises:
            RuntimeError: the host has no memory to pin.
        """
        free, pool = self.free.setdefault(like.device, []), pool_in_use()
        own = free if pool is None else self._of(pool, like.device)
        for there in (own, free):
            large = [i for i, buffer in enumerate(there) if buffer.numel() >= like.nbytes]
            if large:
                return there.pop(min(large, key=lambda i: there[i].numel())), own
        if free and pool is None:
            free.pop(min(range(len(free)), key=lambda i: free[i].numel()))
        return _pinned(like.nbytes, like.device), own

    def _of(self, pool: Pool, device: torch.device) -> list[Tensor]:
        lists = self._of_pools.setdefault(pool, {})
        if device not in lists:
            lists[device] = []
            free = self.free.setdefault(device, [])
            weakref.finalize(pool, free.extend, lists[device]).atexit = False
        return lists[device]


def _pinned(size: int, device: torch.device) -> Tensor:
    found = torch.empty(size, dtype=torch.uint8, device="cpu")
    if device.type == "cuda" and size:
        if code := pin(found.data_ptr(), size, device):
            raise RuntimeError(
                f"{size:,} bytes of host memory cannot be pinned: CUDA error {code}. Fuse without "
                "offload_activations, or with smaller microbatches"
            )
        weakref.finalize(found, unpin, [found.data_ptr()], device).atexit = False
    return found
