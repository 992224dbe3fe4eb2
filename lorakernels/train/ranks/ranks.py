# SPDX-License-Identifier: Apache-2.0
"""Data-parallel processes as torchrun starts them.

Each process takes its own rows of a step. Gradients are summed in one flat tensor.

A rank that ends in the middle ends all of them. Ranks wait for each other to begin for `START`. Collectives of a step
give up after `STEP`. Where ranks wait for work
of unequal length, such as loading or saving, they wait in a group of gloo's with `WORK`. It notices at once that a
process has ended, whatever the timeout. Each rank also watches another one (watch.py).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before any group: see _free_groups_at_exit
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lorakernels.train.errors import FinetuneError, OptionError
from lorakernels.train.ranks.watch import RankWatch

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
STEP, WORK = timedelta(seconds=60), timedelta(hours=2)
START = timedelta(minutes=10)
_T = TypeVar("_T")


def wait_for(device: torch.device) -> None:
    """Until the device has done what was launched; not while a graph is captured."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()


@dataclass(frozen=True)
class RunRanks:
    """This process among `size` processes. By default it is alone, and no method communicates.

    Ranks lie as in a mesh ("pp", "replica", "cp", "tp"). So stages are far from each other, and parts of layers near.

    Attributes:
        rank: this process's number among all.
        size: the number of all processes.
        local: this process's number on its machine.
        cp: how many ranks, `tp` apart, share each row. Such ranks are in one replica.
        pp: how many ranks, `size` / `pp` apart, have a model's stages. Such ranks are in one replica.
        tp: how many ranks after each other have a model's layers together. Such ranks are in one replica.
        group: the group over which `add_up` sums; None is the default group.
        patient: the group in which ranks wait for each other's work; None is the default group.
    """

    rank: int = 0
    size: int = 1
    local: int = 0
    cp: int = 1
    pp: int = 1
    tp: int = 1
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    patient: dist.ProcessGroup | None = field(default=None, compare=False)

    @property
    def replicas(self) -> int:
        return self.size // (self.cp * self.pp * self.tp)

    @property
    def replica(self) -> int:
        return self.rank % self.of_stage // (self.cp * self.tp)

    @property
    def of_stage(self) -> int:
        """How many ranks have the same layers of the model. They come after each other."""
        return self.size // self.pp

    @property
    def counts(self) -> bool:
        """Whether a sum over all ranks takes this rank's losses. Ranks with a layer's parts have the same ones."""
        return self.rank % self.tp == 0

    @property
    def first_of_replica(self) -> bool:
        """Whether a sum over all ranks takes this rank's losses, where all ranks of a replica have the same ones."""
        return self.rank < self.of_stage and self.rank % (self.cp * self.tp) == 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def group_of(self, count: int, apart: int = 1) -> dist.ProcessGroup | None:
        """Collective: the group of `count` ranks, `apart` from each other, that this one is in. None if it is alone.

        Ranks that differ by multiples of `apart` are in one group, within each `count · apart`. Collectives give up
        after `STEP`.
        """
        if count == 1:
            return None
        if count == self.size:
            return dist.group.WORLD
        group = None
        for first in (rank for rank in range(self.size) if rank // apart % count == 0):
            members = range(first, first + count * apart, apart)
            made = dist.new_group([*members], timeout=STEP)
            group = made if self.rank in members else group
        return group

    def mesh_of(self, name: str, device: torch.device, count: int, apart: int = 1) -> DeviceMesh:
        """Collective: the mesh of one dimension over `group_of(count, apart)`, of several ranks."""
        group = self.group_of(count, apart)
        assert group is not None
        return DeviceMesh.from_group(group, device.type, mesh_dim_names=(name,))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the ranks, in place.

        One all-reduce takes all tensors, in fp32, or in fp64 if one of them is fp64.
        """
        if self.size == 1:
            return
        dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        flat = torch.cat([t.reshape(-1).to(dtype) for t in tensors])
        dist.all_reduce(flat, group=self.group)
        parts = flat.split([t.numel() for t in tensors])
        torch._foreach_copy_(
            list(tensors), [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)]
        )

    def add_up_gradients(self, parameters: Sequence[Tensor], *others: Tensor) -> list[Tensor]:
        """Sum the parameters' gradients and `others` over the ranks. Returns the gradients that exist on this rank
        afterwards.

        If only other ranks have a gradient of a parameter, this rank gets theirs. An expert that no token here chose
        is an example. If no rank has a gradient of it, it keeps None, and an optimizer skips it, as on one rank.
        """
        if self.size > 1:
            present = torch.ones(len(parameters), device=others[0].device)
            for i, parameter in enumerate(parameters):
                if parameter.grad is None:
                    present[i] = 0
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            self.add_up([*gradients, present, *others])
            if any(p.grad is None for p in parameters):
                for p, gradient, exists in zip(
                    parameters, gradients, present.tolist(), strict=True
                ):
                    p.grad = gradient if exists else None
        return [p.grad for p in parameters if p.grad is not None]

    def together(self, work: Callable[[], _T]) -> _T:
        """Run `work` on every rank, and return its result here. Where one rank raises, all do, after all have ended.

        Raises:
            FinetuneError: `work` raised on another rank, which the message names. This rank's own exception comes as
                it is.
        """
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:  # any: the other ranks wait below
            error = raised
        if self.size > 1:
            said: list[str | None] = [None] * self.size
            message = None if error is None else str(error) or type(error).__name__
            dist.all_gather_object(said, message, group=self.patient)
            stopped = [rank for rank, text in enumerate(said) if text is not None]
            if stopped and error is None:
                error = FinetuneError(f"rank {stopped[0]} stopped: {said[stopped[0]]}")
        if error is not None:
            raise error
        return result

    def on_first(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0 while all other ranks wait. If it raises, all ranks raise."""
        self.together(work if self.first else lambda: None)

    def from_all(self, value: _T) -> list[_T]:
        """The value of each rank, which pickle takes, on all ranks."""
        if self.size == 1:
            return [value]
        gathered: list[_T] = [value] * self.size
        dist.all_gather_object(gathered, value, group=self.patient)
        return gathered

    def from_first(self, value: _T) -> _T:
        """Rank 0's value, which pickle takes, on all ranks."""
        if self.size == 1:
            return value
        broadcast = [value]
        dist.broadcast_object_list(broadcast, src=0, group=self.patient)
        return broadcast[0]


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[RunRanks]:
    """Join the process group that torchrun's variables describe, and leave it at the end.

    The backend is NCCL on GPUs and gloo on CPUs.

    Raises:
        FinetuneError: another rank ended, or did not answer in time.
    """
    ranks = ranks_of_environment()
    if ranks.size == 1:
        yield ranks
        return
    _free_groups_at_exit()
    meeting = _meet(ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=STEP)
    else:
        dist.init_process_group("gloo", timeout=STEP)
    del meeting  # without torchrun it is rank 0's, and the group's store is the same one
    patient = dist.new_group(backend="gloo", timeout=WORK)
    watch, done = RankWatch(lambda: _lost(ranks)), False
    try:
        yield replace(ranks, patient=patient)
        done = True
    except RuntimeError as error:
        if not is_about_peers(error):
            raise
        raise FinetuneError(f"{_lost(ranks)} {error}") from error
    finally:
        watch.end(with_the_others=done)
        if not done and device.type == "cuda":  # else NCCL waits for ranks that wait for this one
            world = dist.group.WORLD
            assert world is not None
            with contextlib.suppress(RuntimeError):  # what ended this rank is what it says
                world.abort()
        dist.destroy_process_group()


@cache
def _free_groups_at_exit() -> None:
    """Destroy process groups that only reference cycles keep alive, such as a run's, while Python still runs.

    `destroy_process_group` does not end a group's threads of gloo's. One that releases a work's tensors while Python is
    being finalized aborts the process (https://github.com/pytorch/pytorch/issues/190489). `lorakernels.parallel` ends
    groups where it was given one, which a run of replicas does not. torch.distributed.nn's functions keep the world
    that there is when that module is first imported, as the default of an argument.
    """
    atexit.register(gc.collect)


def _meet(ranks: RunRanks) -> dist.Store:
    """Collective: the store where all ranks have said that they are there.

    A group connects its ranks within its timeout. A rank that begins later, on a loaded machine, would miss `STEP`.
    """
    store, _, _ = next(dist.rendezvous("env://", ranks.rank, ranks.size, timeout=START))
    if store.add("lorakernels/here", 1) == ranks.size:
        store.set("lorakernels/all here", "")
    store.wait(["lorakernels/all here"], START)
    return store


def _lost(ranks: RunRanks) -> str:
    return (
        f"rank {ranks.rank} lost contact with the others: one of them ended, and its own message says why, or it did "
        f"not answer for {STEP.seconds} s. The last checkpoint stands, --resume goes on from it."
    )


def is_about_peers(error: Exception) -> bool:
    """Whether a collective raised `error`. Gloo raises a plain RuntimeError, which names its source file."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def ranks_of_environment() -> RunRanks:
    """The ranks that torchrun's variables describe. WORLD_SIZE=1 means one process, whatever else a launcher set.

    Raises:
        OptionError: only some of the variables are set, or one is not a number.
    """
    variables = {name: os.environ.get(name) for name in VARIABLES}
    if variables["WORLD_SIZE"] == "1" or not any(variables.values()):
        return RunRanks()
    try:
        rank, size, local = (int(str(variables[name])) for name in VARIABLES)
    except ValueError as error:
        raise OptionError(f"torchrun sets {', '.join(VARIABLES)}, found {variables}") from error
    return RunRanks(rank, size, local)
