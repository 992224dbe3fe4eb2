# SPDX-License-Identifier: Apache-2.0
"""What ops take, asked before anything is changed: TypeError or ValueError naming argument, found and expected."""

from __future__ import annotations

from collections.abc import Sequence

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


def side_by_side(
    dy: Tensor,
    lora_B: Tensor | None,
    s: Tensor | None,
    rows: Sequence[int] | None,
    ranks: Sequence[int] | None,
) -> None:
    """What `quantize_grad` takes of n projections, where there are `rows`; ValueError naming the argument otherwise."""
    if not rows and not ranks:
        return
    rows, ranks = list(rows or ()), list(ranks or ())
    if len(rows) != len(ranks):
        raise ValueError(f"rows and ranks must be of one length, found {rows} and {ranks}")
    if sum(rows) != dy.shape[1] or min(rows) < 0:
        raise ValueError(f"rows must sum to dy's {dy.shape[1]} columns, found {rows}")
    if lora_B is None:
        return
    if len({*ranks} - {0}) != 1 or min(ranks) < 0:
        raise ValueError(f"ranks must be one rank R > 0, or 0 without an adapter, found {ranks}")
    expected = {"lora_B": (lora_B, [dy.shape[1], max(ranks)]), "s": (s, [len(dy), sum(ranks)])}
    for name, (tensor, shape) in expected.items():
        if tensor is not None and list(tensor.shape) != shape:
            raise ValueError(
                f"{name} must be {shape} with rows {rows}, ranks {ranks}, found {list(tensor.shape)}"
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


def cross_entropy(logits: Tensor, labels: Tensor, factor: Tensor | None) -> None:
    """What `cross_entropy_` takes: floating logits [M, V], labels int64 [M], factor one fp32 or fp64 value."""
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [M, V] with V ≥ 1, found {tuple(logits.shape)}")
    if logits.dtype not in (*COMPUTE_DTYPES, torch.float64):
        raise TypeError(f"logits must be floating, found {logits.dtype}")
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be int64 [{logits.shape[0]}], found {labels.dtype} {list(labels.shape)}"
        )
    for name, tensor in (("labels", labels), ("factor", factor)):
        if tensor is not None and tensor.device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}, logits on {logits.device}")
    if factor is not None and (factor.numel() != 1 or factor.dtype.itemsize < 4):
        raise ValueError(
            f"factor must be one fp32 value, found {factor.dtype} {list(factor.shape)}"
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    fp8: bool,
    weight_scale_inv: Tensor | None,
) -> None:
    """What `linear_cross_entropy` takes; TypeError or ValueError naming the argument otherwise."""
    is_fp8 = weight.dtype == torch.float8_e4m3fn
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden [..., K] and weight [V, K], found {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be int64 {list(hidden.shape[:-1])}, hidden's leading dimensions, found {labels.dtype} "
            f"{list(labels.shape)}"
        )
    if hidden.dtype not in (*COMPUTE_DTYPES, torch.float64):
        raise TypeError(f"hidden must be floating, found {hidden.dtype}")
    if not fp8 and weight.dtype != hidden.dtype:
        hint = ": pass fp8=True and weight_scale_inv" if is_fp8 else ""
        raise TypeError(
            f"weight must have hidden's dtype {hidden.dtype}, found {weight.dtype}{hint}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != hidden.dtype):
        raise ValueError(
            f"bias must be {hidden.dtype} [{weight.shape[0]}], found {bias.dtype} {list(bias.shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias), ("labels", labels)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}")
    if (weight_scale_inv is not None) != (is_fp8 and fp8):
        raise ValueError(
            f"weight_scale_inv belongs to an e4m3 weight with fp8=True, found {weight_scale_inv!r} with fp8={fp8} "
            f"and a weight of {weight.dtype}"
        )
    trained = [
        n for n, t in (("weight", weight), ("bias", bias)) if t is not None and t.requires_grad
    ]
    if fp8 and trained:
        raise ValueError(f"fp8=True multiplies by a frozen head, found {trained} trained")
