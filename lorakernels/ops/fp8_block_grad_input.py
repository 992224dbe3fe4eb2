# SPDX-License-Identifier: Apache-2.0
"""dx = dy W + mask ⊙ (ds A) / (1 − p), over a base with a scale for each 128 × 128 block.

    dx[m, k] = Σ_b dys[b, m] · ws[b, ⌊k/128⌋] · Σ_{n in block b} dy8[m, n] w8[n, k]  +  …

dy8 and w8 are FP8 bytes; dys and ws, fp32, are their scale_inv. A block of W has the same scale in both directions, so
that a layer holds one copy of its bytes for forward and backward.

Hopper's FP8 tensor cores read operands of shared memory along the contraction only. So Wᵀ [K, N] is made for the call
by `transpose_fp8`, NK bytes that are free again behind it. Turning W on its way through the registers, as
`fp8_grad_input` does, leaves the tensor cores waiting for shared memory here, as each thread also reads the scales of
many rows (docs/facts.md, D9). csrc/ops/fp8_gemm adds the branch in the product and rounds dx once. PyTorch adds the
branch of several adapters after it. For sizes that it takes, cuBLASLt multiplies the blocks themselves, on a copy of Wᵀ
likewise. PyTorch's way dequantizes both operands, in `out_dtype` on a GPU and in fp32 on a CPU, and multiplies those.
After cuBLASLt's or PyTorch's product, the branch is added by PyTorch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.device import capability_of
from lorakernels.numerics.blocks import dequantize_rows, dequantize_weight_blocks
from lorakernels.numerics.fp8 import E4M3
from lorakernels.numerics.segments import adapters_of, check_segments
from lorakernels.ops import checks
from lorakernels.ops.fp8_grad_input import GradInput, add_branch, launch_csrc, rounded_with_branch
from lorakernels.ops.fp8_grad_input import why_not_csrc_kernel as why_not_csrc_product
from lorakernels.ops.hardware import (
    SEVERAL,
    Place,
    gemm_in_blocks,
    why_not_cublaslt_blocks,
    why_not_gaps,
)
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.ops.transpose_fp8 import transpose_fp8
from lorakernels.values import Dropout, Scaled, Weight


class BlockGradInput(NamedTuple):
    """dy [M, N] is of `fp8_dtype`, e5m2 or e4m3, with scale_inv [⌈N/128⌉, M], ds [M, R]. `out_dtype` is dx's.

    The weight [N, K] is e4m3 with scale_inv [⌈N/128⌉, ⌈K/128⌉], lora_A [R, K], or [J, R, K] of J adapters in one batch.
    Where `dropout.dropped` holds the mask, a kernel may read that instead of drawing.
    """

    dy: Scaled
    fp8_dtype: torch.dtype
    weight: Weight
    ds: Tensor | None
    lora_A: Tensor | None
    dropout: Dropout | None
    out_dtype: torch.dtype


def reference(a: BlockGradInput) -> Tensor:
    """dx [M, K] in `out_dtype`, summed in fp32 and rounded once; the mask is drawn again.

    Raises:
        ValueError: a scale_inv, the slot, or a mask that has been drawn already does not fit.
    """
    check(a)
    acc = dequantize_rows(a.dy, a.fp8_dtype) @ dequantize_weight_blocks(a.weight)
    return rounded_with_branch(acc, GradInput(*a))


def fake(a: BlockGradInput) -> Tensor:
    return empty(a.dy.data, a.dy.data.shape[0], a.weight.data.shape[1], dtype=a.out_dtype)


def check(a: BlockGradInput) -> None:
    """ValueError unless scales are [⌈N/128⌉, M] and [⌈N/128⌉, ⌈K/128⌉], and slot and mask fit."""
    dy, weight = a.dy, a.weight
    (rows, depth), cols = dy.data.shape, weight.data.shape[1]
    if weight.data.shape[0] != depth:
        raise ValueError(f"weight must be [{depth}, K], found {list(weight.data.shape)}")
    checks.scales_of_blocks("dy", dy, weight)
    checks.mask(a.dropout, rows, dy.data.device)
    checks.dropped(a.dropout, rows, cols, dy.data.device)
    check_segments("lora_A", a.lora_A, rows)


def why_not_csrc_kernel(a: BlockGradInput) -> str | None:
    """None if csrc's kernel takes these operands; otherwise the reason why not."""
    if a.ds is not None and adapters_of(a.lora_A):
        return SEVERAL
    if why_not := why_not_gaps(dy=a.dy.scale_inv, weight=a.weight.scale_inv):
        return why_not
    return why_not_csrc_product(GradInput(*a))


def by_csrc(a: BlockGradInput) -> Tensor:
    """Wᵀ, and one kernel of csrc, for any rank."""
    dx = fake(a)
    turned = a.weight._replace(data=transpose_fp8.run(a.weight.data))
    launch_csrc(dx, GradInput(*a)._replace(weight=turned))
    return dx


def why_not_csrc_base(a: BlockGradInput) -> str | None:
    """None if csrc's kernel takes all but the adapters; otherwise the reason why not."""
    return why_not_csrc_kernel(_base(a))


def _base(a: BlockGradInput) -> BlockGradInput:
    return a._replace(ds=None, lora_A=None, dropout=None)


def by_csrc_and_torch(a: BlockGradInput) -> Tensor:
    """Wᵀ and one kernel of csrc, then PyTorch's for the adapters' branch."""
    return add_branch(by_csrc(_base(a)), GradInput(*a))


def by_torch(a: BlockGradInput) -> Tensor:
    """A product of dequantized operands in `out_dtype`, to which the branch is added in fp32."""
    wide = dequantize_weight_blocks(a.weight, a.out_dtype)
    acc = dequantize_rows(a.dy, a.fp8_dtype, a.out_dtype) @ wide
    return rounded_with_branch(acc.float(), GradInput(*a))


def why_not_cublaslt(a: BlockGradInput) -> str | None:
    """None if cuBLASLt takes these operands; otherwise the reason why not."""
    (rows, depth), cols = a.dy.data.shape, a.weight.data.shape[1]
    capability = capability_of(a.dy.data.device)
    return why_not_cublaslt_blocks(capability, (rows, cols, depth), a.out_dtype)


def by_cublaslt(a: BlockGradInput) -> Tensor:
    """`torch._scaled_mm` of the blocks and a copy of Wᵀ, to which the branch is added in fp32."""
    dy, weight = a.dy, a.weight
    assert dy.scale_inv is not None and weight.scale_inv is not None
    dx = torch._scaled_mm(
        dy.data.view(a.fp8_dtype),
        transpose_fp8(weight.data).view(E4M3).t(),
        scale_a=dy.scale_inv.t(),
        scale_b=weight.scale_inv.t().contiguous().t(),
        out_dtype=a.out_dtype,
    )
    if a.ds is None or a.lora_A is None:
        return dx
    return rounded_with_branch(dx.float(), GradInput(*a))


def chosen(place: Place) -> tuple[str, str]:
    """What doctor says."""
    return gemm_in_blocks(place, "a kernel behind Wᵀ's copy")


fp8_block_grad_input = define(
    Op(
        "fp8_block_grad_input",
        BlockGradInput,
        reference,
        fake,
        check,
        (
            Implementation("csrc", by_csrc, why_not_csrc_kernel),
            Implementation("csrc, torch", by_csrc_and_torch, why_not_csrc_base),
            Implementation("cublaslt", by_cublaslt, why_not_cublaslt),
            Implementation("torch", by_torch),
        ),
        chosen,
    ),
    "(Tensor dy, Tensor dy_scale_inv, ScalarType fp8_dtype, Tensor weight, Tensor weight_scale_inv, Tensor? ds,"
    " Tensor? lora_A, Tensor? slot, float p, SymInt site, ScalarType out_dtype, SymInt row0=0, SymInt col0=0,"
    " Tensor? dropped=None, SymInt[] chunks=[]) -> Tensor",
)
