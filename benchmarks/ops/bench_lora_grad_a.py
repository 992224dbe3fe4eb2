# SPDX-License-Identifier: Apache-2.0
"""dA = dsᵀ D(x) from the saved x8: ours against PyTorch's kernels one after the other.

    python benchmarks/ops/bench_lora_grad_a.py --output DIR [--shapes 8192x8192 …] [--ranks 16 64] [--p 0 0.1]

    reads x8 [M, K], one byte an element; with --x x it reads x itself, two bytes, as over a plain base;
    with --x blocks x8 has a scale for each 1 × 128

ds and dA are a rank's size and not counted. A given mask, a bit an element, is not counted either. The floor is those
bytes at the bandwidth of a copy measured in the same run. Each provider is checked in float64 before it is timed. One
that misses is not timed, and the exit code is 1.
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
from lorakernels.numerics.blocks import quantize_rows
from lorakernels.numerics.dropout import drawn_mask, dropped_bits
from lorakernels.numerics.fp8 import E4M3, quantize_fp8
from lorakernels.ops.lora_grad_a import GradA, by_torch
from lorakernels.values import Dropout, Scaled

SITE = 3


@dataclass
class Inputs:
    ds: Tensor
    x: Scaled
    dropout: Dropout | None
    given: Dropout | None  # with the mask, drawn already


def make_inputs(shape: str, rank: int, p: float, kind: str, device: torch.device) -> Inputs:
    rows, cols = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(7)
    ds, x = (
        torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        for size in ((rows, rank), (rows, cols))
    )
    dropout = given = None
    if p:
        dropout = Dropout(torch.tensor([11, 5], device=device), p, SITE)
        given = dropout._replace(dropped=dropped_bits(drawn_mask(dropout, rows, cols)))
    if kind == "blocks":
        return Inputs(ds, quantize_rows(x, E4M3), dropout, given)
    if kind == "x":
        return Inputs(ds, Scaled(x), dropout, given)
    x8 = quantize_fp8(x, torch.full((1,), 60.0, device=device), E4M3)
    scaled = Scaled(x8.view(torch.uint8), torch.full((1,), 1 / 60.0, device=device))
    return Inputs(ds, scaled, dropout, given)


def ours(i: Inputs) -> Tensor:
    return ops.lora_grad_a(i.ds, i.x, i.dropout, torch.float32)


def pytorch(i: Inputs) -> Tensor:
    """What the op is where the one-pass kernel cannot be used."""
    return by_torch(GradA(i.ds, i.x, i.dropout, torch.float32))


def with_mask(i: Inputs) -> Tensor:
    """As in a layer's backward, where quantize_grad has drawn the mask."""
    return ops.lora_grad_a(i.ds, i.x, i.given, torch.float32)


GIVEN = "ours, mask given"
PROVIDERS: dict[str, Callable[[Inputs], Tensor]] = {
    "ours": ours,
    GIVEN: with_mask,
    "torch": pytorch,
}


def check(i: Inputs, found: Tensor) -> str:
    return fault("lora_grad_a", (i.ds, i.x, i.dropout, torch.float32), found)


OPTIONS = (
    Option(
        "shapes",
        ["8192x8192", "8192x28672", "4096x4096", "2048x8192"],
        cpu=["256x512"],
        metavar="MxK",
    ),
    Option("ranks", [16, 64, 128]),
    Option("p", [0.0, 0.1]),
    Option("x", ["x8"], choices=["x8", "x", "blocks"]),
    Option("providers", list(PROVIDERS), choices=PROVIDERS),
)


def rows(setting: Setting) -> Iterator[Row]:
    args = setting.args
    for shape, rank, p, x in product(args.shapes, args.ranks, args.p, args.x):
        i = make_inputs(shape, rank, p, x, setting.device)
        names = [name for name in args.providers if name != GIVEN or i.given is not None]
        calls = calls_of(PROVIDERS, names, i, check)
        case: Row = {"shape": shape, "rank": rank, "p": p, "reads": x}
        yield from against_floor(case, calls, i.x.data.numel() * i.x.data.element_size(), setting)


BENCH = Bench("lora_grad_a", "lora_grad_a against PyTorch's kernels", OPTIONS, rows)

if __name__ == "__main__":
    sys.exit(main(BENCH))
