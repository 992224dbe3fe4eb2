# SPDX-License-Identifier: Apache-2.0
"""The ops as `torch.ops.lorakernels.*`: schema, CPU (reference.py), CUDA (kernels/), fake.

The dispatcher is torch's; there is no second one. Gradients are composed in `autograd/`, which calls these ops;
differentiating through one of them directly raises torch's "no autograd formula" error instead of returning
nothing.

Integers and flags choose code, floats are run-time values; an FP8 state is passed whole, with the column to use.
"""

from __future__ import annotations

from collections.abc import Callable
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
    rope_qkv_,
    rope_qkv_backward,
    swiglu_quantize,
    swiglu_quantize_and_pack,
    swiglu_quantize_grad,
)

__all__ = [
    "amax_and_scale_update",
    "bias_dropout_add",
    "bias_dropout_add_",
    "bias_dropout_add_backward",
    "block_diagonal",
    "block_diagonal_parts",
    "lora_grad_a",
    "quantize_grad",
    "quantize_grad_and_mask",
    "rms_norm_backward",
    "rms_norm_quantize",
    "rope_qkv_",
    "rope_qkv_backward",
    "swiglu_quantize",
    "swiglu_quantize_and_pack",
    "swiglu_quantize_grad",
]


def _not_in_recomputation(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An automatic (gated) update that a checkpoint's recomputation reaches, inside a backward, does nothing.

    Asked when the op runs: a compiled layer's trace does not know where it will be called.
    """

    def run(
        forward: Tensor,
        backward: Tensor,
        current: Tensor | None,
        gated: bool,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not gated or torch._C._current_graph_task_id() == -1:
            fn(forward, backward, current, gated, *args, **kwargs)

    return run


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


@_define("lora_grad_a")
def lora_grad_a(  # type: ignore[no-untyped-def]
    ds, x, x_scale_inv, slot, p, site, out_dtype, row0=0, col0=0, dropped=None
):
    return _empty(ds, ds.shape[1], x.shape[1], dtype=out_dtype)


@_define("amax_and_scale_update", mutates=("forward", "backward"), guard=_not_in_recomputation)
def amax_and_scale_update(  # type: ignore[no-untyped-def]
    forward, backward, current, gated, fp8_max_forward, fp8_max_backward, margin, most_recent
):
    return None


@_define("bias_dropout_add")
def bias_dropout_add(x, bias, residual, slot, p, site, row0=0, col0=0):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


@_define("bias_dropout_add_", mutates=("residual",))
def bias_dropout_add_(x, bias, residual, slot, p, site, row0=0, col0=0):  # type: ignore[no-untyped-def]
    return None


@_define("bias_dropout_add_backward")
def bias_dropout_add_backward(dout, slot, p, site, bias_dtype, row0=0, col0=0):  # type: ignore[no-untyped-def]
    dbias = _empty(
        dout, 0 if bias_dtype is None else dout.shape[1], dtype=bias_dtype or torch.float32
    )
    drops = slot is not None and reference.dropout_threshold(p) > 0
    return torch.empty_like(dout) if drops else _empty(dout, 0), dbias


@_define("cross_entropy_", mutates=("logits",))
def cross_entropy_(logits, labels, factor, ignore_index, gradient):  # type: ignore[no-untyped-def]
    return _empty(labels, *labels.shape, dtype=torch.promote_types(logits.dtype, torch.float32))
