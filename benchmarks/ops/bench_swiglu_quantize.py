# SPDX-License-Identifier: Apache-2.0
"""SwiGLU with the quantization after it, forward and backward: ours against PyTorch's kernels and torch.compile's.

    python benchmarks/ops/bench_swiglu_quantize.py --output DIR [--shapes 8192x28672 …] [--passes backward …]

    forward                 reads gate_up [M, 2F], writes a8                  5 MF bytes in bf16
    forward, act kept       writes act as well                                7 MF
    forward, e4m3           reads gate_up's bytes                             3 MF
    forward, packed         writes gate_up's bytes as well                    7 MF
    backward                reads dact and gate_up, writes d8 [M, 2F]         8 MF
    backward, dgate_up kept writes dgate_up as well                          12 MF
    backward, e4m3          reads gate_up's bytes                             6 MF

The floor is those bytes at the bandwidth of a copy measured in the same run. Every provider is checked in float64
before it is timed; one that misses is not timed and the exit code is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.lib.layer_ops import Pass, bench_of, delayed_scaling
from benchmarks.lib.op_bench import main
from benchmarks.lib.op_checks import fault, head
from lorakernels import ops
from lorakernels.numerics.fp8 import E4M3
from lorakernels.numerics.gate_up import packed_scales
from lorakernels.values import Scaled

GPU_SHAPES = ["8192x28672", "2048x14336", "1024x8192"]
CPU_SHAPES = ["128x256"]
CHECKED = 64  # rows: float64 of more would take longer than all timings
E5M2 = torch.float8_e5m2


def check(name: str, arguments: tuple[Any, ...], results: tuple[Tensor, ...]) -> str:
    return fault(name, head(arguments, CHECKED), head(results, CHECKED))


def passes(shape: str, dtype: torch.dtype, device: torch.device) -> Iterator[Pass]:
    rows, cols = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(7)
    gate_up = torch.randn(rows, 2 * cols, generator=generator, device=device, dtype=dtype)
    bytes_ = (20 * gate_up).to(E4M3).view(torch.uint8)
    dact = torch.randn(rows, cols, generator=generator, device=device, dtype=dtype)
    scale_inv = torch.full(packed_scales(rows, 2 * cols), 0.05, device=device)
    multiplier = torch.tensor([0.8, 1.3], device=device)
    scaling = delayed_scaling(20.0, device)
    plain, packed = Scaled(gate_up), Scaled(bytes_, scale_inv)
    for name, source, keep, size in (
        ("forward", plain, False, 5),
        ("forward, act kept", plain, True, 7),
        ("forward, e4m3", packed, False, 3),
    ):
        forward = (source, scaling, keep, dtype, None)
        yield Pass(
            name,
            ops.swiglu_quantize,
            ops.swiglu_quantize.by_reference,
            lambda forward=forward: forward,
            partial(check, "swiglu_quantize", forward),
            size * rows * cols,
        )
    yield Pass(
        "forward, packed",
        ops.swiglu_quantize_and_pack,
        ops.swiglu_quantize_and_pack.by_reference,
        lambda: (gate_up, scaling, False, None),
        partial(check, "swiglu_quantize_and_pack", (gate_up, scaling, False, None)),
        7 * rows * cols,
    )
    for name, source, keep, size in (
        ("backward", plain, False, 8),
        ("backward, dgate_up kept", plain, True, 12),
        ("backward, e4m3", packed, False, 6),
    ):
        operands = (dact, source, multiplier)
        backward = (*operands, scaling, E5M2, keep, None)
        yield Pass(
            name,
            ops.swiglu_quantize_grad,
            ops.swiglu_quantize_grad.by_reference,
            lambda backward=backward: backward,
            partial(check, "swiglu_quantize_grad", backward),
            size * rows * cols,
        )


BENCH = bench_of("swiglu_quantize", passes, GPU_SHAPES, CPU_SHAPES)

if __name__ == "__main__":
    sys.exit(main(BENCH))
