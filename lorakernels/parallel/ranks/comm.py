# SPDX-License-Identifier: Apache-2.0
"""All calls of torch's collectives: ranks compare values, and gather the parts of a block by one of three transports.

    "peer"  copy engines copy the other ranks' parts out of those GPUs' memory, and no rank waits for another. Each
            rank has a GPU of its own, unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 (torch's variable for tests)
    "nccl"  all-gather by NCCL's kernels, which take multiprocessors from the GEMMs that run at the same time
    "gloo"  all-gather between CPUs

exchange.py has the exchanges of split layers between GPUs that read each other's memory.

With "nccl" and "gloo" all ranks must use the layers in one order. With "peer" they need not, as shards never change.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before any group: see _end_groups
from torch import Tensor

from lorakernels.parallel.ranks.shards import Shards

# torch 2.13 renames these two
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# timeout of a gather: by then another rank has ended or hangs
GATHER = timedelta(seconds=60)
# timeout of ranks that wait for each other's work, such as reading files
WORK = timedelta(hours=2)
TRANSPORTS = ("auto", "peer", "nccl", "gloo")
# {process group: the groups that were made over its ranks, by backend and timeout}
_GROUPS: WeakKeyDictionary[Any, dict[tuple[str, timedelta], Any]] = WeakKeyDictionary()


class Transport(Protocol):
    """Gathers the parts of a block. `name` is one of TRANSPORTS, or "host" for parts in pinned memory."""

    name: str

    def allocate(self, size: int) -> Tensor:
        """uint8 [size] for a rank's Shards. All ranks pass the same `size`."""

    def publish(self, shards: Shards) -> None:
        """Collective, once every rank has written its shards. They are never written again."""

    def gather(self, layer: int, out: Tensor) -> Any:
        """Fill `out`, uint8 [block.size], on the current stream. On a CPU, returns an object with `wait()`."""

    def close(self) -> None:
        """Collective: end all gathers."""


def agree(group: Any, mine: Any) -> list[Any]:
    """Collective: the `mine` of all ranks of `group`, in rank order. None stands for a group of one."""
    if group is None:
        return [mine]
    _GROUPS.setdefault(group, {})
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every


def patient(group: Any) -> Any:
    """Collective: a gloo group over the ranks of `group`, for waits of up to WORK.

    Its collectives fail at once if a process has ended.
    """
    return _new_group(group, "gloo", WORK)


def on_host(group: Any, device: torch.device) -> Any:
    """A group that does not wait for `device`: `group`, or a gloo group with its ranks and timeout.

    Collective when it is first called.
    """
    if dist.get_backend(group) == "gloo":
        return group
    return _new_group(group, "gloo", timeout_of(group, device))


def alike(group: Any, count: int, mine: tuple[int, ...] | None) -> bool:
    """Collective over a gloo group: whether all ranks have the same `count` integers. None differs from everything."""
    extremes = torch.zeros(1 + 2 * count, dtype=torch.int64)
    if mine is None or len(mine) != count:
        extremes[0] = 1
    else:
        integers = torch.tensor(mine)
        extremes[1:] = torch.cat((integers, -integers))
    maximum(group, extremes)
    different, *most = extremes.tolist()
    return not different and most[:count] == [-x for x in most[count:]]


def _new_group(group: Any, backend: str, timeout: timedelta) -> Any:
    """Collective: another group over the ranks of `group`, one per backend and timeout. It lives as long as all groups.

    torch names such a group by the number of groups. If one were destroyed, a later one could get a used name.
    """
    ranks = dist.get_process_group_ranks(group)
    if backend == "nccl" and len(ranks) < dist.get_world_size() and _is_split():
        return group
    made = _GROUPS.setdefault(group, {})
    use = backend, timeout
    if use not in made:
        made[use] = dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
    return made[use]


@atexit.register
def _end_groups() -> None:
    """End groups that only reference cycles keep alive, such as a model and its ContextParallel, before Python ends.

    gloo's threads live as long as their group, also after `destroy_process_group`. A thread that releases tensors while
    Python is being finalized aborts the process, since torch takes the GIL in a destructor
    (https://github.com/pytorch/pytorch/issues/190489). torch.distributed.nn must be imported before any group is made:
    its functions keep the world group of that moment as the default of an argument.
    """
    if len(_GROUPS):
        gc.collect()


def _is_split() -> bool:
    """Whether torch makes a new group by splitting the world's communicator, for which all ranks must call it."""
    world = dist.group.WORLD
    return world is not None and world.bound_device_id is not None


@contextmanager
def together(group: Any) -> Iterator[None]:
    """Collective at its end: an exception inside, on one rank, is raised on all.

    Raises:
        ValueError: another rank raised. The message names that rank and has its message.
    """
    error: Exception | None = None
    try:
        yield
    except OtherRankError:
        raise
    except Exception as raised:  # any: the other ranks wait below
        error = raised
    messages = agree(group, None if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    for rank, text in enumerate(messages):
        if text is not None:
            raise ValueError(f"rank {rank}: {text}")


@contextmanager
def all_together(groups: Iterable[Any]) -> Iterator[None]:
    """Collective at its end, over each of `groups` in turn: an exception inside, on one rank, is raised on all.

    The groups are dimensions of one mesh, so that an error that is raised in one of them is passed on in the next. None
    stands for a group of one. It raises as `together` does.
    """
    with ExitStack() as stack:
        for group in reversed([*groups]):
            stack.enter_context(together(group))
        yield


class OtherRankError(ValueError):
    """Another rank raised inside `together` while this one was in `ask`. All ranks have its message already."""


def ask(group: Any, mine: Any) -> list[Any]:
    """Collective inside `together(group)`: the `mine` of all ranks, in rank order.

    Raises:
        OtherRankError: another rank has raised meanwhile, and no longer takes part.
    """
    every = agree(group, (mine,))
    for rank, other in enumerate(every):
        if not isinstance(other, tuple):  # a message that `together` sent
            raise OtherRankError(f"rank {rank}: {other}")
    return [other for (other,) in every]


def reduce_scatter(group: Any, out: Tensor, whole: Tensor) -> None:
    """Collective: `out` [n] becomes this rank's part of `whole` [ranks · n], summed over the ranks."""
    _reduce_scatter(out, whole, group=group)


def all_gather(group: Any, out: Tensor, part: Tensor) -> None:
    """Collective: `out` [ranks · n] becomes the `part` [n] of all ranks, in rank order."""
    _all_gather(out, part, group=group)


def all_reduce(group: Any, x: Tensor) -> None:
    """Collective: `x` becomes its sum over the ranks."""
    dist.all_reduce(x, group=group)


def from_first(group: Any, x: Tensor) -> None:
    """Collective: `x` becomes the `x` of the group's first rank."""
    dist.broadcast(x, group=group, src=dist.get_global_rank(group, 0))


class Collective:
    """ "gloo" or "nccl", in a process group of its own, so that gathers do not queue behind the gradients."""

    def __init__(self, name: str, group: Any, device: torch.device) -> None:
        self.name, self._device = name, device
        self._group = _new_group(group, name, GATHER)

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def publish(self, shards: Shards) -> None:
        self._shards = shards

    def gather(self, layer: int, out: Tensor) -> Any:
        return self.join(self._shards.part(layer), out)

    def join(self, part: Tensor, out: Tensor) -> Any:
        """Collective: `out` becomes the `part` of all ranks, in rank order. `part` may be its own slice of `out`."""
        on_cpu = out.device.type == "cpu"
        return _all_gather(out, part, group=self._group, async_op=on_cpu)

    def close(self) -> None:
        dist.barrier(self._group)


def peer_memory(size: int, device: torch.device) -> Tensor:
    """Zeroed uint8 [size] that other ranks can map. The host waits for the device.

    torch 2.11 zeroes this memory, and the signals of its barriers, on the default stream without waiting. On a busy
    device that would erase the first signals of other ranks, and all ranks would wait for ever.
    """
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    return memory


class Peer:
    """Copies out of the other ranks' memory, which torch's symmetric memory maps into this process.

    Only plain addresses are used: no multicast, no signals. Ranks r+1, r+2, … are read in this order, so that not all
    ranks read one rank's memory at the same time. If a block is read in place, only the other ranks' parts are copied.
    """

    name = "peer"

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device, self._alone = group, device, dist.get_world_size(group) == 1
        self._peers: list[tuple[int, Tensor]] = []
        self._handle: Any = None

    def allocate(self, size: int) -> Tensor:
        if self._alone:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        return peer_memory(size, self._device)

    def publish(self, shards: Shards) -> None:
        memory, n = shards.memory, shards.ranks
        self._shards = shards
        if not self._alone:
            import torch.distributed._symmetric_memory as symmetric

            handle = self._handle = symmetric.rendezvous(memory, self._group.group_name)
            for rank in ((shards.rank + step) % n for step in range(1, n)):
                peer = handle.get_buffer(rank, memory.shape, memory.dtype)
                self._peers.append((rank, peer))
        self._peers.append((shards.rank, memory))
        self._settle()

    def gather(self, layer: int, out: Tensor) -> None:
        shards, block = self._shards, self._shards.blocks[layer]
        for rank, memory in self._peers:
            if not (block.in_place and rank == shards.rank):
                part = out[block.bounds[rank] : block.bounds[rank + 1]]
                part.copy_(memory[shards.span(layer, rank)], non_blocking=True)

    def close(self) -> None:
        self._settle()
        self._peers.clear()
        self._handle = None

    def _settle(self) -> None:
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)


def choose(transport: str, group: Any, device: torch.device) -> tuple[str, str]:
    """Collective: (name of the transport to use, the reason for messages).

    Raises:
        ValueError: `transport` is not one of TRANSPORTS, or does not fit `device`.
        RuntimeError: it is "peer", and a rank cannot read the others' memory.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {list(TRANSPORTS)}, found {transport!r}")
    if device.type != "cuda":
        if transport not in ("auto", "gloo"):
            raise ValueError(f"transport {transport!r} needs GPUs, found a model on {device}")
        return "gloo", "the model is on a CPU"
    if transport == "gloo":
        raise ValueError(f"transport 'gloo' needs a CPU, found a model on {device}")
    if transport == "nccl":
        return "nccl", "set by transport='nccl'"
    objections = list(_objections_to_peer(agree(group, _host_and_gpu(device)), device))
    every = agree(group, objections)
    first = next(((rank, o[0]) for rank, o in enumerate(every) if o), None)
    if first is None:
        return "peer", "the GPUs of all ranks read each other's memory"
    reason = f"no peer access: rank {first[0]} says that {first[1]}"
    if transport == "peer":
        raise RuntimeError(f"transport 'peer': {reason}")
    return "nccl", reason


def make(name: str, group: Any, device: torch.device) -> Transport:
    """Collective: the transport that `choose` chose."""
    return Peer(group, device) if name == "peer" else Collective(name, group, device)


def _host_and_gpu(device: torch.device) -> tuple[str, int]:
    return socket.gethostname(), device.index or 0


def _objections_to_peer(gpus: list[tuple[str, int]], device: torch.device) -> Iterator[str]:
    """Why this rank cannot read the memory of all ranks' GPUs. `gpus`: (host, index of its GPU) of every rank."""
    host, gpu = _host_and_gpu(device)
    here = [index for name, index in gpus if name == host]
    shared = len({*here}) < len(here)
    if len(here) < len(gpus) or (shared and not _is_on("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")):
        yield "not all ranks are on one host, with a GPU each"
        return
    if len(gpus) > 1 and _would_multicast(device):
        yield (
            "torch would set up NVLink multicast, which is not used here: set TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
        )
    for index in sorted({*here} - {gpu}):
        if index >= torch.cuda.device_count():
            yield f"GPU {index} is not visible to it"
        elif not torch.cuda.can_device_access_peer(gpu, index):
            yield f"GPU {gpu} cannot access GPU {index}"


def _is_on(variable: str) -> bool:
    """Whether torch's symmetric memory reads this environment variable as true."""
    return os.environ.get(variable, "").lower() in ("1", "true", "on", "y")


def _would_multicast(device: torch.device) -> bool:
    """Whether a rendezvous of symmetric memory would make a multicast object (torch 2.8 to 2.13)."""
    if _is_on("TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        return False
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0))


def gather_rows(group: Any, part: Tensor) -> Tensor:
    """Collective: the `part` [M, N] of all ranks, of any dtype, as [ranks · M, N] in rank order."""
    part = part.contiguous()
    whole = part.new_empty((part.shape[0] * dist.get_world_size(group), *part.shape[1:]))
    _all_gather(whole, part, group=group)
    return whole


def sum_rows(group: Any, whole: Tensor) -> Tensor:
    """Collective: this rank's rows [M, N] of `whole` [ranks · M, N], summed over the ranks."""
    whole = whole.contiguous()
    part = whole.new_empty((whole.shape[0] // dist.get_world_size(group), *whole.shape[1:]))
    _reduce_scatter(part, whole, group=group)
    return part


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """The timeout of the collectives of `group`."""
    options = getattr(group._get_backend(device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", timedelta(minutes=10))
    return timeout


def maximum(group: Any, x: Tensor) -> None:
    """Collective: each element of `x` becomes its maximum over the ranks. A backend may lose NaN."""
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
