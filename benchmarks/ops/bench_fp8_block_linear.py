# SPDX-License-Identifier: Apache-2.0
"""y = x8 W8ᵀ + s Bᵀ of operands in blocks in one kernel, against cuBLASLt's product of the blocks without LoRA.

    python benchmarks/ops/bench_fp8_block_linear.py --output DIR [--shapes 8192x8192x8192 …] [--ranks 16 64]

    2MNK + 2MNR operations; shapes are M x N x K

"cublaslt, base only" is `torch._scaled_mm` with scales of 1 × 128 and 128 × 128; a GPU that lacks it has PyTorch's
dequantized product there. y is checked in float64 before it is timed. Ratios are to the mean of two runs of cuBLASLt's.
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
from lorakernels.ops.fp8_linear_lora import (
    Linear,
    by_cublaslt,
    by_dequantized,
    why_not_cublaslt_gemm,
)
from lorakernels.values import Up


def arguments(i: Inputs, lora: bool) -> tuple[object, ...]:
    up = Up(i.narrow, i.wide, 1.0) if lora else None
    return i.left, i.weight, None, up, i.out_dtype, False, None


def base_only(i: Inputs) -> Tensor:
    given: Any = arguments(i, False)
    a = Linear(*given)
    takes = i.left.data.is_cuda and why_not_cublaslt_gemm(a) is None
    return (by_cublaslt if takes else by_dequantized)(a)


def ours(i: Inputs, lora: bool) -> Tensor:
    given: Any = arguments(i, lora)
    return ops.fp8_linear_lora(*given)


PROVIDERS = {
    BASE: (base_only, False),
    "ours": (lambda i: ours(i, True), True),
    "ours, base only": (lambda i: ours(i, False), False),
}
BENCH = bench("fp8_block_linear", "fp8_linear_lora", PROVIDERS, arguments)

if __name__ == "__main__":
    sys.exit(main(BENCH))
