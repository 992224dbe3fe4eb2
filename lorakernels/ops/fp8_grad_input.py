# SPDX-License-Identifier: Apache-2.0
"""dx = dy W + mask ⊙ (ds A) / (1 − p): the gradient of a linear layer's input, through the base and the adapter.

One kernel (csrc/ops/fp8_gemm) draws the mask again while the FP8 product runs and rounds dx once. The adapter's branch
in kernels of its own writes and reads [M, K] once, and reads and writes dx: 8MK bytes in bf16, besides the mask. Sums
are split by default, as in Transformer Engine's dgrad.

Hopper's FP8 tensor cores read operands of shared memory along the contraction only, so that the product needs Wᵀ
[K, N]. W is turned on its way through the registers (csrc/ops/fp8_gemm).

What the kernel does not take is multiplied by cuBLASLt, which needs a copy of Wᵀ that is made for the call. Without FP8
tensor cores it is dequantized to dx's dtype. Sizes that cuBLASLt does not take are multiplied in fp32. A plain base is
one product in dy's dtype. The branch comes after these products.

A base may have a scale for each 128 × 128 block, and dy one for each 1 × 128. Its layer holds one copy of its bytes, as
a block of W has the same scale in both directions:

    dx[m, k] = Σ_b dys[b, m] · ws[b, ⌊k/128⌋] · Σ_{n in block b} dy8[m, n] w8[n, k]  +  …

csrc's kernel then reads a Wᵀ that `transpose_fp8` makes for the call, NK bytes that are free again behind it. Turning W
on its way through the registers leaves the tensor cores waiting for shared memory here, as each thread also reads the
scales of many rows (docs/facts.md, D9). PyTorch adds the branch of several adapters after it. cuBLASLt takes some
sizes, and the rest is dequantized.

Of J adapters in one batch (numerics/segments.py), each has its own M / J rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorakernels.device import capability_of, extension, multiprocessors_of
from lorakernels.kernels import tune
from lorakernels.kernels.arguments import format_of, name, where
from lorakernels.numerics.blocks import in_blocks
from lorakernels.numerics.dropout import drawn_mask, drops, keep_scale, masked
from lorakernels.numerics.fp8 import E4M3
from lorakernels.numerics.groups import GROUP_ROWS
from lorakernels.numerics.products import (
    dequantized,
    dequantized_grad_input,
    dequantized_weight,
)
from lorakernels.numerics.segments import (
    adapters_of,
    add_rows_times,
    check_segments,
    rows_times,
)
from lorakernels.ops import checks
from lorakernels.ops.hardware import (
    FLOATS,
    FP8_GEMM_MULTIPLE,
    NO_BLOCKS,
    PLAIN,
    SEVERAL,
    LayerOnGPU,
    gemm_by_cublaslt,
    gemm_by_kernel,
    gemm_in_blocks,
    gemm_without_ours,
    why_not_aligned,
    why_not_batched_gemm,
    why_not_cublaslt,
    why_not_cublaslt_blocks,
    why_not_dequantized,
    why_not_gaps,
    why_not_wgmma_gemm,
)
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.ops.transpose_fp8 import transpose_fp8
from lorakernels.values import Dropout, ProductSizes, Scaled, Tiles, Weight

MULTIPLE = 8  # of col0, for csrc


class GradInput(NamedTuple):
    """dy [M, N] is of `fp8_dtype`, e5m2 or e4m3, and the weight [N, K] e4m3, or both are plain. `out_dtype` is dx's.

    The weight's scale_inv is [1], or [⌈N/128⌉, ⌈K/128⌉] with dy's [⌈N/128⌉, M]. ds is [M, R], lora_A [R, K], or
    [J, R, K] of J adapters in one batch. Where `dropout.dropped` holds the mask, a kernel may read that instead of
    drawing. `split` asks the FP8 tensor cores to add partial sums in fp32; in blocks they always do.
    """

    dy: Scaled
    fp8_dtype: torch.dtype
    weight: Weight
    ds: Tensor | None
    lora_A: Tensor | None
    dropout: Dropout | None
    out_dtype: torch.dtype
    split: bool = True


def reference(a: GradInput) -> Tensor:
    """dx [M, K] in `out_dtype`, the mask drawn again. Sums are fp32's here, whatever `split` asks for.

    Raises:
        ValueError: a scale_inv, the slot, or a mask that has been drawn already does not fit.
    """
    check(a)
    acc = dequantized(a.dy, a.fp8_dtype) @ dequantized_weight(a.weight)
    return rounded_with_branch(acc, a)


def rounded_with_branch(acc: Tensor, a: GradInput) -> Tensor:
    """dx from dy W in fp32, to which the adapter's branch is added in place: rounded once."""
    if a.ds is not None and a.lora_A is not None:
        lora_A = a.lora_A.to(a.ds.dtype).float()
        branch, factor = masked(rows_times(a.ds.float(), lora_A), a.dropout)
        acc += branch * factor
    return acc.to(a.out_dtype)


def fake(a: GradInput) -> Tensor:
    return empty(a.dy.data, a.dy.data.shape[0], a.weight.data.shape[1], dtype=a.out_dtype)


def check(a: GradInput) -> None:
    """ValueError if scales of blocks, the slot or a mask that is handed over do not fit."""
    dy, weight, device = a.dy, a.weight, a.dy.data.device
    rows, depth = dy.data.shape
    if in_blocks(dy) or in_blocks(weight):
        if weight.data.shape[0] != depth:
            raise ValueError(f"weight must be [{depth}, K], found {list(weight.data.shape)}")
        checks.scales_of_blocks("dy", dy, weight)
    checks.mask(a.dropout, rows, device)
    checks.dropped(a.dropout, rows, weight.data.shape[1], device)
    check_segments("lora_A", a.lora_A, rows)


def why_not_csrc_kernel(a: GradInput) -> str | None:
    """None if csrc's kernel takes these operands; otherwise the reason why not."""
    dy, weight, dropout, out_dtype = a.dy, a.weight, a.dropout, a.out_dtype
    if dy.scale_inv is None or weight.scale_inv is None:
        return PLAIN
    if in_blocks(weight) and (why_not := _why_not_blocks(a)):
        return why_not
    if why_not := why_not_wgmma_gemm(capability_of(dy.data.device), *weight.data.shape):
        return why_not
    if out_dtype not in (torch.bfloat16, torch.float16):
        return f"out_dtype is {out_dtype}, not bfloat16 or float16"
    if dy.data.shape[0] == 0:
        return "no rows"
    if dropout is not None and dropout.col0 % MULTIPLE:
        return f"col0 = {dropout.col0} must be a multiple of {MULTIPLE}"
    if why_not := why_not_aligned(dy=dy.data, weight=weight.data):
        return why_not
    if a.ds is not None and (adapters := adapters_of(a.lora_A)):
        if why_not := why_not_batched_gemm(dy.data.shape[0], adapters, out_dtype):
            return why_not
        if dy.data.shape[1] % GROUP_ROWS:
            return f"N = {dy.data.shape[1]} must be a multiple of {GROUP_ROWS} for several adapters"
    return _why_not_branch(a.ds, a.lora_A, out_dtype)


def _why_not_blocks(a: GradInput) -> str | None:
    if a.ds is not None and adapters_of(a.lora_A):
        return SEVERAL
    return why_not_gaps(dy=a.dy.scale_inv, weight=a.weight.scale_inv)


def why_not_csrc_base(a: GradInput) -> str | None:
    """None if csrc's kernel multiplies these blocks without the adapters; otherwise the reason why not."""
    return why_not_csrc_kernel(_base(a)) if in_blocks(a.weight) else NO_BLOCKS


def _base(a: GradInput) -> GradInput:
    return a._replace(ds=None, lora_A=None, dropout=None)


def _why_not_branch(ds: Tensor | None, lora_A: Tensor | None, out_dtype: torch.dtype) -> str | None:
    if ds is None or lora_A is None:
        return None
    if ds.dtype != out_dtype:
        return f"ds is {ds.dtype}, out_dtype {out_dtype}"
    if lora_A.dtype not in FLOATS:
        return f"lora_A is {lora_A.dtype}"
    for label, tensor in (("ds", ds), ("lora_A", lora_A)):
        if not tensor.is_contiguous():
            return f"{label} must be contiguous, found strides {tensor.stride()}"
    return None


def why_not_cublaslt_gemm(a: GradInput) -> str | None:
    """None if `torch._scaled_mm` multiplies dy and W; otherwise the reason why not."""
    dy, weight = a.dy, a.weight
    if dy.scale_inv is None or weight.scale_inv is None:
        return PLAIN
    capability, rows, (n, k) = capability_of(dy.data.device), dy.data.shape[0], weight.data.shape
    if in_blocks(weight):
        return why_not_cublaslt_blocks(capability, (rows, k, n), a.out_dtype)
    return why_not_cublaslt(capability, rows, n, k)


def why_not_dequantized_gemm(a: GradInput) -> str | None:
    """None if dy and W are FP8 and multiplied in `out_dtype`; otherwise the reason why not."""
    if a.dy.scale_inv is None or a.weight.scale_inv is None:
        return PLAIN
    if in_blocks(a.weight):
        return None
    return why_not_dequantized(capability_of(a.dy.data.device), a.out_dtype)


def by_csrc(a: GradInput) -> Tensor:
    """One kernel of csrc, for any rank. In blocks Wᵀ comes before it."""
    dx = fake(a)
    launch_csrc(dx, a)
    return dx


def by_csrc_and_torch(a: GradInput) -> Tensor:
    """Wᵀ and one kernel of csrc, then PyTorch's for the adapters' branch."""
    return add_branch(by_csrc(_base(a)), a)


def launch_csrc(dx: Tensor, a: GradInput) -> None:
    """Write dx [M, K]. `why_not_csrc_kernel` has nothing against the operands."""
    dy, fp8_dtype, weight, ds, lora_A, dropout, _, split = a
    if blocks := in_blocks(weight):
        weight = weight._replace(data=transpose_fp8.run(weight.data))
    (rows, depth), cols, out_dtype = dy.data.shape, dx.shape[1], dx.dtype
    ds, lora_A = _factors(ds, lora_A, out_dtype)
    rank = 0 if lora_A is None else lora_A.shape[-2]
    if rank == 0:
        ds = lora_A = None
    adapters = adapters_of(lora_A)
    mask = dropout if lora_A is not None and drops(dropout) else None
    multiprocessors = multiprocessors_of(dy.data.get_device())
    how = "blocks" if blocks else "turned" if split else "turned fast"
    tile = tune.csrc_tile(rows, cols, how, multiprocessors)[0]
    if adapters:
        tile = GROUP_ROWS, GROUP_ROWS
    run = extension().fp8_block_grad_input if blocks else extension().fp8_grad_input
    a_dtype = name(out_dtype if lora_A is None else lora_A.dtype)
    run(
        (dx, ds, lora_A),
        dy,
        weight,
        mask,
        ProductSizes(rows, cols, depth, rank, rows // adapters if adapters else 0),
        (name(out_dtype), a_dtype, format_of(fp8_dtype)),
        Tiles(split, *tile, multiprocessors),
        where(dy.data),
    )


def _factors(
    ds: Tensor | None, lora_A: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """(ds, A) as csrc reads them, A in `dtype` or fp32; None for both without a branch."""
    if ds is None or lora_A is None:
        return None, None
    rank = lora_A.shape[-2]
    ds = F.pad(ds, (0, -rank % 8)) if rank % 8 or ds.data_ptr() % 16 else ds
    if lora_A.dtype not in (dtype, torch.float32) or lora_A.data_ptr() % 16:
        lora_A = lora_A.to(dtype, copy=True)
    return ds, lora_A


def by_cublaslt(a: GradInput) -> Tensor:
    """`torch._scaled_mm` on a copy of Wᵀ, then one PyTorch kernel after the other for the branch."""
    dy, weight = a.dy, a.weight
    assert dy.scale_inv is not None and weight.scale_inv is not None
    scales, fast = (dy.scale_inv, weight.scale_inv), not a.split
    if in_blocks(weight):
        scales, fast = (dy.scale_inv.t(), weight.scale_inv.t().contiguous().t()), False
    dx = torch._scaled_mm(
        dy.data.contiguous().view(a.fp8_dtype),
        transpose_fp8.run(weight.data).view(E4M3).t(),
        scale_a=scales[0],
        scale_b=scales[1],
        out_dtype=a.out_dtype,
        use_fast_accum=fast,
    )
    return _with_branch(dx, a)


def by_dequantized(a: GradInput) -> Tensor:
    """A product in `out_dtype`, then one PyTorch kernel after the other for the branch."""
    return _with_branch(dequantized_grad_input(a.dy, a.fp8_dtype, a.weight, a.out_dtype), a)


def _with_branch(dx: Tensor, a: GradInput) -> Tensor:
    """dx with the adapter's branch; in blocks it is added in fp32."""
    if in_blocks(a.weight) and a.ds is not None and a.lora_A is not None:
        return rounded_with_branch(dx.float(), a)
    return add_branch(dx, a)


def by_torch(a: GradInput) -> Tensor:
    """A product in fp32, or in dy's dtype for a plain base, then one PyTorch kernel after the other."""
    dy, weight = a.dy, a.weight
    if dy.scale_inv is None or weight.scale_inv is None:
        dx = dy.data @ weight.data.to(dy.data.dtype)
    else:
        dx = reference(GradInput(dy, a.fp8_dtype, weight, None, None, None, a.out_dtype))
    return add_branch(dx, a)


def add_branch(dx: Tensor, a: GradInput) -> Tensor:
    """dx with the adapter's branch added in place."""
    if a.ds is None or a.lora_A is None:
        return dx
    ds, lora_A, dropout = a.ds.to(a.out_dtype), a.lora_A.to(a.out_dtype), a.dropout
    if dropout is None or not drops(dropout):
        return add_rows_times(dx, ds, lora_A)
    branch = rows_times(ds, lora_A, keep_scale(dropout.p))
    return dx.add_(branch.where(drawn_mask(dropout, *dx.shape), 0.0))


def chosen(place: LayerOnGPU) -> tuple[str, str]:
    if place.blocks:
        return gemm_in_blocks(place, "a kernel behind Wᵀ's copy")
    if without_ours := gemm_without_ours(place):
        return without_ours
    n, k = place.sizes or (FP8_GEMM_MULTIPLE,) * 2
    if why_not := why_not_wgmma_gemm(place.capability, n, k):
        return gemm_by_cublaslt(place, why_not)
    return gemm_by_kernel(place, "csrc", "any rank")


fp8_grad_input = define(
    Op(
        "fp8_grad_input",
        GradInput,
        reference,
        fake,
        check,
        (
            Implementation("csrc", by_csrc, why_not_csrc_kernel),
            Implementation("csrc, torch", by_csrc_and_torch, why_not_csrc_base),
            Implementation("cublaslt", by_cublaslt, why_not_cublaslt_gemm),
            Implementation("dequantized", by_dequantized, why_not_dequantized_gemm),
            Implementation("torch", by_torch),
        ),
        chosen,
    ),
    "(Tensor dy, Tensor? dy_scale_inv, ScalarType fp8_dtype, Tensor weight, Tensor? weight_scale_inv, Tensor? ds,"
    " Tensor? lora_A, Tensor? slot, float p, SymInt site, ScalarType out_dtype, SymInt row0=0, SymInt col0=0,"
    " bool split=True, Tensor? dropped=None, SymInt[] chunks=[]) -> Tensor",
)


def fp8_grad_input_into(dx: Tensor, a: GradInput) -> None:
    """`fp8_grad_input` into dx [M, K], which is contiguous. What csrc does not compute is copied there."""
    if not dx.is_cuda or why_not_csrc_kernel(a) or why_not_aligned(dy=dx):
        dx.copy_(fp8_grad_input(*a))
        return
    check(a)
    launch_csrc(dx, a)
