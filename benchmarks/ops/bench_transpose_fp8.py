# SPDX-License-Identifier: Apache-2.0
"""Wᵀ of FP8 bytes: ours against torch's strided copy, and against a copy that transposes nothing.

    python benchmarks/ops/bench_transpose_fp8.py --output DIR [--shapes 8192x8192 …]

    reads and writes W [N, K], one byte an element: 2 NK bytes

The floor is those bytes at the bandwidth of a copy measured in the same run, of another size: the copy beside ours is
of W itself. Each provider is checked byte for byte before it is timed; one that misses is not timed and the exit code
is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
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
    measured_floor,
    parser,
    ratio,
    time_of,
)
from lorakernels import ops

GPU_SHAPES = ["8192x8192", "28672x8192", "8192x28672", "4096x4096", "1024x8192", "8190x8190"]
CPU_SHAPES = ["256x512"]
PROVIDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "ours": ops.transpose_fp8,
    "torch": lambda w: w.t().contiguous(),
    "copy": torch.clone,
}


def bench_shape(
    shape: str, args: argparse.Namespace, device: torch.device, bandwidth: float
) -> list[Row]:
    n, k = map(int, shape.split("x"))
    weight = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=device)
    floor, timed = 2 * weight.numel() / bandwidth * 1e3, {}
    for name in args.providers:
        run = PROVIDERS[name]
        right = torch.equal(run(weight), weight if name == "copy" else weight.t())
        columns = (
            time_of(lambda run=run: run(weight), device, args.repetitions).columns()
            if right
            else NOT_TIMED
        )
        timed[name] = {"check": "ok" if right else "WRONG", **columns}
    own = timed.get("ours", NOT_TIMED)["ms"]
    return [
        {
            "shape": shape,
            "provider": name,
            **columns,
            "floor ms": round(floor, 5),
            "÷ floor": ratio(columns["ms"], floor),
            "÷ ours": ratio(columns["ms"], own),
        }
        for name, columns in timed.items()
    ]


def main() -> int:
    options = parser("transpose_fp8 against torch's copies")
    options.add_argument("--shapes", nargs="+", metavar="NxK")
    options.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    args, device = arguments(options)
    bandwidth, floor_facts = measured_floor(device, args.repetitions)
    shapes = args.shapes or (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES)
    rows = [row for shape in shapes for row in bench_shape(shape, args, device, bandwidth)]
    return finish("transpose_fp8", rows, {**environment(device), **floor_facts}, args.output)


if __name__ == "__main__":
    sys.exit(main())
