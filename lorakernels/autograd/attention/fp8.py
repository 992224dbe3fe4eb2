# SPDX-License-Identifier: Apache-2.0
"""Causal attention over rows, FP8 forward by cuDNN and 16-bit backward (numerics/fp8_attention.py has the formulas).

Kept for backward: one byte for each element of q, k, v and out, stats and a few factors. The projection behind
attention reads out's bytes for its own backward, so that they are kept once.

Backward is cuDNN's of 16 bits, over the values of these bytes. cuDNN's FP8 backward is slower on Hopper
for long rows of many heads (docs/facts.md, P14: 120.7 ms for 82.8, 1×32768 tokens of 64 / 8 heads × 128, one H200).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.autograd.attention import graphed
from lorakernels.kernels.cudnn import attention as kernel
from lorakernels.kernels.cudnn import form as described
from lorakernels.kernels.triton import quantize_heads as on_gpu
from lorakernels.numerics import fp8_attention as plain
from lorakernels.numerics.fp8 import E4M3
from lorakernels.recorded.once import once_differentiable
from lorakernels.values import Scaled

WIDTH = 128  # D. With 64 its forward takes 0.075 ms, and bf16's 0.040 (1×1024 tokens, 32 / 8 heads, one H200)
# Tokens of a row. How many times as fast as bf16, forward and backward, on one H200 (docs/attention.md):
# 1.00 to 1.01 at 4096, 1.03 (32 / 8 heads) and 1.06 (64 / 8) at 8192, 1.10 at 16384.
LEAST = 8192
PACKED = (
    "cuDNN's FP8 takes no packed sequences on Hopper: take rows that are causal as a whole (finetune: "
    "--no-isolate-documents)"
)


class AttendedRows(NamedTuple):
    """The result of attention.

    Attributes:
        out: [B, H, T, D].
        bytes_: the same in e4m3, uint8 [B T, H D] with a scale_inv fp32 [1]. `out` has their value.
    """

    out: Tensor
    bytes_: Scaled


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why cuDNN's FP8 does not take these tensors, causal rows without a mask; "" if it does.

    Args:
        q: [B, H, T, D].
        k, v: [B, Hk, T, D].
    """
    if why := why_not_here(q.device, q.shape[3]):
        return why
    if q.shape[2] < LEAST:
        return (
            f"rows have {q.shape[2]} tokens, and FP8 is faster from {LEAST} on: forward and backward were 0.94 × as "
            "fast as in bf16 at 2048 tokens, 1.00 × at 4096, 1.03 to 1.06 × at 8192, 1.10 × at 16384"
        )
    if any(x.stride(3) != 1 for x in (q, k, v)):
        return "columns of q, k or v do not follow each other in memory"
    return graphed.why_not_copies(q, k, v)


def why_not_here(device: torch.device, width: int) -> str:
    """Why this machine has no FP8 attention for heads of `width` columns on `device`, "" if it has."""
    if width != WIDTH:
        return f"heads have {width} columns, and FP8 is faster with {WIDTH} alone"
    return graphed.why_not_here(device) or _why_not_package()


def _why_not_package() -> str:
    package = str(described.frontend().__version__)
    if package.startswith(described.FP8_TRIED):
        return ""
    return f"nvidia-cudnn-frontend {package} was not tried with FP8: take {described.FP8_TRIED}0"


def attend_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> AttendedRows:
    """Each token attends to its row up to itself. The tensors are such that `why_not` is "".

    out is NaN where one of q, k and v holds inf or NaN: e4m3 has no inf.

    Args:
        q: [B, H, T, D], bf16 or fp16.
        k, v: [B, Hk, T, D].
        scale: the factor of q kᵀ.

    Raises:
        RuntimeError: the stream is captured, and cuDNN has not run with these shapes before.
    """
    out, o8, scale_inv = _FP8Attention.apply(q, k, v, scale)
    return AttendedRows(out, Scaled(o8.flatten(2).flatten(0, 1), scale_inv))


def _form(q: Tensor, kv_heads: int, scale: float, dtype: torch.dtype) -> described.Form:
    """The form for q, k and v that are columns of one matrix [B T, (H + 2 Hk) D]."""
    batch, heads, tokens, dim = q.shape
    row = (heads + 2 * kv_heads) * dim
    strides = ((tokens * row, dim, row),) * 3
    exact = torch.are_deterministic_algorithms_enabled()
    return described.Form(
        batch, tokens, 0, heads, kv_heads, dim, strides, dtype, scale, exact and dtype != E4M3
    )


def _numbers(x: Tensor) -> Any:
    """The module that quantizes and dequantizes: kernels on a GPU, torch elsewhere."""
    return on_gpu if x.is_cuda else plain


class _FP8Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        form, numbers = _form(q, k.shape[1], scale, E4M3), _numbers(q)
        if q.is_cuda:
            kernel.prepare(form, q.device)
        data, factors = numbers.quantize_heads(q, k, v)
        o8, stats = kernel.forward_fp8(form, data, factors)
        out: Tensor = numbers.dequantize_out(o8, factors, q.dtype)
        scale_inv = factors[plain.OF_OUT, :1]
        ctx.save_for_backward(data, factors, o8, stats)
        ctx.form = _form(q, k.shape[1], scale, q.dtype)
        ctx.mark_non_differentiable(o8, scale_inv)
        return out.transpose(1, 2), o8, scale_inv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        data, factors, o8, stats = ctx.saved_tensors
        form, numbers = ctx.form, _numbers(data)
        q, k, v = numbers.dequantize_heads(data, factors, form.heads, form.dtype)
        out = numbers.dequantize_out(o8, factors, form.dtype)
        dout = dout.transpose(1, 2).contiguous()
        if dout.data_ptr() % graphed.ALIGNED:
            dout = dout.clone()
        grads = kernel.backward(form, (q, k, v, out, stats), dout, None)
        return (*(g.transpose(1, 2) for g in grads), None)
