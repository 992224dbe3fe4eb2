# SPDX-License-Identifier: Apache-2.0
"""y = x8 W8ᵀ + bias + scaling · s Bᵀ in one kernel, against cuBLASLt's product without bias and LoRA.

    python benchmarks/ops/bench_fp8_linear_lora.py --output DIR [--shapes 8192x8192x8192 …] [--ranks 8 16 64 128]

    2MNK + 2MNR operations; shapes are M x N x K

"cublaslt, base only" is `torch._scaled_mm` with fast accumulation; "pytorch" is that with the bias and `addmm`. s and y
are bf16, B fp32. Every provider's y is compared with float64's on 64 rows before it is timed: more than twice the error
of "pytorch" is WRONG and exit code 1. An H200 under load lowers its clock within a second: "÷ cublaslt" divides by
the mean of two runs of "cublaslt, base only", one before and one after the provider.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.lib.common import (
    NOT_TIMED,
    Row,
    arguments,
    environment,
    finish,
    heat,
    parser,
    ratio,
    time_of,
)
from lorakernels import ops, reference

GPU_SHAPES = [
    "4096x4096x4096",
    "8192x8192x8192",
    "8192x10240x8192",
    "2048x8192x8192",
    "8192x8192x28672",
    "8192x57344x8192",
]
CPU_SHAPES = ["32x64x128"]
CHECKED_ROWS = 64
Step = Callable[[], Tensor]


@dataclass
class Inputs:
    x: Tensor
    x_scale_inv: Tensor
    weight: Tensor
    weight_scale_inv: Tensor
    bias: Tensor
    s: Tensor
    lora_B: Tensor
    scaling: float = 2.0
    out_dtype: torch.dtype = torch.bfloat16

    def all(self) -> tuple:  # type: ignore[type-arg]
        return tuple(vars(self).values())

    def base(self) -> tuple:  # type: ignore[type-arg]
        return *self.all()[:4], None, None, None, 1.0, self.out_dtype


def make_inputs(shape: str, rank: int, device: torch.device) -> Inputs:
    m, n, k = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    one = torch.ones(1, device=device)
    x, weight = (normal(*size).to(reference.E4M3).view(torch.uint8) for size in ((m, k), (n, k)))
    bias, s = normal(n).bfloat16(), normal(m, rank).bfloat16()
    return Inputs(x, one / 8, weight, one / k**0.5, bias, s, normal(n, rank) / rank**0.5)


def exact(i: Inputs, rows: int, lora: bool) -> Tensor:
    """float64, of the first `rows` rows."""
    x, w = i.x[:rows].view(reference.E4M3).double(), i.weight.view(reference.E4M3).double()
    y = (x @ w.t()) * i.x_scale_inv.double() * i.weight_scale_inv.double()
    if lora:
        y += i.scaling * (i.s[:rows].double() @ i.lora_B.to(i.s.dtype).double().t())
        y += i.bias.double()
    return y


def base_only(i: Inputs, bias: Tensor | None = None) -> Tensor:
    return torch._scaled_mm(
        i.x.view(reference.E4M3),
        i.weight.view(reference.E4M3).t(),
        scale_a=i.x_scale_inv,
        scale_b=i.weight_scale_inv,
        bias=bias,
        out_dtype=i.out_dtype,
        use_fast_accum=True,
    )


def pytorch(i: Inputs) -> Tensor:
    y = base_only(i, i.bias)
    return y.addmm_(i.s, i.lora_B.to(i.s.dtype).t(), alpha=i.scaling)


PROVIDERS: dict[str, tuple[Callable[[Inputs], Tensor], bool]] = {  # and whether it has LoRA
    "cublaslt, base only": (base_only, False),
    "ours": (lambda i: ops.fp8_linear_lora(*i.all()), True),
    "ours, base only": (lambda i: ops.fp8_linear_lora(*i.base()), False),
    "pytorch": (pytorch, True),
}


def error(y: Tensor, i: Inputs, lora: bool) -> float:
    expected = exact(i, min(CHECKED_ROWS, y.shape[0]), lora)
    return float((y[: expected.shape[0]].double() - expected).norm() / expected.norm())


def bench_case(
    shape: str, rank: int, device: torch.device, repetitions: int, providers: list[str]
) -> list[Row]:
    m, n, k = map(int, shape.split("x"))
    i = make_inputs(shape, rank, device)
    allowed = {lora: 2 * error(pytorch(i) if lora else base_only(i), i, lora) for lora in (0, 1)}
    rows: list[Row] = []
    heat(device)
    before = time_of(lambda: base_only(i), device, repetitions).columns()["ms"]
    for name in providers:
        run, lora = PROVIDERS[name]
        found = error(run(i), i, lora)
        columns, after = NOT_TIMED, before
        if found <= allowed[lora]:
            columns = time_of(lambda: run(i), device, repetitions).columns()  # noqa: B023
            after = time_of(lambda: base_only(i), device, repetitions).columns()["ms"]
        ms = columns["ms"]
        timed = isinstance(ms, float) and ms > 0
        both = isinstance(before, float) and isinstance(after, float)
        rows.append(
            {
                "M x N x K": shape,
                "rank": rank,
                "provider": name,
                "check": "ok" if found <= allowed[lora] else f"WRONG: error {found:.1e}",
                **columns,
                "TFLOP/s": round((2 * m * n * (k + lora * rank)) / ms / 1e9, 1) if timed else "",
                "÷ cublaslt": ratio(ms, (before + after) / 2 if both else before),
            }
        )
        before = after
    return rows


def main() -> int:
    options = parser("fp8_linear_lora against cuBLASLt's base-only product")
    options.add_argument("--shapes", nargs="+", metavar="MxNxK")
    options.add_argument("--ranks", nargs="+", type=int)
    options.add_argument("--providers", nargs="+", choices=list(PROVIDERS))
    args, device = arguments(options)
    gpu = device.type == "cuda"
    rows: list[Row] = []
    for shape in args.shapes or (GPU_SHAPES if gpu else CPU_SHAPES):
        for rank in args.ranks or ([16, 64] if gpu else [16]):
            names = args.providers or list(PROVIDERS)
            rows += bench_case(shape, rank, device, args.repetitions, names)
    return finish("fp8_linear_lora", rows, environment(device), args.output)


if __name__ == "__main__":
    sys.exit(main())
