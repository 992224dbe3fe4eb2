# SPDX-License-Identifier: Apache-2.0
"""What Nsight Compute counts in the kernels of one LoRALinear step, and in cuBLASLt's FP8 products beside them.

    python benchmarks/ops/counters.py --output DIR [--shape 8192x8192x8192] [--rank 16]

Needs `ncu` and leave to read the counters; the clocks are left alone. Columns, in % of what the GPU sustains:

    µs        time of the kernel under the profiler, which runs it alone, several times
    GHz       clock of the multiprocessors meanwhile: a product at full power lowers it
    tensor    cycles in which the tensor pipe was busy
    DRAM, L2  throughput
    issue     cycles in which a scheduler issued an instruction
    ALU, FMA  cycles in which the integer pipe, the multiplying pipe (its half with integer products) were busy
    warps     resident of those possible
    waits for the reason for which warps waited most often, and how many did per instruction issued
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.ncu import Kernel, counted, kernels_of
from benchmarks.lib.rows import Row, environment, table, write_csv
from lorakernels import DelayedScaling, ops
from lorakernels.state.fp8 import FP8State
from lorakernels.values import Dropout, Scaled, Scaling, Up, Weight

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "WarpStateStats",
    "SchedulerStats",
    "Occupancy",
)
COLUMNS = {  # of the table: Nsight Compute's metric
    "tensor %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "DRAM %": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "ALU %": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
    "FMA %": "sm__pipe_fmaheavy_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "warps %": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")


def step(m: int, n: int, k: int, rank: int) -> None:
    """One forward and backward of a layer by its ops, and cuBLASLt's products of the same operands, on random data.

    The profiler sees the second round; scales have then been set.
    """
    device, e5m2, e4m3 = torch.device("cuda"), torch.float8_e5m2, torch.float8_e4m3fn
    torch.manual_seed(0)
    x, dy = (torch.randn(m, cols, device=device, dtype=torch.bfloat16) for cols in (k, n))
    weight = torch.randn(n, k, device=device).mul_(100).to(e4m3).view(torch.uint8)
    a, b = torch.randn(rank, k, device=device) * 0.01, torch.randn(n, rank, device=device) * 0.01
    one, slot = torch.full((1,), 0.01, device=device), torch.tensor([1, 2], device=device)
    state = FP8State(["layer"], DelayedScaling(), device)
    dropout = Dropout(slot, 0.1, 3)

    def run() -> None:
        x8, x_inv, s = ops.quantize_lora_down(x, a, Scaling(state.forward, 0, True), dropout)
        up = Up(b, s, 2.0)
        ops.fp8_linear_lora(Scaled(x8, x_inv), Weight(weight, one), None, up, x.dtype)
        backward = Scaling(state.backward, 0, True)
        found = ops.quantize_grad(dy, up, backward, e5m2, dropout=dropout, cols=k)
        dy8, dy_inv, ds, _, mask = found
        drawn = dropout._replace(dropped=mask)
        ops.lora_grad_a(ds, Scaled(x8, x_inv), drawn, torch.float32)
        weight_t = ops.transpose_fp8(weight)
        frozen, grad = Weight(weight, one), Scaled(dy8, dy_inv)
        for split in (True, False):
            ops.fp8_grad_input(grad, e5m2, frozen, ds, a, drawn, x.dtype, split)
        for left, scale, right, fast in (
            (x8.view(e4m3), x_inv, weight, True),
            (dy8.view(e5m2), dy_inv, weight_t, False),
        ):
            torch._scaled_mm(
                left,
                right.view(e4m3).t(),
                scale,
                one,
                out_dtype=x.dtype,
                use_fast_accum=fast,
            )

    run()
    state.reduce_and_update()
    run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def rows_of(text: str) -> list[Row]:
    """The table's rows from what `kernels_of` reads, and it raises what that raises."""
    return [_row(kernel) for kernel in kernels_of(text)]


def _row(kernel: Kernel) -> Row:
    stalls = {
        m[1]: kernel.number(name)
        for name in kernel.values
        if (m := STALL.fullmatch(name)) and m[1] not in ("selected", "not_selected")
    }
    worst = max(stalls, key=lambda reason: stalls[reason])
    return {
        "kernel": kernel.name,
        "µs": round(kernel.microseconds, 1),
        "GHz": round(kernel.ghz, 2),
        **{column: round(kernel.number(metric), 1) for column, metric in COLUMNS.items()},
        "waits for": f"{worst.replace('_', ' ')} ({stalls[worst]:.1f})",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="for counters.csv")
    parser.add_argument("--shape", default="8192x8192x8192", help="MxNxK of the layer")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--only-step", action="store_true", help="what ncu is given to run")
    args = parser.parse_args()
    m, n, k = (int(size) for size in args.shape.split("x"))
    if args.only_step:
        return step(m, n, k, args.rank)
    if shutil.which("ncu") is None or not torch.cuda.is_available():
        raise SystemExit("counters need a GPU and ncu on PATH")
    again = [sys.executable, __file__, "--only-step", "--shape", args.shape]
    sections = [word for section in SECTIONS for word in ("--section", section)]
    rows = rows_of(counted([*again, "--rank", str(args.rank)], sections))
    problem = {"shape": args.shape, "rank": str(args.rank)}
    facts = {**environment(torch.device("cuda")), **problem}
    print(table(rows))
    if args.output:
        write_csv(args.output / "counters.csv", rows, facts)


if __name__ == "__main__":
    main()
