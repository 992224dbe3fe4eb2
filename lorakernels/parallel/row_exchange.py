# SPDX-License-Identifier: Apache-2.0
"""How ranks that have rows of their own exchange them within a layer: of split layers, or keys and values.

"peer" reads the other GPUs' memory; "nccl" and "gloo" are collectives (comm.py).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lorakernels.kernels.triton.sum_rows import MOST_PARTS, sum_rows
from lorakernels.parallel import comm

_ALIGNED = 256  # bytes, of a tensor in the ranks' memory
_LEAST = 1 << 20  # bytes of that memory


class RowExchange(Protocol):
    """How the ranks of a group gather rows, and sum them. All of it is collective. `name` is one of TRANSPORTS."""

    name: str

    def gather(self, *parts: Tensor) -> list[Tensor]:
        """For each of `parts` [M, …] [ranks · M, …]: every rank's below each other, by rank."""

    def sum(
        self, whole: Tensor, factor: Tensor | None = None, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """This rank's rows of `whole` [ranks · M, N] and of `factor` [ranks · M, R], summed over the ranks.

        `added` [M, N] is added to the first. `factor` is summed in fp32 and rounded once to its dtype.
        """


class CollectiveRows:
    """By collectives of `group`, one after the other."""

    def __init__(self, group: Any, name: str) -> None:
        self.group, self.name = group, name

    def gather(self, *parts: Tensor) -> list[Tensor]:
        return [comm.gather_rows(self.group, part) for part in parts]

    def sum(
        self, whole: Tensor, factor: Tensor | None = None, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        found = comm.sum_rows(self.group, whole)
        if added is not None:
            found.add_(added)
        if factor is None:
            return found, None
        return found, comm.sum_rows(self.group, factor.float()).to(factor.dtype)


class PeerRows:
    """Out of the other ranks' memory. A rank lays down what is for others, all wait for each other, and each reads.

    The waits are torch's barriers between GPUs: nothing waits on the host, so that graphs can hold an exchange. All
    exchanges of a group use one memory, and have to be on one stream.
    """

    name = "peer"

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._others = [(self._rank + turn) % self._size for turn in range(1, self._size)]
        self._milliseconds = int(comm.timeout_of(group, device).total_seconds() * 1000)
        self._capacity, self._held = 0, list[Tensor]()
        self._handle: Any = None
        self._views: dict[Any, list[list[Tensor]]] = {}

    def gather(self, *parts: Tensor) -> list[Tensor]:
        parts = tuple(part.contiguous() for part in parts)
        there = self._memory([(part.shape, part.dtype) for part in parts])
        self._wait()  # until the others have read what was there
        for place, part in zip(there[self._rank], parts, strict=True):
            place.copy_(part)
        self._wait()  # until they have written
        found = []
        for index, part in enumerate(parts):
            whole = part.new_empty((self._size * part.shape[0], *part.shape[1:]))
            rows = whole.chunk(self._size) if part.numel() else [whole] * self._size
            for rank in self._others:
                rows[rank].copy_(there[rank][index])
            rows[self._rank].copy_(part)
            found.append(whole)
        return found

    def sum(
        self, whole: Tensor, factor: Tensor | None = None, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if whole.dtype == torch.float64:  # the kernel adds in fp32
            return CollectiveRows(self._group, "nccl").sum(whole, factor, added)
        whole = whole.contiguous()
        forms = [(whole.shape, whole.dtype)]
        if factor is not None:
            forms.append((factor.shape, torch.float32))
        there = [[t.chunk(self._size) for t in each] for each in self._memory(forms)]
        mine, own = there[self._rank], self._rank
        self._wait()
        rows = whole.chunk(self._size)
        for rank in self._others:
            mine[0][rank].copy_(rows[rank])
        if factor is not None:
            for place, part in zip(mine[1], factor.chunk(self._size), strict=True):
                place.copy_(part)
        self._wait()
        parts = [rows[own] if r == own else there[r][0][own] for r in range(self._size)]
        found = sum_rows(parts, None if added is None else added.contiguous(), whole.dtype)
        if factor is None:
            return found, None
        return found, sum_rows([each[1][own] for each in there], None, factor.dtype)

    def _memory(self, forms: list[tuple[torch.Size, torch.dtype]]) -> list[list[Tensor]]:
        """For each rank its memory for tensors of these shapes and dtypes. It grows where it is too small."""
        key = tuple(forms)
        if key not in self._views:
            starts, end = [], 0
            for shape, dtype in forms:
                starts.append(end // dtype.itemsize)
                end += -(-shape.numel() * dtype.itemsize // _ALIGNED) * _ALIGNED
            if end > self._capacity:
                self._grow(end)
            handle = self._handle
            self._views[key] = [
                [handle.get_buffer(r, s, d, at) for (s, d), at in zip(forms, starts, strict=True)]
                for r in range(self._size)
            ]
        return self._views[key]

    def _grow(self, wanted: int) -> None:
        """Older memory stays: graphs may use it."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"ranks exchange {wanted} bytes at once, of which {self._capacity} are there: run the step eagerly "
                "once before it is captured"
            )
        import torch.distributed._symmetric_memory as symmetric

        self._views.clear()
        self._capacity = max(_LEAST, 1 << (wanted - 1).bit_length())
        memory = symmetric.empty(self._capacity, dtype=torch.uint8, device=self._device)
        self._handle = symmetric.rendezvous(memory, self._group.group_name)
        self._held.append(memory)

    def _wait(self) -> None:
        self._handle.barrier(channel=0, timeout_ms=self._milliseconds)


def row_exchange(transport: str, group: Any, device: torch.device) -> tuple[RowExchange, str]:
    """Collective: (how ranks exchange rows, why in words). Raises as `comm.choose`."""
    name, why = comm.choose(transport, group, device)
    if name != "peer":
        return CollectiveRows(group, name), why
    if dist.get_world_size(group) > MOST_PARTS:
        return CollectiveRows(group, "nccl"), f"more than {MOST_PARTS} ranks"
    return PeerRows(group, device), why
