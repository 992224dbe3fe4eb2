# SPDX-License-Identifier: Apache-2.0
"""quantize_grad that also draws the dropout mask of the layer's input [M, K], a bit an element.

csrc's kernel draws while it waits for memory. Then lora_grad_a and fp8_grad_input read MK / 8 bytes each instead of
drawing the mask again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, why_not_csrc
from lorakernels.kernels.arguments import where
from lorakernels.numerics.dropout import drawn_mask, dropped_bits, dropped_words, drops
from lorakernels.numerics.segments import adapters_of
from lorakernels.ops import checks
from lorakernels.ops.hardware import why_not_wgmma_gemm
from lorakernels.ops.lora_grad_a import MAX_RANK as MAX_GRAD_A_RANK
from lorakernels.ops.lora_grad_a import why_not_sizes as why_not_lora_grad_a
from lorakernels.ops.quantize_grad import (
    Grad,
    by_torch,
    columns,
    launch_csrc,
    quantize_grad,
    why_not_csrc_operands,
)
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.values import Dropout, Scaling, SideBySide, Sizes, Up, Weight

MAX_DRAWN_RANK = 64  # above, another kernel of csrc draws the mask
COLUMN_MULTIPLE = 8  # of col0, for csrc to draw the mask
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class GradAndMask(NamedTuple):
    """As `quantize_grad` takes them, with the mask of the layer's input [M, K]: K = `cols`."""

    dy: Tensor
    up: Up
    scaling: Scaling | None
    fp8_dtype: torch.dtype
    dropout: Dropout
    cols: int
    side: SideBySide | None = None
    power_of_two: bool | None = None


def reference(a: GradAndMask) -> Results:
    """What `quantize_grad` returns, and the mask's `dropped_bits`: int32 [M, dropped_words(cols)].

    Raises:
        ValueError: `side` does not fit dy and `up`, or the slot does not.
    """
    check(a)
    mask = drawn_mask(a.dropout, len(a.dy), a.cols)
    return *quantize_grad.reference(as_grad(a)), dropped_bits(mask)


def as_grad(a: GradAndMask) -> Grad:
    """The arguments of `quantize_grad`."""
    return Grad(a.dy, a.up, a.scaling, a.fp8_dtype, a.side, a.power_of_two)


def fake(a: GradAndMask) -> Results:
    dropped = empty(a.dy, a.dy.shape[0], dropped_words(a.cols), dtype=torch.int32)
    return *quantize_grad.fake(as_grad(a)), dropped


def check(a: GradAndMask) -> None:
    """ValueError if projections side by side or the slot do not fit."""
    quantize_grad.check(as_grad(a))
    checks.mask(a.dropout, a.dy.shape[0], a.dy.device)


def _drawn_by_csrc(dropout: Dropout) -> bool:
    """Whether csrc's kernels draw this mask as bits."""
    return drops(dropout) and dropout.col0 % COLUMN_MULTIPLE == 0


def why_not_drawn_apart(a: GradAndMask) -> str | None:
    """None if csrc's kernel takes these tensors; otherwise the reason why not."""
    return why_not_csrc_operands(a.dy, a.up, a.side)


def why_not_drawn_beside(a: GradAndMask) -> str | None:
    """None if csrc's kernel takes these tensors and draws the mask, too; otherwise the reason why not."""
    if why_not := why_not_drawn_apart(a):
        return why_not
    if (rank := a.up.lora_B.shape[1]) > MAX_DRAWN_RANK:
        return f"rank {rank} is above {MAX_DRAWN_RANK}"
    if not _drawn_by_csrc(a.dropout):
        return f"csrc draws no mask of p = {a.dropout.p} at col0 = {a.dropout.col0}"
    return None


def hands_mask_over(
    dy: Tensor, up: Up, dropout: Dropout | None, weight: Weight, side: SideBySide | None = None
) -> bool:
    """Whether `quantize_grad_and_mask` draws the mask that `lora_grad_a` and `fp8_grad_input` then read.

    It does over an FP8 base where all three are kernels of csrc that can. The bits live as long as one backward. In a
    trace, where tensors have no addresses, dtypes and ranks decide. On a GPU without these kernels, such a trace draws
    the mask once more, and dA and dx are the same.
    """
    if weight.scale_inv is None or dropout is None or not dy.is_cuda or dy.dtype == torch.float32:
        return False
    if adapters_of(up.lora_B):
        return False
    if not _drawn_by_csrc(dropout) or columns(up, side) > MAX_GRAD_A_RANK:
        return False
    if torch.compiler.is_compiling():
        return True
    capability, (n, k) = capability_of(dy.device), weight.data.shape
    readers = why_not_lora_grad_a(capability, k, True) or why_not_wgmma_gemm(capability, n, k)
    return not (readers or why_not_csrc_operands(dy, up, side))


def drawn_beside_by_csrc(a: GradAndMask) -> Results:
    """One kernel of csrc, which draws the mask, too."""
    dropped = a.dy.new_empty((len(a.dy), dropped_words(a.cols)), dtype=torch.int32)
    mask = a.dropout._replace(dropped=dropped)
    return *launch_csrc(as_grad(a), mask, a.cols), dropped


def drawn_apart_by_csrc(a: GradAndMask) -> Results:
    """csrc's kernel, and another one for the mask."""
    return *launch_csrc(as_grad(a)), drawn_bits(a.dropout, len(a.dy), a.cols)


def drawn_bits(dropout: Dropout, rows: int, cols: int) -> Tensor:
    """int32 [rows, dropped_words(cols)]: the mask's bits, drawn by a kernel that does nothing else."""
    slot = dropout.slot
    by_csrc = slot.is_cuda and _drawn_by_csrc(dropout)
    if not by_csrc or why_not_csrc(capability_of(slot.device)):
        return dropped_bits(drawn_mask(dropout, rows, cols))
    dropped = slot.new_empty((rows, dropped_words(cols)), dtype=torch.int32)
    extension().dropped_bits(dropped, Sizes(rows, cols), dropout, where(slot))
    return dropped


def drawn_apart_by_torch(a: GradAndMask) -> Results:
    """PyTorch's kernels, and a kernel of csrc or PyTorch's for the mask."""
    return *by_torch(as_grad(a)), drawn_bits(a.dropout, len(a.dy), a.cols)


quantize_grad_and_mask = define(
    Op(
        "quantize_grad_and_mask",
        GradAndMask,
        reference,
        fake,
        check,
        (
            Implementation("csrc", drawn_beside_by_csrc, why_not_drawn_beside),
            Implementation("csrc, mask apart", drawn_apart_by_csrc, why_not_drawn_apart),
            Implementation("torch", drawn_apart_by_torch),
        ),
    ),
    "(Tensor dy, Tensor lora_B, Tensor? s, Tensor(a3!)? state, SymInt column, bool delayed, float scaling,"
    " ScalarType fp8_dtype, Tensor slot, float p, SymInt site, SymInt cols, SymInt row0=0, SymInt col0=0,"
    " SymInt[]? rows=None, SymInt[]? ranks=None, SymInt[] chunks=[], bool? power_of_two=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
