# SPDX-License-Identifier: Apache-2.0
"""Shared by the benchmarks of several ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lib.timing import synchronize

ROWS = 16  # of text, for all ranks


def step_seconds(step: Callable[[int], object], often: int, device: torch.device) -> list[float]:
    """Seconds of each of `often` calls of `step`, between events on the stream; the steps follow each other."""
    if device.type != "cuda":
        times = [time.perf_counter()]
        for number in range(often):
            step(number)
            times.append(time.perf_counter())
        return [b - a for a, b in pairwise(times)]
    synchronize(device)
    dist.barrier()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(often + 1)]
    events[0].record()
    for number, event in enumerate(events[1:]):
        step(number)
        event.record()
    synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]


def time_left(end: float, device: torch.device) -> bool:
    """Collective: whether it is before `end`, by time.perf_counter, on all ranks."""
    left = torch.tensor(end - time.perf_counter(), device=device)
    dist.all_reduce(left, dist.ReduceOp.MIN)
    return bool(left > 0)


def largest(value: float, device: torch.device) -> float:
    """Collective: the largest `value` of all ranks."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def sum_of(value: float, device: torch.device) -> float:
    """Collective: the sum of all ranks' `value`."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found)
    return float(found)


def average_gradients(trained: Sequence[torch.nn.Parameter], group: Any = None) -> None:
    """Of the parameters that have one, over the ranks of `group`, None for all, by one all-reduce."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return
    grads = [p.grad for p in trained if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, group=group)
    flat.div_(ranks)
    parts = flat.split([g.numel() for g in grads])
    torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(parts, grads, strict=True)])


def start_ranks(device: torch.device) -> torch.device:
    """This rank's device, after torchrun or alone."""
    if "RANK" not in os.environ:
        store = dist.HashStore()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        return torch.device("cuda", 0) if device.type == "cuda" else device
    local = int(os.environ.get("LOCAL_RANK", 0))
    if device.type == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    return device
