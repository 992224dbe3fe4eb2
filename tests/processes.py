# SPDX-License-Identifier: Apache-2.0
"""Processes for ranks and runs. Those on the CPU are forked from a server that imports torch once, for all of them;
those on a GPU start afresh. Both have the environment of who starts them (what torch reads at its import excepted)."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tests.other_sums  # noqa: F401

SHARED = {  # what torch's symmetric memory needs between processes on one GPU
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
multiprocessing.set_forkserver_preload(
    [
        "pytest",
        "lorakernels.graphs",
        "torch._dynamo",  # DistributedDataParallel imports it
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
        "lorakernels.train.job",
    ]
)


def start_method(on_gpu: bool) -> str:
    return "spawn" if on_gpu else "forkserver"


def start(target: Callable[..., None], *args: Any, on_gpu: bool, said: Path) -> BaseProcess:
    """A process that runs `target`, its standard error in the file `said`."""
    context = multiprocessing.get_context(start_method(on_gpu))
    arguments = (dict(os.environ), target, args, said)
    process = context.Process(target=_quiet, args=arguments, daemon=True)
    process.start()
    return process


def take_environment(environment: dict[str, str]) -> None:
    """The server has that of whoever needed it first."""
    os.environ.clear()
    os.environ.update(environment)


def _quiet(
    environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...], said: Path
) -> None:
    take_environment(environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    torch.set_num_threads(1)
    target(*args)


def meet() -> tuple[dist.TCPStore, dict[str, str]]:
    """(a store for ranks to meet at, what their environment says of it).

    Keep the store until they have ended. As torchrun's, it is of the process that starts them, and has its port from
    the first. A port that is looked for and let go may be that of other ranks by the time that these ones come.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    return store, where | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def backend_on_gpus(world: int, needs_nccl: str = "") -> str:
    """ "nccl" where each of `world` ranks has a GPU, else "cuda:shared" over what there is; or the test is skipped.

    `needs_nccl`: what does, in words. NCCL takes no two ranks on one GPU.
    """
    found = torch.cuda.device_count()
    if found >= world:
        return "nccl"
    if needs_nccl or not found:
        why = f": {needs_nccl}" if needs_nccl else ", or one that ranks share"
        pytest.skip(f"needs {world} GPUs, found {found}{why}")
    return "cuda:shared"


def on_ranks(worker: Callable[..., Any], world: int, backend: str, *args: Any) -> list[Any]:
    """What `worker(rank, device, *args)` returns, by rank: one thread each, within a group over `backend`.

    The device is the CPU for gloo, and the rank's own GPU for nccl. Two more show values without a GPU each, over gloo:
    "cuda:gloo" between processes on one GPU, and "cuda:shared" between processes that take the GPUs by turns and read
    each other's memory.
    """
    # not forked from this process, whose threads may hold locks at that moment
    with multiprocessing.get_context(start_method(backend != "gloo")).Manager() as manager:
        results = manager.dict()
        _store, variables = meet()
        if backend == "cuda:shared":
            variables |= SHARED
        arguments = (os.environ | variables, worker, world, backend, results, args)
        mp.start_processes(
            _rank, arguments, nprocs=world, start_method=start_method(backend != "gloo")
        )
        return [results[rank] for rank in range(world)]


def _rank(
    rank: int, environment: dict[str, str], worker: Callable[..., Any], world: int, backend: str, results: Any,
    args: tuple[Any, ...],
) -> None:  # fmt: skip
    take_environment(environment)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if backend.startswith("cuda:"):
        shared = backend == "cuda:shared"
        device = torch.device("cuda", rank % torch.cuda.device_count() if shared else 0)
        torch.cuda.set_device(device)
        backend = "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world)
    try:
        results[rank] = worker(rank, device, *args)
    finally:
        dist.destroy_process_group()
