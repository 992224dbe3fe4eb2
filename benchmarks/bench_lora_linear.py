# SPDX-License-Identifier: Apache-2.0
"""LoRALinear forward + backward against a frozen nn.Linear with and without PEFT-style LoRA, on whatever is here.

    python benchmarks/bench_lora_linear.py --output DIR [--shapes 8192x8192x8192 …] [--rank 16] [--dropout 0.1]

All providers see the same x, dy, weight and dropout probability; adapters are fp32, as PEFT keeps them. Each is checked
against float64 before it is timed; one that misses is not timed and the exit code is 1. On a GPU the L2 cache is
overwritten before every repetition. FLOPs are the algorithm's:
    forward 2MNK, dx 2MNK, LoRA 6MR(K + N)
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
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


def time_of(step: Callable[[], None], device: torch.device, repetitions: int) -> float:
    """Median seconds of `step`."""
    for _ in range(3):
        step()
    if device.type != "cuda":
        samples = []
        for _ in range(repetitions):
            start = time.perf_counter()
            step()
            samples.append(time.perf_counter() - start)
        return statistics.median(samples)
    scrub = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for start_event, end_event in events:
        scrub.zero_()
        start_event.record()
        step()
        end_event.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1000


def bench_shape(
    shape: str, args: argparse.Namespace, device: torch.device
) -> list[dict[str, object]]:
    m, n, k = map(int, shape.split("x"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    base = nn.Linear(k, n, device=device, dtype=dtype).requires_grad_(False)
    config = LoRAConfig(
        r=args.rank, lora_alpha=2 * args.rank, lora_dropout=args.dropout, fp8=DelayedScaling()
    )
    x = torch.randn(m, k, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(m, n, device=device, dtype=dtype)
    rows = []
    for name, module in providers(base, config).items():
        error = error_of(name, module, base, config, x)
        ok = error <= (FP8_TOLERANCE if name.endswith("fp8") else PLAIN_TOLERANCE[dtype])
        inputs = [x, *(p for p in module.parameters() if p.requires_grad)]

        def step(module: nn.Module = module, inputs: list[Tensor] = inputs) -> None:
            torch.autograd.grad(module(x), inputs, dy)

        seconds = time_of(step, device, args.repetitions) if ok else math.nan
        flops = 4 * m * n * k + (0 if name == "linear" else 6 * m * args.rank * (k + n))
        rows.append(
            {
                "shape MxNxK": shape,
                "provider": name,
                "dtype": str(dtype).removeprefix("torch."),
                "rank": args.rank,
                "dropout": args.dropout,
                "error": f"{error:.1e}" + ("" if ok else " WRONG"),
                "ms": round(seconds * 1000, 4),
                "TFLOP/s": round(flops / seconds / 1e12, 3),
            }
        )
    floor = rows[0]["ms"]
    return [{**row, "÷ linear": round(row["ms"] / floor, 3)} for row in rows]  # type: ignore[operator]


def environment(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return {
        "device": f"{device.type}: {name}{threads}",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "triton": _first_line(sys.executable, "-c", "import triton; print(triton.__version__)"),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": os.environ.get("LORAKERNELS_COMMIT")  # a copy of the tree without .git
        or _first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
    }


def _first_line(*command: str) -> str:
    """What `command` prints first, or "unknown" where it cannot run."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.partition("\n")[0].strip()


def write_csv(path: Path, rows: list[dict[str, object]], facts: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *facts])
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)


def table(rows: list[dict[str, object]]) -> str:
    lines = [list(rows[0]), *([str(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)) for line in lines
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="LoRALinear forward + backward against its peers")
    parser.add_argument(
        "--output", type=Path, help="folder for lora_linear.csv; only printed if not given"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", metavar="MxNxK")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--repetitions", type=int, default=20)
    args = parser.parse_args()
    device = torch.device(args.device)
    facts = environment(device)
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    rows = []
    for shape in args.shapes or (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES):
        rows += bench_shape(shape, args, device)
    print(table(rows))
    if args.output:
        write_csv(args.output / "lora_linear.csv", rows, facts)
        print(f"written to {args.output / 'lora_linear.csv'}")
    return 1 if any("WRONG" in str(row["error"]) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
