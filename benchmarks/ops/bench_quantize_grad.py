# SPDX-License-Identifier: Apache-2.0
"""dy8 = sat(dy · scale), ds = scaling · dy B, dB = scaling · dyᵀ s: ours against PyTorch's kernels one after the other.

    python benchmarks/ops/bench_quantize_grad.py --output DIR [--shapes 8192x8192 …] [--ranks 16 64] [--modes eval]

    reads dy [M, N] in bf16, writes dy8: 3 MN bytes; B, s, ds and dB are a rank's size and not counted

The floor is those bytes at the bandwidth of a copy measured in the same run. Rank 0 is the quantization alone. In eval
the tensor's own amax is found first, which reads another 2 MN bytes. Each provider is checked before it is timed: dy8
bit for bit, and the sums in float64. One that misses is not timed, and the exit code is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.lib.op_bench import Bench, Option, Setting, against_floor, calls_of, main
from benchmarks.lib.op_checks import fault
from benchmarks.lib.rows import Row
from lorakernels import ops
from lorakernels.ops.quantize_grad import Grad, by_torch
from lorakernels.values import Dropout, Scaling, Up

SCALING, COLUMN, FP8 = 0.5, 1, torch.float8_e5m2
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass
class Inputs:
    dy: Tensor
    up: Up | None
    scaling: Scaling
    dropout: Dropout


def make_inputs(shape: str, rank: int, delayed: bool, device: torch.device) -> Inputs:
    rows, cols = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(7)
    dy, lora_B, s = (
        torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        for size in ((rows, cols), (cols, rank), (rows, rank))
    )
    scaling = Scaling(torch.full((2, 2), 3.0, device=device), COLUMN, delayed)
    dropout = Dropout(torch.tensor([11, 5], device=device), 0.1, 3)
    return Inputs(dy, Up(lora_B, s, SCALING) if rank else None, scaling, dropout)


def ours(i: Inputs) -> Results:
    return ops.quantize_grad(i.dy, i.up, i.scaling, FP8)


def with_mask(i: Inputs) -> Results:
    """And a mask of as many columns drawn beside, as in a layer's backward."""
    return ops.quantize_grad(i.dy, i.up, i.scaling, FP8, None, None, *mask_of(i))


def mask_of(i: Inputs) -> tuple[Dropout, int]:
    return i.dropout, i.dy.shape[1]


def pytorch(i: Inputs) -> Results:
    """What the op is where the fused kernel cannot be used."""
    return by_torch(Grad(i.dy, i.up, i.scaling, FP8))


DRAWS = "ours, drawing a mask"
PROVIDERS: dict[str, Callable[[Inputs], Results]] = {
    "ours": ours,
    DRAWS: with_mask,
    "torch": pytorch,
}


def check(i: Inputs, results: Results) -> str:
    mask = mask_of(i) if results[4].numel() else ()
    return fault("quantize_grad", (i.dy, i.up, i.scaling, FP8, None, None, *mask), results)


OPTIONS = (
    Option(
        "shapes",
        ["8192x8192", "8192x28672", "4096x4096", "2048x8192"],
        cpu=["256x512"],
        metavar="MxN",
    ),
    Option("ranks", [0, 16, 64, 128]),
    Option("modes", ["delayed"], choices=["delayed", "eval"]),
    Option("providers", list(PROVIDERS), choices=PROVIDERS),
)


def rows(setting: Setting) -> Iterator[Row]:
    args = setting.args
    for shape, rank, mode in product(args.shapes, args.ranks, args.modes):
        i = make_inputs(shape, rank, mode == "delayed", setting.device)
        names = [name for name in args.providers if name != DRAWS or i.up is not None]
        calls = calls_of(PROVIDERS, names, i, check)
        case: Row = {"shape": shape, "rank": rank, "mode": mode}
        yield from against_floor(case, calls, 3 * i.dy.numel(), setting)


BENCH = Bench("quantize_grad", "quantize_grad against PyTorch's kernels", OPTIONS, rows)

if __name__ == "__main__":
    sys.exit(main(BENCH))
