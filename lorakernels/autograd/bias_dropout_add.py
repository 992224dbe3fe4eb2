# SPDX-License-Identifier: Apache-2.0
"""bias_dropout_add: what a transformer layer does after attention and after its MLP.

    out       = residual + mask ⊙ (x + bias) / (1 − p)
    dx        = mask ⊙ dout / (1 − p)        dbias = Σ_rows dx        dresidual = dout

Saved for backward: the 16-byte slot that the mask is drawn from again; never a mask, never x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorakernels import ops, reference
from lorakernels.autograd.lora_linear import COMPUTE_DTYPES
from lorakernels.philox import PhiloxState, PhiloxStates, draw_slot


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor
        | None,  # first: where it is a view, autograd takes the first input for the one written
        x: Tensor,
        bias: Tensor | None,
        slot: Tensor | None,
        p: float,
        site: int,
        row0: int,
        col0: int,
        inplace: bool,
    ) -> Tensor:
        ctx.save_for_backward(slot)
        ctx.where = (p, site), (row0, col0)
        ctx.bias_dtype = None if bias is None else bias.dtype
        if inplace:
            assert residual is not None
            ctx.mark_dirty(residual)
            ops.bias_dropout_add_(x, bias, residual, slot, p, site, row0, col0)
            return residual
        return ops.bias_dropout_add(x, bias, residual, slot, p, site, row0, col0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (slot,) = ctx.saved_tensors
        (p, site), origin = ctx.where
        need_residual, need_x, need_bias = ctx.needs_input_grad[:3]
        drops = slot is not None and reference.dropout_threshold(p) > 0
        dx, dbias = dout, None
        if need_bias or (need_x and drops):
            bias_dtype = ctx.bias_dtype if need_bias else None
            dx, dbias = ops.bias_dropout_add_backward(
                dout.contiguous(), slot, p, site, bias_dtype, *origin
            )
        return (
            dout if need_residual else None,
            (dx if drops else dout) if need_x else None,
            dbias if need_bias else None,
            *[None] * 6,
        )


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    training: bool = True,
    state: PhiloxState | PhiloxStates | None = None,
    *,
    site: int = 0,
    row0: int = 0,
    col0: int = 0,
    inplace: bool = False,
) -> Tensor:
    """residual + dropout(x + bias), differentiable in all three.

    Args:
        x: [..., N] fp32, bf16 or fp16.
        bias: [N], or expanded to x's shape as Megatron passes it; None adds nothing.
        residual: of x's shape, cast to x's dtype where it has another; None adds nothing.
        p: probability to drop, in [0, 1); survivors are scaled by the inverse of their exact probability.
        training: False drops nothing.
        state: where the mask is drawn from; None follows torch.manual_seed (philox.py).
        site: stream of this dropout within a slot.
        row0, col0: where x[0, 0], as a matrix of rows, lies in the whole tensor: shards of a tensor that draw from
            one slot draw their parts of one mask.
        inplace: write the result over `residual`, which must be contiguous and of x's dtype, and return it.

    Returns:
        x's shape and dtype.

    Raises:
        TypeError: a dtype is none of the three.
        ValueError: p, a shape, a device or an in-place residual does not fit. Nothing is changed then.
    """
    bias = _row(bias)
    _check(x, bias, residual, p, row0, col0, inplace)
    slot = None
    if training and reference.dropout_threshold(p) > 0:
        slot = draw_slot(state, x.device)
    shape = (x.shape[:-1].numel(), x.shape[-1])
    rows = x.reshape(shape).contiguous()
    add = None if residual is None else residual.to(x.dtype).reshape(shape).contiguous()
    out = _BiasDropoutAdd.apply(add, rows, bias, slot, p, site, row0, col0, inplace)
    if inplace:
        assert residual is not None
        return residual
    return out.view(x.shape)


def get_bias_dropout_add(
    training: bool,
    fused: bool = True,
    *,
    state: PhiloxState | PhiloxStates | None = None,
    site: int = 0,
) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Megatron-core's `get_bias_dropout_add`: a function of ((x, bias), residual, prob).

    `fused=False` composes the same result, with the same masks, of PyTorch's operations.
    """

    def fused_form(
        x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float
    ) -> Tensor:
        return bias_dropout_add(*x_with_bias, residual, prob, training, state, site=site)

    def unfused_form(
        x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float
    ) -> Tensor:
        x, bias = x_with_bias
        _check(x, _row(bias), residual, prob, 0, 0, False)
        drops = training and reference.dropout_threshold(prob) > 0
        slot = draw_slot(state, x.device) if drops else None
        shape = (x.shape[:-1].numel(), x.shape[-1])
        rows, add = x.reshape(shape), residual.to(x.dtype).reshape(shape)
        return reference.bias_dropout_add(rows, _row(bias), add, slot, prob, site).view(x.shape)

    return fused_form if fused else unfused_form


def _row(bias: Tensor | None) -> Tensor | None:
    """[N] of a bias that was expanded along its leading dimensions."""
    if bias is None or bias.dim() < 2:
        return bias
    leading = list(zip(bias.shape, bias.stride(), strict=True))[:-1]
    if any(size != 1 and stride != 0 for size, stride in leading):
        raise ValueError(f"bias must be [N] or expanded from it, found {tuple(bias.shape)}")
    return bias[(0,) * len(leading)]


def _check(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    row0: int,
    col0: int,
    inplace: bool,
) -> None:
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
    for name, origin in (("row0", row0), ("col0", col0)):
        if not 0 <= origin < 2**32:
            raise ValueError(f"{name} must be in [0, 2**32), found {origin}")
    if inplace and (residual is None or residual.dtype != x.dtype or not residual.is_contiguous()):
        found = residual if residual is None else (residual.dtype, residual.stride())
        raise ValueError(
            f"inplace needs a contiguous residual of x's dtype {x.dtype}, found {found}"
        )
