# SPDX-License-Identifier: Apache-2.0
"""The ops as `torch.ops.lorakernels.*`: schema, CPU (reference.py), CUDA (kernels/), fake.

The dispatcher is torch's; there is no second one. Gradients are composed in `autograd/`, which calls these ops;
differentiating through one of them directly raises torch's "no autograd formula" error instead of returning
nothing.

Integers and flags choose code, floats are run-time values; an FP8 state is passed whole, with the column to use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lorakernels import reference
from lorakernels.define import define as _define
from lorakernels.define import empty as _empty
from lorakernels.define import fake_quantized as _fake_quantized
from lorakernels.ops.flat_layer import (
    block_diagonal,
    block_diagonal_parts,
    rms_norm_backward,
    rms_norm_quantize,
    swiglu_quantize,
    swiglu_quantize_and_pack,
    swiglu_quantize_grad,
)

__all__ = [
    "block_diagonal",
    "block_diagonal_parts",
    "fp8_grad_input",
    "fp8_linear_lora",
    "lora_grad_a",
    "quantize_grad",
    "quantize_grad_and_mask",
    "rms_norm_backward",
    "rms_norm_quantize",
    "swiglu_quantize",
    "swiglu_quantize_and_pack",
    "swiglu_quantize_grad",
    "transpose_fp8",
]


@_define("fp8_linear_lora")
def fp8_linear_lora(  # type: ignore[no-untyped-def]
    x,
    x_scale_inv,
    weight,
    weight_scale_inv,
    bias,
    s,
    lora_B,
    scaling,
    out_dtype,
    split=False,
    residual=None,
):
    return _empty(x, x.shape[0], weight.shape[0], dtype=out_dtype)


def _fake_quantized_grad(
    dy: Tensor, lora_B: Tensor | None, s: Tensor | None, state: Tensor | None, rows: Any, ranks: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dy8, scale_inv = _fake_quantized(dy, state)
    rank = 0 if lora_B is None else sum(ranks) if rows else lora_B.shape[1]
    ds = _empty(dy, 0) if lora_B is None else _empty(dy, dy.shape[0], rank)
    dB = _empty(dy, 0) if lora_B is None or s is None else torch.empty_like(lora_B)
    return dy8, scale_inv, ds, dB


@_define("quantize_grad", mutates=("state",))
def quantize_grad(  # type: ignore[no-untyped-def]
    dy, lora_B, s, state, column, delayed, scaling, fp8_dtype, rows=None, ranks=None
):
    return _fake_quantized_grad(dy, lora_B, s, state, rows, ranks)


@_define("quantize_grad_and_mask", mutates=("state",))
def quantize_grad_and_mask(  # type: ignore[no-untyped-def]
    dy,
    lora_B,
    s,
    state,
    column,
    delayed,
    scaling,
    fp8_dtype,
    slot,
    p,
    site,
    cols,
    row0=0,
    col0=0,
    rows=None,
    ranks=None,
):
    words = reference.dropped_words(cols)
    dropped = _empty(dy, dy.shape[0], words, dtype=torch.int32)
    return *_fake_quantized_grad(dy, lora_B, s, state, rows, ranks), dropped


@_define("fp8_grad_input")
def fp8_grad_input(  # type: ignore[no-untyped-def]
    dy,
    dy_scale_inv,
    fp8_dtype,
    weight,
    weight_scale_inv,
    weight_t,
    ds,
    lora_A,
    slot,
    p,
    site,
    out_dtype,
    row0=0,
    col0=0,
    split=True,
    dropped=None,
):
    return _empty(dy, dy.shape[0], weight.shape[1], dtype=out_dtype)


@_define("lora_grad_a")
def lora_grad_a(  # type: ignore[no-untyped-def]
    ds, x, x_scale_inv, slot, p, site, out_dtype, row0=0, col0=0, dropped=None
):
    return _empty(ds, ds.shape[1], x.shape[1], dtype=out_dtype)


@_define("transpose_fp8")
def transpose_fp8(weight):  # type: ignore[no-untyped-def]
    return _empty(weight, weight.shape[1], weight.shape[0])
