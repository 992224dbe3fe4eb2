# SPDX-License-Identifier: Apache-2.0
"""x8 = sat(x · scale), s = D(x) Aᵀ: ours against PyTorch's kernels one after the other.

    python benchmarks/ops/bench_quantize_lora_down.py --output DIR [--shapes 8192x8192 …] [--ranks 16 64] [--p 0.1]

    reads x [M, K] in bf16, writes x8: 3 MK bytes; A and s are a rank's size and not counted

The floor is those bytes at the bandwidth of a copy measured in the same run. Rank 0 is the quantization alone. In eval
the tensor's own amax is found first, which reads another 2 MK bytes, and there is no dropout. Each provider is checked
before it is timed: x8 bit for bit, and s in float64 under the reference's mask. One that misses is not timed, and
the exit code is 1.
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
from lorakernels.ops.quantize_lora_down import Down, by_torch
from lorakernels.values import Dropout, Scaling

COLUMN, SITE = 1, 3
Results = tuple[Tensor, Tensor, Tensor]


@dataclass
class Inputs:
    x: Tensor
    lora_A: Tensor | None
    scaling: Scaling
    dropout: Dropout | None


def make_inputs(shape: str, rank: int, p: float, delayed: bool, device: torch.device) -> Inputs:
    rows, cols = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(7)
    x, lora_A = (
        torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        for size in ((rows, cols), (rank, cols))
    )
    dropout = Dropout(torch.tensor([12345, 678], device=device), p, SITE) if p > 0 else None
    scaling = Scaling(torch.full((2, 2), 3.0, device=device), COLUMN, delayed)
    return Inputs(x, lora_A if rank else None, scaling, dropout)


def ours(i: Inputs) -> Results:
    return ops.quantize_lora_down(i.x, i.lora_A, i.scaling, i.dropout)


def pytorch(i: Inputs) -> Results:
    """What the op is where the fused kernel cannot be used."""
    return by_torch(Down(i.x, i.lora_A, i.scaling, i.dropout))


PROVIDERS: dict[str, Callable[[Inputs], Results]] = {"ours": ours, "torch": pytorch}


def check(i: Inputs, results: Results) -> str:
    return fault("quantize_lora_down", (i.x, i.lora_A, i.scaling, i.dropout, None), results)


OPTIONS = (
    Option(
        "shapes",
        ["8192x8192", "8192x28672", "4096x4096", "2048x8192"],
        cpu=["256x512"],
        metavar="MxK",
    ),
    Option("ranks", [0, 16, 64, 128]),
    Option("p", [0.0, 0.1]),
    Option("modes", ["delayed"], choices=["delayed", "eval"]),
    Option("providers", list(PROVIDERS), choices=PROVIDERS),
)


def cases(setting: Setting) -> Iterator[tuple[str, int, float, str]]:
    args = setting.args
    for shape, rank in product(args.shapes, args.ranks):
        for p, mode in product(args.p if rank else [0.0], args.modes):
            if mode == "delayed" or p == 0:
                yield shape, rank, p, mode


def rows(setting: Setting) -> Iterator[Row]:
    for shape, rank, p, mode in cases(setting):
        i = make_inputs(shape, rank, p, mode == "delayed", setting.device)
        calls = calls_of(PROVIDERS, setting.args.providers, i, check)
        case: Row = {"shape": shape, "rank": rank, "p": p, "mode": mode}
        yield from against_floor(case, calls, 3 * i.x.numel(), setting)


BENCH = Bench("quantize_lora_down", "quantize_lora_down against PyTorch's kernels", OPTIONS, rows)

if __name__ == "__main__":
    sys.exit(main(BENCH))
