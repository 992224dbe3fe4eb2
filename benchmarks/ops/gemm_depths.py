# SPDX-License-Identifier: Apache-2.0
"""What an FP8 product's loop takes and what its epilogue takes: a line through its cycles at several depths.

    python benchmarks/ops/gemm_depths.py --output DIR [--depths 1024 2048 …] [--without-ncu]

All outputs are 8448 × 8192. On 132 multiprocessors those are 16 tiles of 128 × 256 each, so that no round is partly
filled. Everything is counted for so many outputs, whatever a kernel's own tile is:

    cycles of a tile = loop · depth / 128 + epilogue

"loop" and "epilogue" are fitted by least squares over the depths, of which each relative error counts alike. Where
kernels differ by depth, the line is of the one that ran at most depths; with fewer than three there is none. FP8's
tensor cores need 1024 cycles for 128 of depth; "of peak" is that over "loop". "off" is the largest error of the line.

    forward      e4m3 · e4m3, alone and with an adapter's term, R = 16
    backward     e5m2 · e4m3 over W as it lies, sums split, alone and with an adapter's term, R = 16
    cublaslt     the same products without an adapter, forward with fast accumulation, backward split on a ready Wᵀ

Nsight Compute counts the cycles in which a multiprocessor has work (sm__cycles_active.avg), which no clock changes.
Without `ncu`, times by CUDA events stand in the same columns, as cycles at the highest clock ("by" is events then).
gemm_depths.csv has the fits, gemm_depths_points.csv what they were fitted to.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.lib.ncu import CLOCK, DURATION, Kernel, counted, kernels_of
from benchmarks.lib.rows import (
    Row,
    arguments,
    environment,
    parser,
    table,
    write_csv,
)
from benchmarks.lib.timing import time_of
from lorakernels import ops
from lorakernels.values import Scaled, Up, Weight

ROWS, COLS, RANK = 8448, 8192, 16
TILES = ROWS * COLS / (128 * 256 * 132)  # a multiprocessor's, 16
PEAK = 1024.0  # cycles of 128 × 256 × 128 products, 4096 of them a cycle
STEP = 128  # of the depth
LEAST = 3  # depths of a line
DEPTHS = (1024, 2048, 3072, 4096, 8192, 12288, 16384)
CYCLES = "sm__cycles_active.avg"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
GEMMS = ("fp8_gemm_kernel", "nvjet", "cutlass", "sm90_xmma")  # how their kernels' names begin
Product = Callable[[], Tensor]


def products(depth: int, device: torch.device) -> dict[str, Product]:
    """Those of one depth, by name, on random data."""
    torch.manual_seed(0)
    e5m2, e4m3, out = torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16

    def fp8(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(rows, cols, device=device).to(dtype)

    x, dy = fp8(ROWS, depth, e4m3), fp8(ROWS, depth, e5m2)
    along, across = fp8(COLS, depth, e4m3), fp8(depth, COLS, e4m3)  # W of both directions
    across_t = across.t().contiguous()
    one = torch.full((1,), 0.01, device=device)
    s = torch.randn(ROWS, RANK, device=device, dtype=out)
    up = Up(torch.randn(COLS, RANK, device=device), s, 2.0)
    a = torch.randn(RANK, COLS, device=device)
    left, grad = Scaled(x.view(torch.uint8), one), Scaled(dy.view(torch.uint8), one)
    weight, turned = (Weight(w.view(torch.uint8), one) for w in (along, across))

    def cublaslt(left: Tensor, right: Tensor, fast: bool) -> Tensor:
        return torch._scaled_mm(left, right.t(), one, one, out_dtype=out, use_fast_accum=fast)

    return {
        "forward": lambda: ops.fp8_linear_lora(left, weight, None, None, out),
        "forward, R = 16": lambda: ops.fp8_linear_lora(left, weight, None, up, out),
        "backward": lambda: ops.fp8_grad_input(grad, e5m2, turned, None, None, None, out, True),
        "backward, R = 16": lambda: ops.fp8_grad_input(grad, e5m2, turned, s, a, None, out, True),
        "cublaslt, forward": lambda: cublaslt(x, along, True),
        "cublaslt, backward": lambda: cublaslt(dy, across_t, False),
    }


def run_for_ncu(depths: Sequence[int], device: torch.device) -> None:
    """Each product of each depth once where the profiler looks, and twice before."""
    for depth in depths:
        calls = products(depth, device)
        for call in (*calls.values(), *calls.values()):
            call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        for call in calls.values():
            call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def points_of(kernels: list[Kernel], depths: Sequence[int], names: Sequence[str]) -> list[Row]:
    """A row for each depth and product, in the order in which they ran.

    Raises:
        ValueError: there is not one GEMM for each.
    """
    gemms = [kernel for kernel in kernels if kernel.name.startswith(GEMMS)]
    if len(gemms) != len(depths) * len(names):
        found = [kernel.name for kernel in kernels]
        raise ValueError(f"expected {len(depths)} × {len(names)} products, ncu has {found}")
    pairs = [(depth, name) for depth in depths for name in names]
    return [
        {
            "product": name,
            "depth": depth,
            "by": "ncu",
            "µs": round(kernel.microseconds, 2),
            "cycles a tile": round(kernel.number(CYCLES) / TILES),
            "tensor %": round(kernel.number(TENSOR), 1),
            "kernel": kernel.name,
        }
        for (depth, name), kernel in zip(pairs, gemms, strict=True)
    ]


def points_by_events(depths: Sequence[int], device: torch.device, repetitions: int) -> list[Row]:
    """The same by times, at the highest clock that the GPU may have."""
    mhz = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    hertz = float(mhz.stdout.split()[0]) * 1e6
    found: list[Row] = []
    for depth in depths:
        for name, call in products(depth, device).items():
            seconds = time_of(call, device, repetitions).median
            found.append(
                {
                    "product": name,
                    "depth": depth,
                    "by": "events",
                    "µs": round(seconds * 1e6, 2),
                    "cycles a tile": round(seconds * hertz / TILES),
                    "tensor %": "",
                    "kernel": "",
                }
            )
    return found


def fit(depths: Sequence[float], cycles: Sequence[float]) -> tuple[float, float, float]:
    """(loop for 128 of depth, epilogue, the largest relative error) by least squares of relative errors.

    Raises:
        ValueError: there are fewer than three depths, through which a line always goes.
    """
    if len(depths) < LEAST:
        raise ValueError(f"a line is fitted through at least three depths, found {[*depths]}")
    y = torch.tensor(cycles, dtype=torch.float64)
    steps = torch.tensor(depths, dtype=torch.float64) / STEP
    columns = torch.stack([steps, torch.ones_like(steps)], 1) / y[:, None]
    loop, epilogue = (
        torch.linalg.lstsq(columns, torch.ones_like(y)[:, None]).solution[:, 0].tolist()
    )
    off = float(((loop * steps + epilogue) / y - 1).abs().max())
    return loop, epilogue, off


def fits(points: list[Row]) -> list[Row]:
    """A row for each product, through the depths of the kernel that ran at most of them.

    cuBLASLt takes other kernels for other depths, and two of them are not on one line.
    """
    found: list[Row] = []
    for name in dict.fromkeys(str(row["product"]) for row in points):
        of = [row for row in points if row["product"] == name]
        kernel = Counter(str(row["kernel"]) for row in of).most_common(1)[0][0]
        of = [row for row in of if row["kernel"] == kernel]
        depths, cycles = (
            [float(str(row[key])) for row in of] for key in ("depth", "cycles a tile")
        )
        row: Row = {
            "product": name,
            "by": of[0]["by"],
            "depths": f"{min(depths):.0f} to {max(depths):.0f}",
            "loop, cycles for 128": "",
            "of peak": "",
            "epilogue, cycles": "",
            "off": "",
            "kernel": kernel,
        }
        if len(of) >= LEAST:
            loop, epilogue, off = fit(depths, cycles)
            row |= {"loop, cycles for 128": round(loop, 1), "of peak": round(PEAK / loop, 3)}
            row |= {"epilogue, cycles": round(epilogue), "off": f"{off:.1%}"}
        found.append(row)
    return found


def main() -> int:
    options = parser("the loop and the epilogue of FP8 products, by their cycles at several depths")
    options.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS))
    options.add_argument("--without-ncu", action="store_true", help="times by CUDA events")
    options.add_argument("--only-run", action="store_true", help="what ncu is given to run")
    args, device = arguments(options, on_gpu=15)
    if len(args.depths) < LEAST:
        options.error(f"--depths needs at least three, found {args.depths}")
    if device.type != "cuda":
        options.error("the cycles of products need a GPU")
    if args.only_run:
        run_for_ncu(args.depths, device)
        return 0
    if args.without_ncu or shutil.which("ncu") is None:
        points = points_by_events(args.depths, device, args.repetitions)
    else:
        again = [sys.executable, __file__, "--only-run", "--depths", *map(str, args.depths)]
        asked = ["--metrics", ",".join((CYCLES, TENSOR, DURATION, CLOCK))]
        kernels = kernels_of(counted(again, asked))
        points = points_of(kernels, args.depths, list(products(STEP, device)))
    rows, facts = fits(points), environment(device)
    print(table(rows))
    if args.output:
        for name, of in (("gemm_depths", rows), ("gemm_depths_points", points)):
            write_csv(args.output / f"{name}.csv", of, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
