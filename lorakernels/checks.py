# SPDX-License-Identifier: Apache-2.0
"""What ops take, asked before anything is changed: TypeError or ValueError naming argument, found and expected."""

from __future__ import annotations

import torch
from torch import Tensor

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float) -> None:
    """What `bias_dropout_add` takes, x of any leading dimensions; TypeError or ValueError naming the argument."""
    for name, tensor in (("x", x), ("bias", bias), ("residual", residual)):
        if tensor is None:
            continue
        if tensor.dtype not in COMPUTE_DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, found {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(
                f"{name} is on {tensor.device}, x on {x.device}; they must be the same"
            )
    if x.dim() == 0:
        raise ValueError("x must have shape [..., N], found a scalar")
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias must have shape [{x.shape[-1]}], found {tuple(bias.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"residual must have x's shape {tuple(x.shape)}, found {tuple(residual.shape)}"
        )
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p must be in [0, 1), found {p}")


def slot(slot: Tensor | None, device: torch.device) -> None:
    """A slot is int64 [2] on the tensors' device; ValueError otherwise."""
    if slot is None:
        return
    if slot.shape != (2,) or slot.dtype != torch.int64 or slot.device != device:
        raise ValueError(
            f"slot must be int64 [2] on {device}, found {slot.dtype} {list(slot.shape)} on {slot.device}"
        )


def dropped(dropped: Tensor | None, rows: int, words: int, device: torch.device) -> None:
    """A mask handed over is int32 [rows, words] without gaps on the tensors' device; ValueError otherwise."""
    if dropped is None:
        return
    shape = (rows, words)
    fits = dropped.shape == shape and dropped.dtype == torch.int32 and dropped.is_contiguous()
    if not fits or dropped.device != device:
        raise ValueError(
            f"dropped must be contiguous int32 {list(shape)} on {device}, found {dropped.dtype} "
            f"{list(dropped.shape)} with strides {dropped.stride()} on {dropped.device}"
        )


def fp8_states(forward: Tensor, backward: Tensor, current: Tensor | None) -> None:
    """What `amax_and_scale_update` takes; ValueError naming the argument otherwise."""
    named = [("forward", forward), ("backward", backward)]
    for name, state in named:
        if state.dim() != 2 or state.shape[0] < 2 or state.dtype != torch.float32:
            raise ValueError(
                f"{name} must be float32 [history length + 1, tensors] with a history of at least 1, "
                f"found {state.dtype} {tuple(state.shape)}"
            )
    if forward.shape != backward.shape:
        found = f"{tuple(forward.shape)} and {tuple(backward.shape)}"
        raise ValueError(f"forward and backward must have one shape, found {found}")
    if current is not None:
        named.append(("current", current))
        expected = 2 * forward.shape[1]
        if current.shape != (expected,) or current.dtype != torch.float32:
            raise ValueError(
                f"current must be float32 ({expected},), forward's amaxes and then backward's, "
                f"found {current.dtype} {tuple(current.shape)}"
            )
    for name, tensor in named:
        if tensor.device != forward.device:
            raise ValueError(f"{name} is on {tensor.device}, forward on {forward.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, found strides {tensor.stride()}")
