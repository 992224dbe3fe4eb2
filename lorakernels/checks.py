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


def fp8_linear_lora(
    x: Tensor, weight: Tensor, weight_scale_inv: Tensor | None, residual: Tensor | None
) -> None:
    """weight_scale_inv [1] or [N], residual [M, N]; ValueError otherwise."""
    rows, cols = x.shape[0], weight.shape[0]
    if weight_scale_inv is not None and weight_scale_inv.shape not in ((1,), (cols,)):
        raise ValueError(
            f"weight_scale_inv must be [1] or [{cols}], found {list(weight_scale_inv.shape)}"
        )
    if residual is not None and residual.shape != (rows, cols):
        raise ValueError(f"residual must be {[rows, cols]}, found {list(residual.shape)}")


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
