# SPDX-License-Identifier: Apache-2.0
"""Wᵀ of FP8 bytes: ours against torch's strided copy, and against a copy that transposes nothing.

    python benchmarks/ops/bench_transpose_fp8.py --output DIR [--shapes 8192x8192 …]

    reads and writes W [N, K], one byte an element: 2 NK bytes

The floor is those bytes at the bandwidth of a copy measured in the same run. That copy has another size; the provider
"copy" copies W itself. Each provider is checked byte for byte before it is timed. One that misses is not timed, and
the exit code is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.lib.op_bench import Bench, Call, Option, Setting, against_floor, main, verdict
from benchmarks.lib.rows import Row
from lorakernels import ops

PROVIDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "ours": ops.transpose_fp8,
    "torch": lambda w: w.t().contiguous(),
    "copy": torch.clone,
}
OPTIONS = (
    Option(
        "shapes",
        ["8192x8192", "28672x8192", "8192x28672", "4096x4096", "1024x8192", "8190x8190"],
        cpu=["256x512"],
        metavar="NxK",
    ),
    Option("providers", list(PROVIDERS), choices=PROVIDERS),
)


def check(expected: Tensor, found: Tensor) -> Row:
    return verdict("" if torch.equal(found, expected) else "bytes")


def rows(setting: Setting) -> Iterator[Row]:
    for shape in setting.args.shapes:
        n, k = map(int, shape.split("x"))
        weight = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=setting.device)
        calls = {
            name: Call(
                partial(PROVIDERS[name], weight),
                partial(check, weight if name == "copy" else weight.t()),
            )
            for name in setting.args.providers
        }
        yield from against_floor({"shape": shape}, calls, 2 * weight.numel(), setting)


BENCH = Bench("transpose_fp8", "transpose_fp8 against torch's copies", OPTIONS, rows)

if __name__ == "__main__":
    sys.exit(main(BENCH))
