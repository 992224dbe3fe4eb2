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
from benchmarks.lib.op_checks import off, off_fp8
from lorakernels import ops
from lorakernels.numerics.fp8 import E4M3

GPU_SHAPES = ["8192x8192", "8192x16384", "2048x4096", "1024x2048"]
CPU_SHAPES = ["128x256"]
EPS = 1e-5


def forward_fault(x: Tensor, weight: Tensor, keep: bool, results: tuple[Tensor, ...]) -> str:
    normed, x8, scale_inv, rstd = results
    wide = x.double()
    exact_rstd = (wide.square().mean(1) + EPS).rsqrt()
    exact = wide * exact_rstd.view(-1, 1) * weight.double()
    if off(rstd, exact_rstd):
        return "rstd"
    if keep and off(
        normed, exact, 2.0
    ):  # x · rstd and its product with the weight, as Transformers
        return "normed"
    return "x8" if off_fp8(x8, scale_inv, E4M3, exact) else ""


def backward_fault(arguments: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> str:
    dnormed, x, weight, rstd, dresidual = (t.double() for t in arguments)
    h, g = x * rstd.view(-1, 1), dnormed * weight
    exact = dresidual + rstd.view(-1, 1) * (g - h * (g * h).mean(1, keepdim=True))
    return "dx" if off(results[0], exact) else ""


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
            ops.rms_norm_quantize.reference,
            lambda keep=keep: (x, weight, EPS, scaling, keep),
            partial(forward_fault, x, weight, keep),
            size * rows * cols,
        )
    rstd = (x.float().square().mean(1) + EPS).rsqrt()
    arguments = (dnormed, x, weight, rstd, dresidual)
    yield Pass(
        "backward",
        ops.rms_norm_backward,
        ops.rms_norm_backward.reference,
        lambda: (*arguments, False),
        partial(backward_fault, arguments),
        8 * rows * cols,
    )


BENCH = bench_of("rms_norm_quantize", passes, GPU_SHAPES, CPU_SHAPES)

if __name__ == "__main__":
    sys.exit(main(BENCH))
