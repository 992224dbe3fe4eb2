# SPDX-License-Identifier: Apache-2.0
"""Stages that write into each other's memory, under torch's schedules.

A kernel of NCCL's that waits for a tensor holds multiprocessors until it comes. An interleaved schedule posts receives
long before they are read, so that layers run beside such kernels. A persistent GEMM, which counts on all
multiprocessors, then takes up to twice as long (T28).

Here copy engines write what a stage sends into the next rank's memory, and then a signal (T29). The receiver's
layers wait for the signal on their own stream, where nothing else could run.

Every microbatch has a place of its own in each stage, which is written once a step. A step ends with a sum over all
ranks, after all reads of these places. So the next step's senders may write without asking.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from lorakernels.parallel.pipeline.stages import Sent
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.exchange import aligned

# of one allocation, over all ranks: torch's signal pads have 2048 bytes by default
SIGNALS = 512


class Post(Protocol):
    """Numbered tensors of one form, each sent to a rank at most once a step."""

    def place(self, number: int) -> Tensor:
        """Where this rank receives that tensor: always the same memory, and another object at each call."""

    def begin(self) -> None:
        """A stage is about to run. Tensors that were sent before its last run are copied first."""

    def send(self, x: Tensor, rank: int, number: int) -> None:
        """Write `x` into that rank's place, once the current stream has computed it."""

    def wait(self, rank: int, number: int) -> None:
        """Let kernels that are enqueued from now on start after that rank's tensor has arrived."""


class PeerPost:
    """In memory that torch maps into all ranks' processes. Making one is collective.

    A signal is torch's own: 1 where `wait_signal` looks for it, which sets it to 0 again. It is written by a copy
    engine, in order, after the tensor. A kernel that wrote it would first wait for room beside a GEMM.

    Args:
        group: of ranks that read each other's memory.
        sent: the form of all tensors.
        count: how many a rank may receive in a step.

    Raises:
        torch.OutOfMemoryError: this rank's GPU is full.
        ValueError: another rank's is.
    """

    def __init__(self, group: Any, sent: Sent, count: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._sent, self._limit = sent, SIGNALS // self._size
        size = torch.Size(sent.shape).numel() * sent.dtype.itemsize
        self._stride = aligned(size) // sent.dtype.itemsize
        self._milliseconds = int(comm.timeout_of(group, sent.device).total_seconds() * 1000)
        with comm.together(group):  # one rank's GPU may be full
            self._memory = [
                comm.peer_memory(min(self._limit, count - start) * aligned(size), sent.device)
                for start in range(0, count, self._limit)
            ]
        self._handles = [symmetric.rendezvous(m, group.group_name) for m in self._memory]
        self._side = torch.cuda.Stream(sent.device)
        self._one = torch.ones(1, dtype=torch.int32, device=sent.device)
        self._copied: torch.cuda.Event | None = None  # what was sent before the last stage ran

    def place(self, number: int) -> Tensor:
        return self._there(self._rank, number)

    def begin(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._sent.device).wait_event(self._copied)
        self._copied = self._side.record_event()

    def send(self, x: Tensor, rank: int, number: int) -> None:
        part, slot = divmod(number, self._limit)
        x, there = x.detach().contiguous(), self._there(rank, number)
        signal = self._handles[part].get_signal_pad(
            rank, (1,), torch.int32, slot * self._size + self._rank
        )
        self._side.wait_stream(torch.cuda.current_stream(self._sent.device))
        with torch.cuda.stream(self._side):
            there.copy_(x, non_blocking=True)
            signal.copy_(self._one, non_blocking=True)
        x.record_stream(self._side)

    def wait(self, rank: int, number: int) -> None:
        part, slot = divmod(number, self._limit)
        self._handles[part].wait_signal(rank, slot, self._milliseconds)

    def _there(self, rank: int, number: int) -> Tensor:
        part, slot = divmod(number, self._limit)
        buffer: Tensor = self._handles[part].get_buffer(
            rank, self._sent.shape, self._sent.dtype, slot * self._stride
        )
        return buffer


class PeerStage(PipelineStage):
    """torch's stage, whose tensors come and go by a Post.

    To torch's schedules it has nothing to receive or send. It sends when they ask for operations that send, right after
    the stage has run. It waits when the stage is about to run.

    Args:
        post: shared by all stages of this rank.
        microbatches: of a step.
        args, kwargs: of PipelineStage.
    """

    def __init__(self, post: Post, microbatches: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._post, self._microbatches, self._placed = post, microbatches, False

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        to = self.stage_index + 1
        for op in super().get_fwd_send_ops(fwd_chunk_id):
            self._post.send(op.tensor, to % self.group_size, self._number(to, 0, fwd_chunk_id))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        to = self.stage_index - 1
        for op in super().get_bwd_send_ops(bwd_chunk_id):
            self._post.send(op.tensor, to % self.group_size, self._number(to, 1, bwd_chunk_id))
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._place()
        self._post.begin()
        if not self.is_first:
            number = self._number(self.stage_index, 0, fwd_chunk_id)
            self._post.wait((self.stage_index - 1) % self.group_size, number)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._post.begin()
        if self.has_backward and not self.is_last:
            number = self._number(self.stage_index, 1, bwd_chunk_id)
            self._post.wait((self.stage_index + 1) % self.group_size, number)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _number(self, stage: int, way: int, microbatch: int) -> int:
        """The number of a tensor that `stage` receives: hidden states (way 0) or their gradients (way 1)."""
        chunks, chunk = self.num_stages // self.group_size, stage // self.group_size
        return (way * chunks + chunk) * self._microbatches + microbatch

    def _place(self) -> None:
        """Once: let torch's stage read what it receives where the Post has it, and free its own buffers."""
        if self._placed:
            return
        self._placed = True
        received = [] if self.is_first else [(0, self.args_recv_info)]
        if self.has_backward and not self.is_last:
            received.append((1, self.grad_recv_info))
        for way, infos in received:
            for microbatch, (received_by,) in infos.items():
                info: Any = received_by
                place = self._post.place(self._number(self.stage_index, way, microbatch))
                info.buffer = place.requires_grad_(info.buffer.requires_grad)
