# SPDX-License-Identifier: Apache-2.0
"""x8, scale_inv = x in FP8, with a scale for each 1 × 128 block along the last dimension.

x8 is uint8 [M, K], scale_inv fp32 [⌈K/128⌉, M]: x ≈ x8 · scale_inv. There is no amax history, so that nothing is
written but the results. Kernels that make x or read it for an adapter write the same bits in their own pass, where they
can (rms_norm.py, swiglu.py, rope_qkv.py, quantize_lora_down.py, quantize_grad.py). Triton's kernel reads x once and
writes both: 3MK + MK/32 bytes in bf16. PyTorch's kernels, one after the other, read and write fp32 copies of x in
between.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.kernels.triton.quantize_blocks import launch
from lorakernels.numerics.blocks import blocks_of, quantize_rows
from lorakernels.numerics.fp8 import FP8_MAX
from lorakernels.ops import checks
from lorakernels.ops.hardware import chosen_layer_kernel, why_not_layer_kernel
from lorakernels.ops.register import Implementation, Op, define, empty


class QuantizeBlocks(NamedTuple):
    """x is [M, K] in fp32, bf16 or fp16, `fp8_dtype` e4m3 or e5m2. With `power_of_two`, scales are powers of two."""

    x: Tensor
    fp8_dtype: torch.dtype
    power_of_two: bool = False


def reference(a: QuantizeBlocks) -> tuple[Tensor, Tensor]:
    """(x8, scale_inv) as `numerics.blocks.quantize_rows` defines them.

    Raises:
        ValueError: x is not a matrix.
        TypeError: x is not float32, bfloat16 or float16, or `fp8_dtype` is another type.
    """
    check(a)
    data, scale_inv = quantize_rows(a.x, a.fp8_dtype, a.power_of_two)
    assert scale_inv is not None
    return data, scale_inv


def fake(a: QuantizeBlocks) -> tuple[Tensor, Tensor]:
    rows, cols = a.x.shape
    scale_inv = empty(a.x, blocks_of(cols), rows, dtype=torch.float32)
    return empty(a.x, rows, cols, dtype=torch.uint8), scale_inv


def check(a: QuantizeBlocks) -> None:
    """ValueError unless x is a matrix; TypeError unless it is of a dtype that is computed in, and FP8 e4m3 or e5m2."""
    checks.matrix("x", a.x)
    checks.floats("x", a.x)
    if a.fp8_dtype not in FP8_MAX:
        raise TypeError(f"fp8_dtype must be float8_e4m3fn or float8_e5m2, found {a.fp8_dtype}")


def why_not_triton(a: QuantizeBlocks) -> str | None:
    """None if Triton's kernel takes x; otherwise the reason why not."""
    return why_not_layer_kernel(x=a.x)


def by_triton(a: QuantizeBlocks) -> tuple[Tensor, Tensor]:
    """One kernel; the reference's bits."""
    data, scale_inv = fake(a)
    launch(a.x, data, scale_inv, a.fp8_dtype, a.power_of_two)
    return data, scale_inv


quantize_blocks = define(
    Op(
        "quantize_blocks",
        QuantizeBlocks,
        reference,
        fake,
        check,
        (Implementation("triton", by_triton, why_not_triton), Implementation("torch", reference)),
        partial(chosen_layer_kernel, "one read, under BlockScaling alone"),
    ),
    "(Tensor x, ScalarType fp8_dtype, bool power_of_two=False) -> (Tensor, Tensor)",
)
