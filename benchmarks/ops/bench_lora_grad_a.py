# SPDX-License-Identifier: Apache-2.0
"""dA = dsᵀ D(x) from the saved x8: ours against PyTorch's kernels one after the other.

    python benchmarks/ops/bench_lora_grad_a.py --output DIR [--shapes 8192x8192 …] [--ranks 16 64] [--p 0 0.1]

    reads x8 [M, K], one byte an element (x itself, of a plain base: two); ds and dA are a rank's size and not counted,
    nor is a given mask, a bit an element

The floor is those bytes at the bandwidth of a copy measured in the same run. Each provider is checked in float64 before
it is timed; one that misses is not timed and the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.lib.common import (
    Row,
    against_floor,
    arguments,
    environment,
    finish,
    measured_floor,
    parser,
)
from lorakernels import kernels, ops, reference

GPU_SHAPES = ["8192x8192", "8192x28672", "4096x4096", "2048x8192"]
CPU_SHAPES = ["256x512"]
SITE = 3


@dataclass
class Inputs:
    ds: Tensor
    x: Tensor
    scale_inv: Tensor | None
    slot: Tensor | None
    p: float
    dropped: Tensor | None = None

    def arguments(self) -> tuple[object, ...]:
        operands = (self.ds, self.x, self.scale_inv, self.slot)
        return (*operands, self.p, SITE, torch.float32)


def make_inputs(shape: str, rank: int, p: float, fp8: bool, device: torch.device) -> Inputs:
    rows, cols = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(7)
    ds, x = (
        torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        for size in ((rows, rank), (rows, cols))
    )
    slot = torch.tensor([11, 5], device=device) if p else None
    bits = None
    if slot is not None:
        bits = reference.dropped_bits(reference.drawn_mask(slot, p, SITE, rows, cols))
    if not fp8:
        return Inputs(ds, x, None, slot, p, bits)
    x8 = reference.quantize_fp8(x, torch.full((1,), 60.0, device=device), reference.E4M3)
    return Inputs(
        ds, x8.view(torch.uint8), torch.full((1,), 1 / 60.0, device=device), slot, p, bits
    )


def ours(i: Inputs) -> Tensor:
    return ops.lora_grad_a(*i.arguments())


def pytorch(i: Inputs) -> Tensor:
    """What the op is where the one-pass kernel cannot be used."""
    return sys.modules[kernels.lora_grad_a.__module__].in_torch(*i.arguments(), 0, 0)


def with_mask(i: Inputs) -> Tensor:
    """As in a layer's backward, where quantize_grad has drawn the mask."""
    return ops.lora_grad_a(*i.arguments(), 0, 0, i.dropped)


GIVEN = "ours, mask given"
PROVIDERS: dict[str, Callable[[Inputs], Tensor]] = {
    "ours": ours,
    GIVEN: with_mask,
    "torch": pytorch,
}


def fault(i: Inputs, found: Tensor) -> str:
    """What is wrong, "" if nothing. A sum may be rounded to bf16 first and lose an fp32 eps of each product."""
    x = i.x.double() if i.scale_inv is None else i.x.view(reference.E4M3).double() * i.scale_inv
    x, factor = reference.masked(x, i.slot, i.p, SITE)
    exact = factor * i.ds.double().t() @ x
    size = factor * i.ds.double().abs().t() @ x.abs()
    bound = 2.0**-8 * exact.abs() + 2.0**-20 * size
    return "" if bool(((found.double() - exact).abs() <= bound).all()) else "dA"


def cases(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, int, float, str]]:
    for shape in args.shapes or (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES):
        for rank in args.ranks:
            for p in args.p:
                for x in args.x:
                    yield shape, rank, p, x


def bench_case(
    case: Row, inputs: Inputs, args: argparse.Namespace, device: torch.device, bandwidth: float
) -> list[Row]:
    names = [name for name in args.providers if name != GIVEN or inputs.dropped is not None]
    runs = {name: partial(PROVIDERS[name], inputs) for name in names}
    floor_ms = inputs.x.numel() * inputs.x.element_size() / bandwidth * 1e3
    return against_floor(case, runs, partial(fault, inputs), floor_ms, device, args.repetitions)


def main() -> int:
    options = parser("lora_grad_a against PyTorch's kernels")
    options.add_argument("--shapes", nargs="+", metavar="MxK")
    options.add_argument("--ranks", nargs="+", type=int, default=[16, 64, 128])
    options.add_argument("--p", nargs="+", type=float, default=[0.0, 0.1])
    options.add_argument("--x", nargs="+", choices=["x8", "x"], default=["x8"])
    options.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    args, device = arguments(options)
    bandwidth, floor_facts = measured_floor(device, args.repetitions)
    rows: list[Row] = []
    for shape, rank, p, x in cases(args, device):
        inputs = make_inputs(shape, rank, p, x == "x8", device)
        case: Row = {"shape": shape, "rank": rank, "p": p, "reads": x}
        rows += bench_case(case, inputs, args, device, bandwidth)
    return finish("lora_grad_a", rows, {**environment(device), **floor_facts}, args.output)


if __name__ == "__main__":
    sys.exit(main())
