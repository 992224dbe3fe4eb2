# SPDX-License-Identifier: Apache-2.0
"""dx = dy8 W8 + ds A of operands in blocks in one kernel, against cuBLASLt's product of the blocks without LoRA.

    python benchmarks/ops/bench_fp8_block_grad_input.py --output DIR [--shapes 8192x8192x8192 …] [--ranks 16 64]

    2MNK + 2MKR operations; shapes are M x N x K, with a sum over N

"cublaslt, base only" transposes W8 for each call and multiplies by `torch._scaled_mm`, with scales of 1 × 128 and
128 × 128; a GPU that lacks it has PyTorch's dequantized product there. dx is checked in float64 before it is timed.
Ratios are to the mean of two runs of cuBLASLt's.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from typing import Any

from torch import Tensor

from benchmarks.lib.block_products import BASE, Inputs, bench
from benchmarks.lib.op_bench import main
from lorakernels import ops
from lorakernels.numerics.fp8 import E4M3
from lorakernels.ops.fp8_grad_input import (
    GradInput,
    by_cublaslt,
    by_dequantized,
    why_not_cublaslt_gemm,
)


def arguments(i: Inputs, lora: bool) -> tuple[object, ...]:
    branch = (i.wide, i.narrow) if lora else (None, None)
    return i.left, E4M3, i.weight, *branch, None, i.out_dtype, True


def base_only(i: Inputs) -> Tensor:
    given: Any = arguments(i, False)
    a = GradInput(*given)
    takes = i.left.data.is_cuda and why_not_cublaslt_gemm(a) is None
    return (by_cublaslt if takes else by_dequantized)(a)


def ours(i: Inputs, lora: bool) -> Tensor:
    given: Any = arguments(i, lora)
    return ops.fp8_grad_input(*given)


PROVIDERS = {
    BASE: (base_only, False),
    "ours": (lambda i: ours(i, True), True),
    "ours, base only": (lambda i: ours(i, False), False),
}
BENCH = bench("fp8_block_grad_input", "fp8_grad_input", PROVIDERS, arguments)

if __name__ == "__main__":
    sys.exit(main(BENCH))
