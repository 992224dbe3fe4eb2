# SPDX-License-Identifier: Apache-2.0
"""Measure a plan's rates on this machine's GPU, in about a second.

A product and a copy of torch's are timed, and compared with the same on the H200 that the constants are of. The
constants change by these ratios. What needs a longer run, power and watts, stays the H200's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lorakernels.planner.machine import COPY, MACHINES, PRODUCT, Machine
from lorakernels.planner.time import gemm_seconds

SHAPES = ((4096, 4096, 4096), (2048, 8192, 8192))  # M, N, K: too short to reach the power limit
BYTES = 256 << 20


def probe(device: torch.device) -> Machine:
    """Rates of a GPU that is idle, and of the links to the other GPUs that this process sees and to the host.

    Raises:
        ValueError: `device` is not a GPU with FP8 tensor cores.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(f"a probe needs a GPU with FP8 tensor cores, found {device}")
    like, properties = MACHINES["H200"], torch.cuda.get_device_properties(device)
    with torch.cuda.device(device):
        processors = properties.multi_processor_count
        fp8 = max(_fp8_rate(shape, processors, device) for shape in SHAPES) / PRODUCT
        source = torch.empty(BYTES, dtype=torch.uint8, device=device)
        copied = 2 * BYTES / _seconds(copying(torch.empty_like(source), source))
        host = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)
        hosted = BYTES / _seconds(copying(source, host))
        return replace(
            like,
            name=properties.name,
            memory=torch.cuda.mem_get_info(device)[1],
            fp8_forward=like.fp8_forward * fp8,
            fp8_backward=like.fp8_backward * fp8,
            bf16=like.bf16 * fp8,
            bandwidth=like.bandwidth * copied / COPY,
            host=hosted,
            peer=_peer_rate(source, like.peer),
            processors=processors,
        )


def copying(target: Tensor, source: Tensor) -> Callable[[], object]:
    """A call that copies `source` to `target`."""
    return lambda: target.copy_(source, non_blocking=True)


def _fp8_rate(shape: tuple[int, int, int], processors: int, device: torch.device) -> float:
    m, n, k = shape
    a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    seconds = _seconds(
        lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    )
    # the rate with which gemm_seconds gives what was measured
    fixed = gemm_seconds(shape, float("inf"), processors)
    return gemm_seconds(shape, 1.0, processors) / max(seconds - fixed, 1e-9)


def _peer_rate(source: Tensor, otherwise: float) -> float:
    for index in range(torch.cuda.device_count()):
        here = source.get_device()
        if index != here and torch.cuda.can_device_access_peer(here, index):
            other = torch.empty(BYTES, dtype=torch.uint8, device=f"cuda:{index}")
            return BYTES / _seconds(copying(source, other))
    return otherwise


def _seconds(call: Callable[[], object], often: int = 5) -> float:
    """The least of a few calls, behind one that is not counted."""
    call()
    times = []
    for _ in range(often):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)
