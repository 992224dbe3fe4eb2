# SPDX-License-Identifier: Apache-2.0
"""y = x Wᵀ + bias + scaling · s Bᵀ + residual, over a base with a scale for each 128 × 128 block.

    y[m, n] = Σ_b xs[b, m] · ws[⌊n/128⌋, b] · Σ_{k in block b} x8[m, k] w8[n, k]  +  …

x8 and w8 are bytes of e4m3; xs and ws, fp32, are their scale_inv. The scales are applied to partial sums of 128
products in fp32, so that the tensor cores' short sums end there. Checkpoints with such scales are read as they are
(DeepSeek-V3 report, section 3.3).

csrc/ops/fp8_gemm on Hopper adds the other terms in registers and rounds y once. PyTorch adds the term of several
adapters after it. cuBLASLt multiplies the blocks themselves, for sizes that it takes. PyTorch's way dequantizes both
operands, in `out_dtype` on a GPU and in fp32 on a CPU, and multiplies those. After cuBLASLt's or PyTorch's
product, PyTorch adds the other terms one by one, so that y is rounded up to four times.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.device import capability_of
from lorakernels.numerics.blocks import blocks_of, dequantize_rows, dequantize_weight_blocks
from lorakernels.numerics.fp8 import E4M3
from lorakernels.numerics.segments import adapters_of
from lorakernels.ops import checks
from lorakernels.ops.fp8_linear_lora import Linear, launch_csrc, rounded_sum, with_terms
from lorakernels.ops.fp8_linear_lora import why_not_csrc_kernel as why_not_csrc_linear
from lorakernels.ops.hardware import (
    FP8_GEMM_MULTIPLE,
    SEVERAL,
    Place,
    why_not_cublaslt_blocks,
    why_not_wgmma_gemm,
)
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.values import Scaled, SideBySide, Up, Weight


class BlockLinear(NamedTuple):
    """x [M, K] and the weight [N, K] are e4m3; their scale_inv are [⌈K/128⌉, M] and [⌈N/128⌉, ⌈K/128⌉].

    The others are as in `fp8_linear_lora`.
    """

    x: Scaled
    weight: Weight
    bias: Tensor | None
    up: Up | None
    out_dtype: torch.dtype
    residual: Tensor | None = None
    side: SideBySide | None = None


def reference(a: BlockLinear) -> Tensor:
    """y [M, N] in `out_dtype`, summed in fp32 and rounded once.

    Raises:
        ValueError: a scale_inv, the bias, lora_B or the residual does not fit.
    """
    check(a)
    acc = dequantize_rows(a.x) @ dequantize_weight_blocks(a.weight).t()
    return rounded_sum(acc, as_linear(a))


def as_linear(a: BlockLinear) -> Linear:
    """The arguments of `fp8_linear_lora`, from which the other terms and csrc's operands are taken."""
    return Linear(a.x, a.weight, a.bias, a.up, a.out_dtype, False, a.residual, a.side)


def fake(a: BlockLinear) -> Tensor:
    return empty(a.x.data, a.x.data.shape[0], a.weight.data.shape[0], dtype=a.out_dtype)


def check(a: BlockLinear) -> None:
    """ValueError unless scales are [⌈K/128⌉, M] and [⌈N/128⌉, ⌈K/128⌉], and the other terms fit y [M, N]."""
    weight = a.weight
    (rows, depth), cols = a.x.data.shape, weight.data.shape[0]
    if weight.data.shape[1] != depth:
        raise ValueError(f"weight must be [N, {depth}], found {list(weight.data.shape)}")
    check_scales("x_scale_inv", a.x.scale_inv, (blocks_of(depth), rows))
    check_scales("weight_scale_inv", weight.scale_inv, (blocks_of(cols), blocks_of(depth)))
    checks.terms((rows, cols), a.bias, a.up, a.residual, a.side)


def check_scales(name: str, found: Tensor | None, expected: tuple[int, int]) -> None:
    """ValueError unless `found` is float32 of the shape `expected`."""
    if found is None or tuple(found.shape) != expected or found.dtype != torch.float32:
        what = None if found is None else f"{found.dtype} {list(found.shape)}"
        raise ValueError(f"{name} must be float32 {list(expected)}, found {what}")


def why_not_csrc_kernel(a: BlockLinear) -> str | None:
    """None if csrc's kernel takes these operands; otherwise the reason why not."""
    if a.up is not None and adapters_of(a.up.lora_B):
        return SEVERAL
    if why_not := why_not_gaps(x=a.x.scale_inv, weight=a.weight.scale_inv):
        return why_not
    return why_not_csrc_linear(as_linear(a))


def by_csrc(a: BlockLinear) -> Tensor:
    """One kernel of csrc, for any rank: wgmma and TMA, one rounding."""
    y = fake(a)
    launch_csrc(y, as_linear(a))
    return y


def why_not_csrc_base(a: BlockLinear) -> str | None:
    """None if csrc's kernel takes all but the adapters; otherwise the reason why not."""
    return why_not_csrc_kernel(a._replace(up=None, side=None))


def by_csrc_and_torch(a: BlockLinear) -> Tensor:
    """One kernel of csrc, then PyTorch's for the adapters' term, which it adds in fp32."""
    y = by_csrc(a._replace(up=None, side=None))
    return with_terms(y, as_linear(a)._replace(bias=None, residual=None))


def why_not_gaps(**scales: Tensor | None) -> str | None:
    """None if the scales, by their operand's name, have no gaps, as csrc reads them; otherwise the reason why not."""
    for operand, scale_inv in scales.items():
        if scale_inv is not None and not scale_inv.is_contiguous():
            strides = scale_inv.stride()
            return f"{operand}_scale_inv must be contiguous, found strides {strides}"
    return None


def by_torch(a: BlockLinear) -> Tensor:
    """A product of dequantized operands in `out_dtype`, then one PyTorch kernel for each other term."""
    wide = dequantize_weight_blocks(a.weight, a.out_dtype)
    y = dequantize_rows(a.x, dtype=a.out_dtype) @ wide.t()
    return with_terms(y, as_linear(a))


def why_not_cublaslt(a: BlockLinear) -> str | None:
    """None if cuBLASLt takes these operands; otherwise the reason why not."""
    (rows, depth), cols = a.x.data.shape, a.weight.data.shape[0]
    capability = capability_of(a.x.data.device)
    return why_not_cublaslt_blocks(capability, (rows, cols, depth), a.out_dtype)


def by_cublaslt(a: BlockLinear) -> Tensor:
    """`torch._scaled_mm` of the blocks, then one PyTorch kernel for each other term."""
    x, weight = a.x, a.weight
    assert x.scale_inv is not None and weight.scale_inv is not None
    y = torch._scaled_mm(
        x.data.view(E4M3),
        weight.data.view(E4M3).t(),
        scale_a=x.scale_inv.t(),
        scale_b=weight.scale_inv.t(),
        out_dtype=a.out_dtype,
    )
    return with_terms(y, as_linear(a))


def chosen_blocks(place: Place) -> tuple[str, str]:
    """What doctor says of a product in blocks."""
    n, k = place.sizes or (FP8_GEMM_MULTIPLE,) * 2
    if not why_not_wgmma_gemm(place.capability, n, k):
        sizes = "" if place.sizes else f", N, K in multiples of {FP8_GEMM_MULTIPLE}"
        return "csrc", f"one kernel for bf16 and fp16, any rank{sizes}, under BlockScaling alone"
    why_not = why_not_cublaslt_blocks(place.capability, (4, 16, 512), torch.bfloat16)
    if why_not:
        return "torch", "dequantized matmul, 2 bytes a weight of scratch, under BlockScaling alone"
    return (
        "cublaslt",
        "torch._scaled_mm, M, N, K in multiples of 4, 16, 512, under BlockScaling alone",
    )


fp8_block_linear = define(
    Op(
        "fp8_block_linear",
        BlockLinear,
        reference,
        fake,
        check,
        (
            Implementation("csrc", by_csrc, why_not_csrc_kernel),
            Implementation("csrc, torch", by_csrc_and_torch, why_not_csrc_base),
            Implementation("cublaslt", by_cublaslt, why_not_cublaslt),
            Implementation("torch", by_torch),
        ),
        chosen_blocks,
    ),
    "(Tensor x, Tensor x_scale_inv, Tensor weight, Tensor weight_scale_inv, Tensor? bias, Tensor? s, Tensor? lora_B,"
    " float scaling, ScalarType out_dtype, Tensor? residual=None, SymInt[]? rows=None, SymInt[]? ranks=None) -> Tensor",
)
