# SPDX-License-Identifier: Apache-2.0
"""RoPE on the columns of q and k, forward and backward: ours against PyTorch's kernels and torch.compile's.

    python benchmarks/ops/bench_rope_qkv.py --output DIR [--shapes 8192x64x8x128 …] [--passes backward …]

    forward    in place over q's and k's heads                                 4 M (H + Hk) D bytes in bf16
    backward   dq [B, H, T, D], dk and dv to dqkv, times a factor each         4 M (H + 2 Hk) D
               tokens outside: attention left [B, T, H, D] in memory; heads outside: [B, H, T, D]

A shape is T × H × Hk × D, one sequence. The floor is those bytes at the bandwidth of a copy measured in the same run;
cos and sin are not counted. Every provider is checked in float64 before it is timed; one that misses is not timed and
the exit code is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.lib.layer_ops import Pass, bench_of
from benchmarks.lib.op_bench import main
from benchmarks.lib.op_checks import fault
from lorakernels import ops
from tests.ops.cases import CONTRACTS
from tests.ops.contract import Call
from tests.ops.contract import fault as contract_fault

GPU_SHAPES = ["8192x64x8x128", "2048x32x8x128", "1024x32x8x64"]
CPU_SHAPES = ["64x4x2x32"]


def in_place(rope: Any, qkv: Tensor, *others: Any) -> Tensor:
    rope(qkv, *others)
    return qkv


def forward_fault(arguments: tuple[Any, ...], found: Tensor) -> str:
    """Of the first call."""
    call = Call(arguments, (found, *arguments[1:]), ())
    return contract_fault(CONTRACTS["rope_qkv_"].bound, call)


def passes(shape: str, dtype: torch.dtype, device: torch.device) -> Iterator[Pass]:
    tokens, heads, kv_heads, dim = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(7)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    position = torch.arange(tokens, device=device).view(-1, 1)
    angle = position * 1e4 ** -(torch.arange(dim // 2, device=device) / (dim // 2))
    cos, sin = (torch.cat((t, t), 1).to(dtype) for t in (angle.cos(), angle.sin()))
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim)
    yield Pass(
        "forward",
        partial(in_place, ops.rope_qkv_),
        partial(in_place, ops.rope_qkv_.by_reference),
        lambda: (qkv.clone(), cos, sin, heads, kv_heads),
        partial(forward_fault, (qkv, cos, sin, heads, kv_heads)),
        4 * tokens * (heads + kv_heads) * dim,
    )
    multiplier = torch.tensor([1.0, 0.7, 1.4], device=device)
    for layout in ("tokens outside", "heads outside"):
        parts = [normal(1, count, tokens, dim) for count in (heads, kv_heads, kv_heads)]
        if layout == "tokens outside":
            parts = [d.transpose(1, 2).contiguous().transpose(1, 2) for d in parts]
        arguments = (*parts, cos, sin, multiplier)
        yield Pass(
            f"backward, {layout}",
            ops.rope_qkv_backward,
            ops.rope_qkv_backward.by_reference,
            lambda arguments=arguments: arguments,
            partial(fault, "rope_qkv_backward", arguments, roundings=1),
            4 * tokens * (heads + 2 * kv_heads) * dim,
        )


BENCH = bench_of("rope_qkv", passes, GPU_SHAPES, CPU_SHAPES)

if __name__ == "__main__":
    sys.exit(main(BENCH))
