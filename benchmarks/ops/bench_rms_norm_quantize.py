# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with what follows it, forward and backward: ours against PyTorch's kernels and torch.compile's.

    python benchmarks/ops/bench_rms_norm_quantize.py --output DIR [--shapes 8192x8192 …] [--passes backward …]

    forward                reads x, writes x8                                 3 MK bytes in bf16
    forward, normed kept   reads x, writes normed and x8                      5 MK
    backward               reads dnormed, x and dresidual, writes dx          8 MK

The floor is those bytes at the bandwidth of a copy measured in the same run; the weight and rstd are not counted.
Every provider is checked in float64 before it is timed; one that misses is not timed and the exit code is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.lib.layer_ops import Pass, bench_of, delayed_scaling
from benchmarks.lib.op_bench import main
from benchmarks.lib.op_checks import fault
from lorakernels import ops

GPU_SHAPES = ["8192x8192", "8192x16384", "2048x4096", "1024x2048"]
CPU_SHAPES = ["128x256"]
EPS = 1e-5


def passes(shape: str, dtype: torch.dtype, device: torch.device) -> Iterator[Pass]:
    rows, cols = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(7)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    x, dnormed, dresidual = (normal(rows, cols) for _ in range(3))
    weight = 1 + 0.1 * normal(cols)
    scaling = delayed_scaling(60.0, device)
    for name, keep, size in (("forward", False, 3), ("forward, normed kept", True, 5)):
        yield Pass(
            name,
            ops.rms_norm_quantize,
            ops.rms_norm_quantize.by_reference,
            lambda keep=keep: (x, weight, EPS, scaling, keep, None),
            partial(fault, "rms_norm_quantize", (x, weight, EPS, scaling, keep, None)),
            size * rows * cols,
        )
    rstd = (x.float().square().mean(1) + EPS).rsqrt()
    arguments = (dnormed, x, weight, rstd, dresidual, False)
    yield Pass(
        "backward",
        ops.rms_norm_backward,
        ops.rms_norm_backward.by_reference,
        lambda: arguments,
        partial(fault, "rms_norm_backward", arguments, roundings=1),
        8 * rows * cols,
    )


BENCH = bench_of("rms_norm_quantize", passes, GPU_SHAPES, CPU_SHAPES)

if __name__ == "__main__":
    sys.exit(main(BENCH))
