# SPDX-License-Identifier: Apache-2.0
"""Operands in FP8 blocks for the benchmarks of y and of dx, and the options of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.lib.op_bench import Bench, Call, Option, Setting, against_cublaslt, verdict
from benchmarks.lib.op_checks import fault
from benchmarks.lib.rows import Row
from lorakernels.numerics.blocks import quantize_rows, quantize_weight_blocks
from lorakernels.numerics.fp8 import E4M3
from lorakernels.values import Scaled, Weight


@dataclass
class Inputs:
    """One product's: `wide` is R columns beside `left`, bf16; `narrow` is fp32, of as many ranks."""

    left: Scaled
    weight: Weight
    wide: Tensor
    narrow: Tensor
    out_dtype: torch.dtype = torch.bfloat16


Arguments = Callable[[Inputs, bool], tuple[object, ...]]  # and whether with the adapter
Providers = Mapping[str, tuple[Callable[[Inputs], Tensor], bool]]  # and whether it has the adapter
BASE = "cublaslt, base only"


def make_inputs(shape: str, rank: int, gradient: bool, device: torch.device) -> Inputs:
    """shape is M x N x K of y; a gradient's left operand is dy [M, N], a forward's x [M, K]."""
    m, n, k = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    left = quantize_rows(normal(m, n if gradient else k), E4M3)
    weight = Weight(*quantize_weight_blocks(normal(n, k) / k**0.5))
    narrow = normal(rank, k) if gradient else normal(n, rank)
    return Inputs(left, weight, normal(m, rank).bfloat16(), narrow / rank**0.5)


def bench(name: str, op: str, providers: Providers, arguments: Arguments) -> Bench:
    """`op` in blocks with and without the adapter beside cuBLASLt's product alone, which is `BASE`."""
    gradient = "grad" in op

    def check(given: tuple[object, ...], found: Tensor) -> Row:
        return verdict(fault(op, given, found))

    def rows(setting: Setting) -> Iterator[Row]:
        for shape, rank in product(setting.args.shapes, setting.args.ranks):
            m, n, k = map(int, shape.split("x"))
            i = make_inputs(shape, rank, gradient, setting.device)
            calls = {}
            for provider in setting.args.providers:
                run, lora = providers[provider]
                work = 2 * m * (n * k + lora * rank * (k if gradient else n))
                checked = partial(check, arguments(i, lora))
                calls[provider] = Call(partial(run, i), checked, work)
            case: Row = {"M x N x K": shape, "rank": rank}
            yield from against_cublaslt(
                case, calls, partial(providers[BASE][0], i), setting, digits=1
            )

    options = (
        Option(
            "shapes",
            ["4096x4096x4096", "8192x8192x8192", "8192x28672x8192", "8192x8192x28672"],
            cpu=["32x64x144"],
            metavar="MxNxK",
        ),
        Option("ranks", [16, 64], cpu=[16]),
        Option("providers", list(providers), choices=providers),
    )
    return Bench(name, f"{name} against cuBLASLt's base-only product", options, rows, floor=False)
