# SPDX-License-Identifier: Apache-2.0
"""Times tile sizes of the Triton FP8 GEMM, for kernels/tune.py. Nothing is chosen by it: a person pastes the lines.

    lorakernels bench --tune [--shapes 8192x8192x8192 …] [--ranks 16] [--top 8] [--budget-s 60]

    shapes are M x N x K; every configuration of `candidates` that fits this GPU is compiled, compared with cuBLASLt's
    product, and timed, for --budget-s a problem: those of the table come first. Compiling takes a second or two each.

Per problem the fastest are printed as lines of `TILES`, each with its time, and with what `tune.choose` takes now.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.fp8_linear_lora import Inputs, error, make_inputs, pytorch
from benchmarks.lib.rows import arguments, environment, parser
from benchmarks.lib.timing import repetitions_within, time_of
from lorakernels.kernels import tune
from lorakernels.kernels.tune import KernelConfig, Problem

SHAPES = ["4096x4096x4096", "8192x8192x8192", "2048x8192x8192"]
SECONDS = 0.05  # of calls per configuration


def candidates(problem: Problem, capability: tuple[int, int]) -> Iterator[KernelConfig]:
    """Tile sizes worth trying, those of the table first; only what `tune.is_valid` takes."""
    known = tune.TILES.get(capability, tune.DEFAULT)
    grid = (
        KernelConfig(m, n, k, num_warps=warps, num_stages=stages, group=8, resident=resident)
        for (m, n), k, stages, resident in product(
            ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (64, 64)),
            (64, 128),
            (3, 4, 5),
            (1, 2),
        )
        for warps in ((8,) if m * n > 128 * 128 else (4, 8))
    )
    for config in dict.fromkeys([*known, *grid]):
        if tune.is_valid(config, problem, capability):
            yield config


def milliseconds(
    config: KernelConfig, problem: Problem, i: Inputs, device: torch.device, at_most: int
) -> float | str:
    """The device's time, or why there is none."""
    from lorakernels.kernels.triton.fp8_linear_lora import launch

    y = torch.empty(problem.m, problem.n, dtype=i.out_dtype, device=device)
    count = torch.cuda.get_device_properties(device).multi_processor_count
    programs = tune.programs(config, problem, count)

    def run() -> None:
        launch(y, i.x, i.weight, i.bias, i.up, config, programs)

    try:
        run()
        torch.cuda.synchronize(device)
    except Exception as why:  # out of shared memory or registers: Triton has several kinds
        return f"{type(why).__name__}: {why}".partition("\n")[0][:80]
    found, theirs = error(y, i, True), error(pytorch(i), i, True)
    if not found <= 2 * theirs:
        return f"WRONG: error {found:.1e}, PyTorch's is {theirs:.1e}"
    often = repetitions_within(SECONDS, run, device, at_most)
    return time_of(run, device, often).median * 1e3


def milliseconds_of(
    problem: Problem,
    capability: tuple[int, int],
    device: torch.device,
    at_most: int,
    budget: float,
) -> dict[KernelConfig, float | str]:
    """The time of every candidate, or why it has none; what `budget` seconds do not cover says so."""
    shape = f"{problem.m}x{problem.n}x{problem.k}"
    i, end = make_inputs(shape, problem.rank, device), time.perf_counter() + budget
    return {
        config: milliseconds(config, problem, i, device, at_most)
        if time.perf_counter() < end
        else f"not tried: --budget-s {budget:g} was spent"
        for config in candidates(problem, capability)
    }


def line(config: KernelConfig) -> str:
    """`config` as it stands in kernels/tune.py."""
    tile = f"{config.block_m}, {config.block_n}, {config.block_k}"
    rest = f"num_warps={config.num_warps}, num_stages={config.num_stages}, group={config.group}"
    resident = f", resident={config.resident}" if config.resident != 1 else ""
    return f"KernelConfig({tile}, {rest}{resident}),"


def table(
    problem: Problem, times: dict[KernelConfig, float | str], taken: KernelConfig, top: int
) -> str:
    """The fastest `top` and the one in use, then how many failed and why."""
    timed = sorted((ms, line(c), c == taken) for c, ms in times.items() if isinstance(ms, float))
    failed = [ms for ms in times.values() if isinstance(ms, str)]
    operations = 2 * problem.m * problem.n * (problem.k + problem.rank)
    rows = [
        f"    {text:86s}  # {ms:.4f} ms, {operations / ms / 1e9:.0f} TFLOP/s{', taken now' * used}"
        for i, (ms, text, used) in enumerate(timed)
        if i < top or used
    ]
    rows += [f"    # {failed.count(why)} × {why}" for why in dict.fromkeys(failed)]
    return "\n".join([f"# {problem}", *rows])


def main() -> int:
    options = parser("tile sizes of the Triton FP8 GEMM")
    options.add_argument("--shapes", nargs="+", metavar="MxNxK", default=SHAPES)
    options.add_argument("--ranks", nargs="+", type=int, default=[16])
    options.add_argument("--top", type=int, default=8)
    options.add_argument("--budget-s", type=float, default=300.0, help="of each problem")
    args, device = arguments(options)
    if device.type != "cuda":
        options.error(f"tuning needs a GPU, found device {args.device}")
    print("  ".join(f"{key} {value}" for key, value in environment(device).items()))
    capability = torch.cuda.get_device_capability(device)
    count = torch.cuda.get_device_properties(device).multi_processor_count
    wrong, printed = False, []
    for shape, rank in product(args.shapes, args.ranks):
        problem = Problem(*map(int, shape.split("x")), rank)
        times = milliseconds_of(problem, capability, device, args.repetitions, args.budget_s)
        taken = tune.choose(problem, capability, count)
        printed.append(table(problem, times, taken, args.top))
        print(printed[-1], flush=True)
        wrong |= any(str(ms).startswith("WRONG") for ms in times.values())
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "tune.txt").write_text("\n".join(printed) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
