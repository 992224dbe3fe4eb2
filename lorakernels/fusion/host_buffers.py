# SPDX-License-Identifier: Apache-2.0
"""Host buffers that GPUs copy from and to while they compute. They are used again and again."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from lorakernels.device import pin, unpin
from lorakernels.graphs import Pool, pool_in_use

Lists = dict[torch.device, list[Tensor]]  # free buffers by the device that copies, uint8 [bytes]


class HostBuffers:
    """Free buffers. Buffers of captured graphs are kept apart, since a replay uses them without `take`.

    A graph's buffers belong to the pool of its memory. When the pool is deleted, they are free for all. A buffer
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
        free_here = free if pool is None else self._of(pool, like.device)
        for buffers in (free_here, free):
            large = [i for i, buffer in enumerate(buffers) if buffer.numel() >= like.nbytes]
            if large:
                return buffers.pop(min(large, key=lambda i: buffers[i].numel())), free_here
        if free and pool is None:
            free.pop(min(range(len(free)), key=lambda i: free[i].numel()))
        return _pinned(like.nbytes, like.device), free_here

    def _of(self, pool: Pool, device: torch.device) -> list[Tensor]:
        lists = self._of_pools.setdefault(pool, {})
        if device not in lists:
            lists[device] = []
            free = self.free.setdefault(device, [])
            weakref.finalize(pool, free.extend, lists[device]).atexit = False
        return lists[device]


def _pinned(size: int, device: torch.device) -> Tensor:
    buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
    if device.type == "cuda" and size:
        if code := pin(buffer.data_ptr(), size, device):
            raise RuntimeError(
                f"{size:,} bytes of host memory cannot be pinned: CUDA error {code}. Fuse without "
                "offload_activations, or with smaller microbatches"
            )
        weakref.finalize(buffer, unpin, [buffer.data_ptr()], device).atexit = False
    return buffer
