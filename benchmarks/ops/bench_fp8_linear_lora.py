# SPDX-License-Identifier: Apache-2.0
"""y = x8 W8ᵀ + bias + scaling · s Bᵀ in one kernel, against cuBLASLt's product without bias and LoRA.

    python benchmarks/ops/bench_fp8_linear_lora.py --output DIR [--shapes 8192x8192x8192 …] [--ranks 8 16 64 128]

    2MNK + 2MNR operations; shapes are M x N x K

"cublaslt, base only" is `torch._scaled_mm` with fast accumulation. "pytorch" is that with the bias, and then `addmm`.
s and y are bf16, B is fp32. Every provider's y is compared with float64's before it is timed, on 64 rows. More than
twice the error of "pytorch" is WRONG and exit code 1. An H200 under load lowers its clock within a second. So "÷
cublaslt" divides by the mean of two runs of "cublaslt, base only", one before and one after the provider.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch import Tensor

from benchmarks.lib.fp8_linear_lora import Inputs, base_only, error, make_inputs, pytorch
from benchmarks.lib.op_bench import Bench, Call, Option, Setting, against_cublaslt, main, verdict
from benchmarks.lib.rows import Row
from lorakernels import ops

PROVIDERS: dict[str, tuple[Callable[[Inputs], Tensor], bool]] = {  # and whether it has LoRA
    "cublaslt, base only": (base_only, False),
    "ours": (lambda i: ops.fp8_linear_lora(i.x, i.weight, i.bias, i.up, i.out_dtype), True),
    "ours, base only": (
        lambda i: ops.fp8_linear_lora(i.x, i.weight, None, None, i.out_dtype),
        False,
    ),
    "pytorch": (pytorch, True),
}
OPTIONS = (
    Option(
        "shapes",
        [
            "4096x4096x4096",
            "8192x8192x8192",
            "8192x10240x8192",
            "2048x8192x8192",
            "8192x8192x28672",
            "8192x57344x8192",
        ],
        cpu=["32x64x128"],
        metavar="MxNxK",
    ),
    Option("ranks", [16, 64], cpu=[16]),
    Option("providers", list(PROVIDERS), choices=PROVIDERS),
)


def check(i: Inputs, lora: bool, allowed: float, y: Tensor) -> Row:
    found = error(y, i, lora)
    return verdict("" if found <= allowed else f"error {found:.1e}")


def rows(setting: Setting) -> Iterator[Row]:
    for shape, rank in product(setting.args.shapes, setting.args.ranks):
        m, n, k = map(int, shape.split("x"))
        i = make_inputs(shape, rank, setting.device)
        allowed = {
            lora: 2 * error(pytorch(i) if lora else base_only(i), i, lora) for lora in (False, True)
        }
        calls = {}
        for name in setting.args.providers:
            run, lora = PROVIDERS[name]
            operations = 2 * m * n * (k + lora * rank)
            calls[name] = Call(partial(run, i), partial(check, i, lora, allowed[lora]), operations)
        case: Row = {"M x N x K": shape, "rank": rank}
        yield from against_cublaslt(case, calls, partial(base_only, i), setting, digits=1)


BENCH = Bench(
    "fp8_linear_lora",
    "fp8_linear_lora against cuBLASLt's base-only product",
    OPTIONS,
    rows,
    floor=False,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
