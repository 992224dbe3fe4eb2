# SPDX-License-Identifier: Apache-2.0
"""LoRALinear forward + backward against a frozen nn.Linear with and without PEFT-style LoRA, on whatever is here.

    python benchmarks/bench_lora_linear.py --output DIR [--shapes 8192x8192x8192 …] [--rank 16] [--dropout 0.1]

All providers see the same x, dy, weight and dropout probability; adapters are fp32, as PEFT keeps them. Each is checked
against float64 before it is timed; one that misses is not timed and the exit code is 1. "ms" is the device's with
nothing waiting for the host: run by itself, a layer takes the longer of that and "CPU µs". FLOPs are the algorithm's:
    forward 2MNK, dx 2MNK, LoRA 6MR(K + N)
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
from common import NOT_TIMED, Row, arguments, environment, finish, parser, ratio, time_of
from torch import Tensor, nn

from lorakernels import DelayedScaling, LoRAConfig, LoRALinear

CPU_SHAPES = ["256x512x512", "512x1024x1024"]
GPU_SHAPES = ["2048x4096x4096", "4096x4096x4096", "8192x8192x8192"]
# The coarser operand, dy in e5m2, has 2 bits of mantissa: off by 2^-3 at most, by 0.05 in the root mean square
FP8_TOLERANCE = 0.06
PLAIN_TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


class PeftStyle(nn.Module):
    """base(x) + scaling · B(A(dropout(x))): PEFT's arithmetic in plain PyTorch."""

    def __init__(self, base: nn.Linear, config: LoRAConfig) -> None:
        super().__init__()
        self.base = base
        self.scaling = config.lora_alpha / config.r
        self.dropout = nn.Dropout(config.lora_dropout)
        factory = {"device": base.weight.device, "dtype": torch.float32}
        self.lora_A = nn.Parameter(torch.empty(config.r, base.in_features, **factory))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, config.r, **factory))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        s = nn.functional.linear(self.dropout(x.to(self.lora_A.dtype)), self.lora_A)
        return y + (nn.functional.linear(s, self.lora_B) * self.scaling).to(y.dtype)


def providers(base: nn.Linear, config: LoRAConfig) -> dict[str, nn.Module]:
    plain = LoRAConfig(
        r=config.r, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout, fp8=None
    )
    modules = {
        "linear": base,
        "peft-style": PeftStyle(base, config),
        "lorakernels": LoRALinear.from_linear(base, plain),
        "lorakernels-fp8": LoRALinear.from_linear(base, config),
    }
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(config.r, base.in_features, generator=generator) / math.sqrt(base.in_features)
    b = torch.randn(base.out_features, config.r, generator=generator) / math.sqrt(config.r)
    with torch.no_grad():
        for name, module in modules.items():
            if name != "linear":
                module.lora_A.copy_(a)
                module.lora_B.copy_(b)
    return modules


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def error_of(name: str, module: nn.Module, base: nn.Linear, config: LoRAConfig, x: Tensor) -> float:
    """Larger relative error of y and dx against float64, dropout off."""
    module.eval()
    weight, x64 = base.weight.double(), x.detach().double().requires_grad_()
    expected = x64 @ weight.t() + base.bias.double()
    if name != "linear":
        scaling = config.lora_alpha / config.r
        expected = (
            expected + scaling * (x64 @ module.lora_A.double().t()) @ module.lora_B.double().t()
        )
    dy = torch.randn(expected.shape, device=x.device, dtype=x.dtype)
    (dx_expected,) = torch.autograd.grad(expected, x64, dy.double())
    y = module(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    module.train()
    return max(relative_error(y.detach(), expected.detach()), relative_error(dx, dx_expected))


def bench_shape(shape: str, args: argparse.Namespace, device: torch.device) -> list[Row]:
    m, n, k = map(int, shape.split("x"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    base = nn.Linear(k, n, device=device, dtype=dtype).requires_grad_(False)
    config = LoRAConfig(
        r=args.rank, lora_alpha=2 * args.rank, lora_dropout=args.dropout, fp8=DelayedScaling()
    )
    x = torch.randn(m, k, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(m, n, device=device, dtype=dtype)
    rows: list[Row] = []
    for name, module in providers(base, config).items():
        error = error_of(name, module, base, config, x)
        ok = error <= (FP8_TOLERANCE if name.endswith("fp8") else PLAIN_TOLERANCE[dtype])
        inputs = [x, *(p for p in module.parameters() if p.requires_grad)]

        def step(module: nn.Module = module, inputs: list[Tensor] = inputs) -> None:
            torch.autograd.grad(module(x), inputs, dy)

        columns = time_of(step, device, args.repetitions).columns() if ok else NOT_TIMED
        flops = 4 * m * n * k + (0 if name == "linear" else 6 * m * args.rank * (k + n))
        rows.append(
            {
                "shape MxNxK": shape,
                "provider": name,
                "dtype": str(dtype).removeprefix("torch."),
                "rank": args.rank,
                "dropout": args.dropout,
                "error": f"{error:.1e}" + ("" if ok else " WRONG"),
                **columns,
                "TFLOP/s": ratio(flops / 1e9, columns["ms"]),
                "÷ linear": ratio(columns["ms"], rows[0]["ms"] if rows else columns["ms"]),
            }
        )
    return rows


def main() -> int:
    options = parser("LoRALinear forward + backward against its peers")
    options.add_argument("--shapes", nargs="+", metavar="MxNxK")
    options.add_argument("--rank", type=int, default=16)
    options.add_argument("--dropout", type=float, default=0.1)
    args, device = arguments(options)
    rows: list[Row] = []
    for shape in args.shapes or (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES):
        rows += bench_shape(shape, args, device)
    return finish("lora_linear", rows, environment(device), args.output, check="error")


if __name__ == "__main__":
    sys.exit(main())
