# SPDX-License-Identifier: Apache-2.0
"""out = residual + mask ⊙ (x + bias) / (1 − p) on CUDA, in one pass (csrc/ops/bias_dropout_add).

x, residual, out, dout, dx [M, N] of one dtype (fp32, bf16, fp16), bias [N], slot int64 [2]. Forward reads x and
residual once and writes out: 6MN bytes in bf16. Backward draws the mask again and reads dout, writes dx: 4MN bytes;
dbias is summed on the way in an order that depends on shape and GPU alone. fp32 arithmetic, one rounding at the store.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import checks, reference, reference_layer
from lorakernels.device import capability_of, extension, multiprocessors_of, why_not_csrc
from lorakernels.kernels.pointers import address, name, stream


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    slot: Tensor | None,
    p: float,
    site: int,
    row0: int = 0,
    col0: int = 0,
) -> Tensor:
    """`reference_layer.bias_dropout_add`, bit for bit."""
    if why_not_csrc(capability_of(x.device)):
        return reference_layer.bias_dropout_add(x, bias, residual, slot, p, site, row0, col0)
    out = torch.empty_like(x)
    _launch(out, x, bias, residual, slot, p, site, row0, col0)
    return out


def bias_dropout_add_(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    slot: Tensor | None,
    p: float,
    site: int,
    row0: int = 0,
    col0: int = 0,
) -> None:
    """`reference_layer.bias_dropout_add_`: the same, written over `residual`."""
    if why_not_csrc(capability_of(x.device)):
        return reference_layer.bias_dropout_add_(x, bias, residual, slot, p, site, row0, col0)
    _launch(residual, x, bias, residual, slot, p, site, row0, col0)


def bias_dropout_add_backward(
    dout: Tensor,
    slot: Tensor | None,
    p: float,
    site: int,
    bias_dtype: torch.dtype | None,
    row0: int = 0,
    col0: int = 0,
) -> tuple[Tensor, Tensor]:
    """`reference_layer.bias_dropout_add_backward`; dbias in another, fixed order."""
    if why_not_csrc(capability_of(dout.device)):
        return reference_layer.bias_dropout_add_backward(
            dout, slot, p, site, bias_dtype, row0, col0
        )
    _check(dout, slot)
    rows, cols = dout.shape
    drops = slot is not None and reference.dropout_threshold(p) > 0
    dx = torch.empty_like(dout) if drops else dout.new_empty(0)
    if bias_dtype is None:
        dbias = partial = torch.empty(0, device=dout.device)
    else:
        dbias = torch.empty(cols, dtype=_bias_dtype(bias_dtype, dout.dtype), device=dout.device)
        multiprocessors = multiprocessors_of(dout.get_device())
        chunks = extension().bias_grad_chunks(rows, cols, multiprocessors, col0)
        partial = torch.empty(chunks, cols, device=dout.device)
    if drops or bias_dtype is not None:
        extension().bias_dropout_add_backward(
            address(dx),
            address(dbias),
            address(partial),
            address(dout),
            rows,
            cols,
            name(dout.dtype),
            name(dbias.dtype),
            *_dropout(slot, p, site, row0, col0),
            stream(dout.device),
            dout.get_device(),
        )
    return dx, dbias if bias_dtype is None else dbias.to(bias_dtype)


def _launch(
    out: Tensor,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    slot: Tensor | None,
    p: float,
    site: int,
    row0: int,
    col0: int,
) -> None:
    checks.bias_dropout_add(x, bias, residual, p)
    _check(x, slot, residual=residual)
    if bias is not None:
        bias = bias.to(_bias_dtype(bias.dtype, x.dtype)).contiguous()
    extension().bias_dropout_add(
        address(out),
        address(x),
        address(bias),
        address(residual),
        *x.shape,
        name(x.dtype),
        name(x.dtype if bias is None else bias.dtype),
        *_dropout(slot, p, site, row0, col0),
        stream(x.device),
        x.get_device(),
    )


def _dropout(
    slot: Tensor | None, p: float, site: int, row0: int, col0: int
) -> tuple[int, int, int, int, int]:
    threshold = 0 if slot is None else reference.dropout_threshold(p)
    return address(slot), site, threshold, row0, col0


def _bias_dtype(dtype: torch.dtype, x_dtype: torch.dtype) -> torch.dtype:
    """What the kernel reads and writes a bias of `dtype` in: x's dtype or fp32."""
    return dtype if dtype == x_dtype else torch.float32


def _check(x: Tensor, slot: Tensor | None, **tensors: Tensor | None) -> None:
    """What the kernels assume beyond checks.bias_dropout_add: [M, N] of one dtype, without gaps."""
    checks.slot(slot, x.device)
    if x.dim() != 2:
        raise ValueError(f"x must be [M, N], found {tuple(x.shape)}")
    for what, tensor in (("x", x), *tensors.items()):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise TypeError(f"{what} must have x's dtype {x.dtype}, found {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{what} must be contiguous, found strides {tensor.stride()}")
