# SPDX-License-Identifier: Apache-2.0
"""x8 = sat(x · scale), s = D(x) Aᵀ: a linear layer's input, quantized and multiplied by the adapter's first half.

x8 [M, K] is e4m3 bytes, A lora_A, s [M, R]. csrc/ops/quantize_lora_down reads x once and writes x8: 3MK bytes. Each 128
ranks beyond the first read x again on other GPUs than Hopper's, or where K % 16 = 8. The kernel draws the mask on the
way, and the product runs on the tensor cores in x's dtype. Its fp32 sums have an order that depends on shape and GPU
alone; they are rounded once, after the dropout factor. PyTorch's kernels read x once for its amax, once to quantize it
and once or twice for s.

A scale for each 1 × 128 costs no other pass where a warp has whole blocks: on Hopper and sm_100 for ranks up to 16 and
K a multiple of 16. Elsewhere `quantize_blocks` reads x once more.

Of J adapters in one batch (numerics/segments.py), each has its own M / J rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, why_not_csrc
from lorakernels.kernels.arguments import name, scale_of, where
from lorakernels.kernels.triton import segments as segment_kernels
from lorakernels.numerics.blocks import quantize_by
from lorakernels.numerics.dropout import masked
from lorakernels.numerics.fp8 import E4M3, quantize
from lorakernels.numerics.segments import adapters_of, check_segments, rows_times
from lorakernels.ops import checks
from lorakernels.ops.hardware import SEVERAL, LayerOnGPU, why_not_batched
from lorakernels.ops.quantize_blocks import quantize_blocks
from lorakernels.ops.register import Implementation, Op, define, empty, fake_quantized
from lorakernels.values import Dropout, RankSizes, Scaling

MULTIPLE = 8  # of K, for csrc
MAX_RANK = 256  # for csrc
# where a block has less than 184,320 bytes of shared memory, which a higher rank asks for
MAX_RANK_ELSEWHERE = 32
Results = tuple[Tensor, Tensor, Tensor]


class Down(NamedTuple):
    """x is [M, K] in fp32, bf16 or fp16. lora_A is [R, K], or [J, R, K] of J adapters in one batch.

    `power_of_two`, given without a scaling, has scale_inv [⌈K/128⌉, M] for each 1 × 128, as `quantize_blocks` has it.
    """

    x: Tensor
    lora_A: Tensor | None
    scaling: Scaling | None
    dropout: Dropout | None
    power_of_two: bool | None = None


def reference(a: Down) -> Results:
    """(x8 [M, K], scale_inv fp32 [1], s [M, R]). x8 and scale_inv are empty without a scaling, s without lora_A.

    Raises:
        ValueError: the slot does not fit, or a scaling is given with `power_of_two`.
    """
    check(a)
    x, lora_A, scaling, dropout, power_of_two = a
    x8, scale_inv = quantize_by(x, scaling, E4M3, power_of_two)
    if lora_A is None:
        return x8, scale_inv, x.new_empty(0)
    xd, factor = masked(x.float(), dropout)
    s = rows_times(xd, lora_A.to(x.dtype).float().mT) * factor
    return x8, scale_inv, s.to(x.dtype)


def fake(a: Down) -> Results:
    x, lora_A = a.x, a.lora_A
    x8, scale_inv = fake_quantized(x, a.scaling, a.power_of_two)
    return x8, scale_inv, empty(x, 0) if lora_A is None else empty(x, x.shape[0], lora_A.shape[-2])


def check(a: Down) -> None:
    """ValueError if the slot, lora_A or two recipes do not fit."""
    x, lora_A, scaling, dropout, power_of_two = a
    checks.one_recipe(scaling, power_of_two)
    checks.mask(dropout, x.shape[0], x.device)
    if lora_A is not None and (lora_A.dim() not in (2, 3) or lora_A.shape[-1:] != x.shape[1:]):
        raise ValueError(
            f"lora_A must be [R, {x.shape[1]}] or [J, R, {x.shape[1]}], found {list(lora_A.shape)}"
        )
    check_segments("lora_A", lora_A, x.shape[0])


def why_not_csrc_kernel(a: Down) -> str | None:
    """None if csrc's kernel takes these tensors; otherwise the reason why not."""
    x, lora_A, dropout = a.x, a.lora_A, a.dropout
    if why_not := _why_not_sizes(capability_of(x.device), x.shape[1]):
        return why_not
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x is {x.dtype}, not bfloat16 or float16"
    if dropout is not None and dropout.col0 % MULTIPLE:
        return f"col0 = {dropout.col0} must be a multiple of {MULTIPLE}"
    if adapters_of(lora_A):
        return SEVERAL
    most = max_rank(capability_of(x.device))
    if lora_A is not None and not 0 < lora_A.shape[0] <= most:
        return f"rank {lora_A.shape[0]} is not in 1 to {most}"
    for label, tensor in (("x", x), ("lora_A", lora_A)):
        if tensor is not None and (tensor.data_ptr() % 16 or not tensor.is_contiguous()):
            return (
                f"{label} must be contiguous and 16-byte aligned, found strides {tensor.stride()}"
            )
    return None


def max_rank(capability: tuple[int, int]) -> int:
    """The highest rank that csrc's kernel takes, by the shared memory of a block."""
    return MAX_RANK if capability[0] in (9, 10) else MAX_RANK_ELSEWHERE


def _why_not_sizes(capability: tuple[int, int], k: int) -> str | None:
    if why_not := why_not_csrc(capability):
        return why_not
    if capability < (8, 0):
        return f"compute capability {capability} has no bf16 tensor cores"
    return f"K = {k} must be a multiple of {MULTIPLE}" if k % MULTIPLE else None


def by_csrc(a: Down) -> Results:
    """One read of x, by csrc's kernel."""
    x, lora_A, scaling, dropout, power_of_two = a
    rows, cols = x.shape
    rank = 0 if lora_A is None else lora_A.shape[0]
    ext, device = extension(), x.get_device()
    in_blocks = power_of_two is not None
    if power_of_two is not None and not _finds_blocks(rows, cols, rank, device):
        _, _, s = by_csrc(Down(x, lora_A, None, dropout))
        return *quantize_blocks.run(x, E4M3, power_of_two), s
    quantizes = scaling is not None or in_blocks
    x8, scale_inv = fake_quantized(x, scaling, power_of_two)
    s = x.new_empty(0 if lora_A is None else (rows, rank))
    if x.numel() == 0:  # no kernel runs; the scale that all implementations use
        if scaling is not None:
            scale_inv = quantize(x, scaling, E4M3)[1]
        return x8, scale_inv, s.zero_()
    if not quantizes and lora_A is None:
        return x8, scale_inv, s
    if lora_A is not None and lora_A.dtype not in (x.dtype, torch.float32):
        lora_A = lora_A.to(x.dtype)
    floats = ext.quantize_lora_down_workspace(rows, cols, rank, device)
    workspace = x.new_empty(floats, dtype=torch.float32)
    ext.quantize_lora_down(
        (x8, scale_inv, s, workspace),
        x,
        lora_A,
        scale_of(scaling),
        RankSizes(rows, cols, rank),
        (name(x.dtype), name(x.dtype if lora_A is None else lora_A.dtype), power_of_two),
        dropout,
        where(x),
    )
    return x8, scale_inv, s


def _finds_blocks(rows: int, cols: int, rank: int, device: int) -> bool:
    """Whether csrc's kernel for these sizes finds blocks' scales; else one of Triton reads x for them once more."""
    return rows * cols > 0 and extension().quantize_lora_down_finds_blocks(rows, cols, rank, device)


def why_not_segments(a: Down) -> str | None:
    """None if Triton's kernels take the adapters of a batch; otherwise the reason why not."""
    lora_A = a.lora_A
    if lora_A is None or not adapters_of(lora_A):
        return "lora_A is of one adapter"
    if why_not := why_not_csrc_kernel(Down(a.x, None, a.scaling, None)):
        return why_not
    return why_not_batched(a.x, lora_A, lora_A.shape[1], a.dropout)


def by_segments(a: Down) -> Results:
    """csrc's kernel for x8, and one of Triton for all adapters."""
    assert a.lora_A is not None
    x8, scale_inv, _ = by_csrc(Down(a.x, None, a.scaling, None, a.power_of_two))
    return x8, scale_inv, segment_kernels.down(a.x, a.lora_A, by_column=False)


def by_torch(a: Down) -> Results:
    """One PyTorch kernel after the other, for any dtype and shape; of blocks, one of Triton that takes x."""
    x, lora_A, scaling, dropout, power_of_two = a
    if power_of_two is not None and x.is_cuda:
        x8, scale_inv = quantize_blocks.run(x, E4M3, power_of_two)
    else:
        x8, scale_inv = quantize_by(x, scaling, E4M3, power_of_two)
    if lora_A is None:
        return x8, scale_inv, x.new_empty(0)
    xd, factor = masked(x, dropout)
    return x8, scale_inv, rows_times(xd, lora_A.to(x.dtype).mT, factor)


def chosen(place: LayerOnGPU) -> tuple[str, str]:
    if why_not := _why_not_sizes(place.capability, place.sizes[1] if place.sizes else MULTIPLE):
        return "torch", why_not
    needs_k = "" if place.sizes else f", K a multiple of {MULTIPLE}"
    most = max_rank(place.capability)
    return "csrc", f"one read for bf16 and fp16, rank ≤ {most}{needs_k}; else PyTorch's"


quantize_lora_down = define(
    Op(
        "quantize_lora_down",
        Down,
        reference,
        fake,
        check,
        (
            Implementation("csrc", by_csrc, why_not_csrc_kernel),
            Implementation("csrc, triton", by_segments, why_not_segments),
            Implementation("torch", by_torch),
        ),
        chosen,
    ),
    "(Tensor x, Tensor? lora_A, Tensor(a2!)? state, SymInt column, bool delayed, Tensor? slot, float p, SymInt site,"
    " SymInt row0=0, SymInt col0=0, SymInt[] chunks=[], bool? power_of_two=None) -> (Tensor, Tensor, Tensor)",
)
