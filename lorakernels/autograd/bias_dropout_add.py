# SPDX-License-Identifier: Apache-2.0
"""bias_dropout_add, which ends a transformer layer's attention and its MLP.

    out       = residual + mask ⊙ (x + bias) / (1 − p)
    dx        = mask ⊙ dout / (1 − p)        dbias = Σ_rows dx        dresidual = dout

Saved for backward: only the 16-byte slot, from which the mask is drawn again; neither the mask nor x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorakernels import ops
from lorakernels.numerics.dropout import dropout_threshold, drops
from lorakernels.ops.bias_dropout_add import check_operands
from lorakernels.state.philox import PhiloxState, PhiloxStates, draw_slot
from lorakernels.values import Dropout


class _BiasDropoutAdd(torch.autograd.Function):
    """Shapes are flattened inside the node. A view outside would alias gradients, and lose an in-place residual's."""

    @staticmethod
    def forward(
        ctx: Any,
        # If the written tensor is a view, autograd takes the first input for it: so residual comes first.
        residual: Tensor | None,
        x: Tensor,
        bias: Tensor | None,
        slot: Tensor | None,
        where: tuple[float, int, int, int],
        inplace: bool,
    ) -> Tensor:
        ctx.save_for_backward(slot)
        ctx.where = where
        ctx.bias_dtype = None if bias is None else bias.dtype
        rows = _rows(x)
        add = None if residual is None else _rows(residual)
        dropout = None if slot is None else Dropout(slot, *where)
        if not inplace:
            return ops.bias_dropout_add(rows, bias, add, dropout).view(x.shape)
        assert residual is not None and add is not None
        ctx.mark_dirty(residual)
        ops.bias_dropout_add_(rows, bias, add, dropout)
        return residual

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (slot,) = ctx.saved_tensors
        dropout = None if slot is None else Dropout(slot, *ctx.where)
        need_residual, need_x, need_bias = ctx.needs_input_grad[:3]
        dx, dbias = dout, None
        if need_bias or (need_x and drops(dropout)):
            bias_dtype = ctx.bias_dtype if need_bias else None
            dropped, dbias = ops.bias_dropout_add_backward(_rows(dout), dropout, bias_dtype)
            dx = dropped.view(dout.shape) if drops(dropout) else dout
        return (
            dout if need_residual else None,
            dx if need_x else None,
            dbias if need_bias else None,
            *[None] * 3,
        )


def _rows(x: Tensor) -> Tensor:
    """[..., N] → [M, N], contiguous."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()


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
        residual: of x's shape. It is cast to x's dtype; None adds nothing.
        p: probability to drop, in [0, 1). Kept elements are scaled by the inverse of their exact probability.
        training: False drops nothing.
        state: the state that the mask is drawn from. None follows torch.manual_seed (state/philox.py).
        site: stream of this dropout within a slot.
        row0, col0: row and column of x[0, 0] in the whole tensor, where x is a matrix of rows. Shards of a tensor that
            draw from one slot draw their parts of one mask.
        inplace: write the result over `residual` and return it. It must be contiguous, of x's dtype, and no leaf that
            requires grad.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        TypeError: a dtype is not fp32, bf16 or fp16.
        ValueError: p, site, row0, col0, a shape, a device or an in-place residual does not fit. Nothing is changed
            then.
        RuntimeError: `state` is a `PhiloxStates` outside of `fork`.
    """
    bias = _row(bias)
    _check(x, bias, residual, p, (site, row0, col0), inplace)
    slot = draw_slot(state, x.device) if training and dropout_threshold(p) > 0 else None
    if residual is not None:
        residual = residual.to(x.dtype)
    out: Tensor = _BiasDropoutAdd.apply(
        residual, x, bias, slot, (float(p), site, row0, col0), inplace
    )
    return out


def get_bias_dropout_add(
    training: bool,
    fused: bool = True,
    *,
    state: PhiloxState | PhiloxStates | None = None,
    site: int = 0,
) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Megatron-core's `get_bias_dropout_add`: a function of ((x, bias), residual, prob).

    `fused=False` computes the same, with the same masks, in separate operations.
    """

    def fused_form(
        x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float
    ) -> Tensor:
        return bias_dropout_add(*x_with_bias, residual, prob, training, state, site=site)

    def unfused_form(
        x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float
    ) -> Tensor:
        x, bias = x_with_bias[0], _row(x_with_bias[1])
        _check(x, bias, residual, prob, (site, 0, 0), False)
        dropout = None
        if training and dropout_threshold(prob) > 0:
            dropout = Dropout(draw_slot(state, x.device), prob, site)
        rows, add = _rows(x), _rows(residual.to(x.dtype))
        return ops.bias_dropout_add.by_reference(rows, bias, add, dropout).view(x.shape)

    return fused_form if fused else unfused_form


def _row(bias: Tensor | None) -> Tensor | None:
    """The bias [N] behind one that was expanded along leading dimensions. ValueError if it was not expanded."""
    if bias is None or bias.dim() < 2:
        return bias
    leading = list(zip(bias.shape, bias.stride(), strict=True))[:-1]
    if any(size > 1 and stride != 0 for size, stride in leading):
        raise ValueError(f"bias must be [N] or expanded from it, found {tuple(bias.shape)}")
    base = None if torch.compiler.is_compiling() else bias._base
    if base is not None and base.shape == bias.shape[-1:] and base.stride() == bias.stride()[-1:]:
        return base  # so no gradient of the expanded shape is needed
    return bias.sum(list(range(len(leading)))) if bias.numel() == 0 else bias[(0,) * len(leading)]


def _check(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    where: tuple[int, int, int],
    inplace: bool,
) -> None:
    check_operands(x, bias, residual, p)
    for name, value in zip(("site", "row0", "col0"), where, strict=True):
        if not 0 <= value < 2**32:
            raise ValueError(f"{name} must be in [0, 2**32), found {value}")
    _, row0, col0 = where
    if row0 + x.shape[:-1].numel() > 2**32 or col0 + x.shape[-1] > 2**32:
        raise ValueError(
            f"rows and columns must end below 2**32, found row0 = {row0}, col0 = {col0}, x {tuple(x.shape)}"
        )
    if not inplace:
        return
    if residual is None or residual.dtype != x.dtype or not residual.is_contiguous():
        form = None if residual is None else (residual.dtype, residual.stride())
        raise ValueError(
            f"inplace needs a contiguous residual of x's dtype {x.dtype}, found {form}"
        )
    if residual.is_leaf and residual.requires_grad and torch.is_grad_enabled():
        raise ValueError("inplace needs a residual that is no leaf requiring grad, found one")
