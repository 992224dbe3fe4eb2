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
import csv
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.rows import Row, environment, table, write_csv, write_markdown
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
DURATION, CLOCK = "gpu__time_duration.sum", "gpc__cycles_elapsed.avg.per_second"
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
TO_MICROSECONDS = {
    "nsecond": 1e-3,
    "ns": 1e-3,
    "usecond": 1.0,
    "us": 1.0,
    "msecond": 1e3,
    "ms": 1e3,
}
TO_GHZ = {
    "cycle/nsecond": 1.0,
    "Ghz": 1.0,
    "GHz": 1.0,
    "cycle/usecond": 1e-3,
    "Mhz": 1e-3,
    "MHz": 1e-3,
}


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
        dy8, dy_inv, ds, _, mask = ops.quantize_grad_and_mask(dy, up, backward, e5m2, dropout, k)
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
    """The table's rows from `ncu --page raw --csv`: a line of names, a line of units, a line per kernel.

    Raises:
        ValueError: there is no such table in `text`.
    """
    lines = list(csv.reader(io.StringIO(text)))
    start = next((i for i, line in enumerate(lines) if "Kernel Name" in line), None)
    if start is None:
        raise ValueError(f"ncu printed no table of kernels, but: {text[:500]}")
    names, units = lines[start], lines[start + 1]
    unit = dict(zip(names, units, strict=True))
    return [
        _row(dict(zip(names, line, strict=True)), unit)
        for line in lines[start + 2 :]
        if len(line) == len(names)
    ]


def _row(found: dict[str, str], unit: dict[str, str]) -> Row:
    def number(metric: str) -> float:
        return float(found[metric].replace(",", ""))

    stalls = {
        m[1]: number(name)
        for name in found
        if (m := STALL.fullmatch(name)) and m[1] not in ("selected", "not_selected")
    }
    worst = max(stalls, key=lambda reason: stalls[reason])
    return {
        "kernel": short_name(found["Kernel Name"]),
        "µs": round(number(DURATION) * TO_MICROSECONDS[unit[DURATION]], 1),
        "GHz": round(number(CLOCK) * TO_GHZ[unit[CLOCK]], 2),
        **{column: round(number(metric), 1) for column, metric in COLUMNS.items()},
        "waits for": f"{worst.replace('_', ' ')} ({stalls[worst]:.1f})",
    }


def short_name(kernel: str) -> str:
    """A kernel's name without namespace, arguments and the template's types."""
    name = kernel.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    return name.removeprefix("void ").replace("lorakernels::", "").partition("(")[0][:70]


def counted(shape: str, rank: int) -> str:
    """What `ncu --page raw --csv` prints of one step, which runs in a process under it."""
    with TemporaryDirectory() as folder:
        report = str(Path(folder) / "report")
        again = [sys.executable, __file__, "--only-step", "--shape", shape, "--rank", str(rank)]
        sections = [word for section in SECTIONS for word in ("--section", section)]
        options = ["--clock-control", "none", "--profile-from-start", "off", *sections]
        profile = ["ncu", *options, "-o", report, *again]
        subprocess.run(profile, check=True, stdout=subprocess.DEVNULL)
        show = ["ncu", "-i", report + ".ncu-rep", "--page", "raw", "--csv"]
        return subprocess.run(show, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="for counters.csv and counters.md"
    )
    parser.add_argument("--shape", default="8192x8192x8192", help="MxNxK of the layer")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--only-step", action="store_true", help="what ncu is given to run")
    args = parser.parse_args()
    m, n, k = (int(size) for size in args.shape.split("x"))
    if args.only_step:
        return step(m, n, k, args.rank)
    if shutil.which("ncu") is None or not torch.cuda.is_available():
        raise SystemExit("counters need a GPU and ncu on PATH")
    rows = rows_of(counted(args.shape, args.rank))
    problem = {"shape": args.shape, "rank": str(args.rank)}
    facts = {**environment(torch.device("cuda")), **problem}
    print(table(rows))
    if args.output:
        write_csv(args.output / "counters.csv", rows, facts)
        write_markdown(args.output / "counters.md", rows, facts)


if __name__ == "__main__":
    main()
