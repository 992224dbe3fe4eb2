# SPDX-License-Identifier: Apache-2.0
"""dx = dy W + mask ⊙ (ds A) / (1 − p), over a base with a scale for each 128 × 128 block.

    dx[m, k] = Σ_b dys[b, m] · ws[b, ⌊k/128⌋] · Σ_{n in block b} dy8[m, n] w8[n, k]  +  …

dy8 [M, N] is e5m2 or e4m3 with dys fp32 [⌈N/128⌉, M]. w8 [N, K] is e4m3 with ws fp32 [⌈N/128⌉, ⌈K/128⌉]. ds is [M, R]
and dx [M, K]. A is [R, K], or [J, R, K] of J adapters in one batch (numerics/segments.py). A block of W has the same
scale in both directions, so that a layer holds one copy of its bytes for forward and backward.

Hopper's FP8 tensor cores read operands of shared memory along the contraction only. So Wᵀ [K, N] is made for the call
by `transpose_fp8`, NK bytes that are free again behind it. Turning W on its way through the registers, as
`fp8_grad_input` does, leaves the tensor cores waiting for shared memory here, as each thread also reads the scales of
many rows (docs/facts.md, D9). csrc/ops/fp8_gemm adds the branch in the product and rounds dx once. PyTorch adds the
branch of several adapters after it. For sizes that it takes, cuBLASLt multiplies the blocks themselves, on a copy of Wᵀ
likewise. PyTorch's way dequantizes both operands, in `out_dtype` on a GPU and in fp32 on a CPU, and multiplies those.
After cuBLASLt's or PyTorch's product, the branch is added by PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.device import capability_of
from lorakernels.numerics.blocks import blocks_of, dequantize_rows, dequantize_weight_blocks
from lorakernels.numerics.fp8 import E4M3
from lorakernels.numerics.segments import adapters_of, check_segments
from lorakernels.ops import checks
from lorakernels.ops.fp8_block_linear import check_scales, chosen_blocks, why_not_gaps
from lorakernels.ops.fp8_grad_input import add_branch, fake, launch_csrc, rounded_with_branch
from lorakernels.ops.fp8_grad_input import why_not_csrc_kernel as why_not_csrc_product
from lorakernels.ops.hardware import SEVERAL, Place, why_not_cublaslt_blocks
from lorakernels.ops.register import Implementation, define, of_parameters
from lorakernels.ops.transpose_fp8 import transpose_fp8
from lorakernels.values import Dropout, Scaled, Weight


def reference(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    ds: Tensor | None,
    lora_A: Tensor | None,
    dropout: Dropout | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """dx [M, K] in `out_dtype`, summed in fp32 and rounded once; the mask is drawn again.

    `fp8_dtype` is the type of dy's bytes. Where `dropout.dropped` holds the mask, a kernel may read that instead.

    Raises:
        ValueError: a scale_inv, the slot, or a mask that has been drawn already does not fit.
    """
    check(dy, fp8_dtype, weight, ds, lora_A, dropout, out_dtype)
    acc = dequantize_rows(dy, fp8_dtype) @ dequantize_weight_blocks(weight)
    return rounded_with_branch(acc, ds, lora_A, dropout, out_dtype)


def check(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    ds: Tensor | None,
    lora_A: Tensor | None,
    dropout: Dropout | None,
    out_dtype: torch.dtype,
) -> None:
    """ValueError unless scales are [⌈N/128⌉, M] and [⌈N/128⌉, ⌈K/128⌉], and slot and mask fit."""
    (rows, depth), cols = dy.data.shape, weight.data.shape[1]
    if weight.data.shape[0] != depth:
        raise ValueError(f"weight must be [{depth}, K], found {list(weight.data.shape)}")
    check_scales("dy_scale_inv", dy.scale_inv, (blocks_of(depth), rows))
    check_scales("weight_scale_inv", weight.scale_inv, (blocks_of(depth), blocks_of(cols)))
    checks.mask(dropout, rows, dy.data.device)
    checks.dropped(dropout, rows, cols, dy.data.device)
    check_segments("lora_A", lora_A, rows)


def why_not_csrc_kernel(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    ds: Tensor | None,
    lora_A: Tensor | None,
    dropout: Dropout | None,
    out_dtype: torch.dtype,
) -> str | None:
    """None if csrc's kernel takes these operands; otherwise the reason why not."""
    if ds is not None and adapters_of(lora_A):
        return SEVERAL
    if why_not := why_not_gaps(dy=dy.scale_inv, weight=weight.scale_inv):
        return why_not
    return why_not_csrc_product(dy, fp8_dtype, weight, ds, lora_A, dropout, out_dtype)


def by_csrc(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    ds: Tensor | None,
    lora_A: Tensor | None,
    dropout: Dropout | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Wᵀ, and one kernel of csrc, for any rank."""
    dx: Tensor = fake(dy, fp8_dtype, weight, ds, lora_A, dropout, out_dtype)
    turned = weight._replace(data=transpose_fp8.run(weight.data))
    launch_csrc(dx, dy, fp8_dtype, turned, ds, lora_A, dropout, split=True)
    return dx


def why_not_csrc_base(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    ds: Tensor | None,
    lora_A: Tensor | None,
    dropout: Dropout | None,
    out_dtype: torch.dtype,
) -> str | None:
    """None if csrc's kernel takes all but the adapters; otherwise the reason why not."""
    return why_not_csrc_kernel(dy, fp8_dtype, weight, None, None, None, out_dtype)


def by_csrc_and_torch(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    ds: Tensor | None,
    lora_A: Tensor | None,
    dropout: Dropout | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Wᵀ and one kernel of csrc, then PyTorch's for the adapters' branch."""
    dx = by_csrc(dy, fp8_dtype, weight, None, None, None, out_dtype)
    return add_branch(dx, ds, lora_A, dropout, out_dtype)


def by_torch(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    ds: Tensor | None,
    lora_A: Tensor | None,
    dropout: Dropout | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """A product of dequantized operands in `out_dtype`, to which the branch is added in fp32."""
    wide = dequantize_weight_blocks(weight, out_dtype)
    acc = dequantize_rows(dy, fp8_dtype, out_dtype) @ wide
    return rounded_with_branch(acc.float(), ds, lora_A, dropout, out_dtype)


def why_not_cublaslt(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    ds: Tensor | None,
    lora_A: Tensor | None,
    dropout: Dropout | None,
    out_dtype: torch.dtype,
) -> str | None:
    """None if cuBLASLt takes these operands; otherwise the reason why not."""
    (rows, depth), cols = dy.data.shape, weight.data.shape[1]
    capability = capability_of(dy.data.device)
    return why_not_cublaslt_blocks(capability, (rows, cols, depth), out_dtype)


def by_cublaslt(
    dy: Scaled,
    fp8_dtype: torch.dtype,
    weight: Weight,
    ds: Tensor | None,
    lora_A: Tensor | None,
    dropout: Dropout | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`torch._scaled_mm` of the blocks and a copy of Wᵀ, to which the branch is added in fp32."""
    assert dy.scale_inv is not None and weight.scale_inv is not None
    dx = torch._scaled_mm(
        dy.data.view(fp8_dtype),
        transpose_fp8(weight.data).view(E4M3).t(),
        scale_a=dy.scale_inv.t(),
        scale_b=weight.scale_inv.t().contiguous().t(),
        out_dtype=out_dtype,
    )
    if ds is None or lora_A is None:
        return dx
    return rounded_with_branch(dx.float(), ds, lora_A, dropout, out_dtype)


def chosen(place: Place) -> tuple[str, str]:
    """What doctor says: as of the forward, but csrc's is not one kernel."""
    name, why = chosen_blocks(place)
    return name, why.replace("one kernel", "a kernel behind Wᵀ's copy") if name == "csrc" else why


fp8_block_grad_input = define(
    of_parameters(
        "fp8_block_grad_input",
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
