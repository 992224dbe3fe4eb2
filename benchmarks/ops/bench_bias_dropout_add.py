# SPDX-License-Identifier: Apache-2.0
"""residual + dropout(x + bias), forward and backward apart: ours, PyTorch's, and Megatron-LM's under torch.compile.

    python benchmarks/ops/bench_bias_dropout_add.py --output DIR [--shapes 8192x8192 …] [--providers ours eager …]

    forward   reads x, residual (and bias), writes out      (3 MN + N) elements
    backward  reads dout, writes dx (and dbias)             (2 MN + N) elements; dresidual is dout itself
              p = 0: dx is dout as well                     (MN + N) elements for dbias, none without a bias

The floor is those bytes at the bandwidth of a copy measured in the same run. The first shape is taken with p = 0 and
0.1, the others with p = 0.1, all with and without bias. Every provider is checked before it is timed. One that misses
is not timed, and the exit code is 1. Compilation is not timed. On a CPU, Megatron's form is compiled only if
--providers asks for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.bias_dropout_add import PROVIDERS, Inputs, make_inputs, moved, timed
from benchmarks.lib.op_bench import Bench, Option, Setting, main
from benchmarks.lib.rows import Row, ratio
from benchmarks.lib.timing import NOT_TIMED

OPTIONS = (
    Option(
        "shapes",
        ["8192x8192", "4096x4096", "2048x8192", "8192x8191"],
        cpu=["256x512", "255x511"],
        metavar="MxN",
    ),
    Option("dtype", "bfloat16", choices=["bfloat16", "float16", "float32"]),
    Option("providers", list(PROVIDERS), cpu=["ours", "eager"], choices=PROVIDERS),
)


def case_rows(case: Row, inputs: Inputs, setting: Setting) -> Iterator[Row]:
    device, args = setting.device, setting.args
    results = {name: timed(name, inputs, device, args.repetitions) for name in args.providers}
    for direction in ("forward", "backward"):
        floor = setting.floor_ms(moved(direction, inputs))
        own = results["ours"][1].get(direction) if "ours" in results else None
        for name, (outcome, timings) in results.items():
            timing = timings.get(direction)
            columns = timing.columns() if timing else NOT_TIMED
            yield {
                **case,
                "direction": direction,
                "provider": name,
                "check": outcome,
                **columns,
                "floor ms": round(floor, 5),
                "÷ floor": ratio(columns["ms"], floor),
                "÷ ours": ratio(columns["ms"], own.columns()["ms"] if own else ""),
            }


def cases(shapes: list[str]) -> Iterator[tuple[str, float, bool]]:
    for index, shape in enumerate(shapes):
        for p in (0.1,) if index else (0.1, 0.0):
            for has_bias in (True, False):
                yield shape, p, has_bias


def rows(setting: Setting) -> Iterator[Row]:
    args = setting.args
    for name in PROVIDERS:
        if name not in args.providers and "providers" not in setting.given:
            print(f"{name}: not compiled on a CPU unless --providers asks for it")
    for shape, p, has_bias in cases(args.shapes):
        bias = "yes" if has_bias else "no"
        case: Row = {"shape": shape, "dtype": args.dtype, "p": p, "bias": bias}
        dtype = getattr(torch, args.dtype)
        inputs = make_inputs(shape, p, has_bias, dtype, setting.device)
        yield from case_rows(case, inputs, setting)


BENCH = Bench(
    "bias_dropout_add", "bias_dropout_add, forward and backward, against its peers", OPTIONS, rows
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
