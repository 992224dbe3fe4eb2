# SPDX-License-Identifier: Apache-2.0
"""LoRALinear's forward and backward, in evaluation order.

    forward    x8, s = quantize_lora_down(x, A)        y  = fp8_linear_lora(x8, W8, s, B, bias)
    backward   dy8, ds, dB = quantize_grad(dy, B, s)   dA = lora_grad_a(ds, x8)   dx = fp8_grad_input(dy8, W8, ds, A)

In forward, `quantize_lora_down` draws the dropout mask. In backward, `quantize_grad` draws it again for the other two
ops, if all three can (`hands_mask_over`). Otherwise each of those two draws it.

dy B is computed first: it is rank-sized, so no [N, K] product is ever formed. Backward may need x8 and its 4-byte
scale_inv (x itself over a plain base), s, and the 16-byte slot. Only what the wanted gradients need is saved.
Parameters are saved by reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorakernels import ops
from lorakernels.config import DelayedScaling
from lorakernels.numerics.fp8 import E4M3
from lorakernels.ops.hardware import FLOATS
from lorakernels.ops.quantize_grad import hands_mask_over
from lorakernels.values import Dropout, Scaled, Scaling, Up, Weight


@dataclass(frozen=True)
class LoRASpec:
    """What one call needs besides tensors.

    Attributes:
        scaling: factor of B A.
        p: dropout probability, in [0, 1).
        site: the layer's dropout stream.
        row0, col0: where x[0, 0] lies in the tensor that the mask is drawn for.
        column: the layer's column in its FP8State.
        delayed: whether the layer follows its FP8State. If not, each tensor is scaled by its own amax.
        backward_dtype: FP8 dtype of dy.
        split_fprop, split_dgrad: whether the FP8 GEMM for y, or for dx, adds partial sums in fp32.
    """

    scaling: float = 1.0
    p: float = 0.0
    site: int = 0
    row0: int = 0
    col0: int = 0
    column: int = 0
    delayed: bool = False
    backward_dtype: torch.dtype = torch.float8_e5m2
    split_fprop: bool = False
    split_dgrad: bool = True

    def following(self, recipe: DelayedScaling, column: int, delayed: bool) -> LoRASpec:
        """A copy for an FP8 base that follows `recipe`."""
        return replace(
            self,
            column=column,
            delayed=delayed,
            backward_dtype=recipe.backward_dtype,
            split_fprop=recipe.fp8_gemm_fprop.use_split_accumulator,
            split_dgrad=recipe.fp8_gemm_dgrad.use_split_accumulator,
        )

    def of_state(self, state: Tensor | None) -> Scaling | None:
        """This call's scale in one direction of an FP8 state; None over a plain base."""
        return None if state is None else Scaling(state, self.column, self.delayed)

    def dropout(self, slot: Tensor | None) -> Dropout | None:
        """The mask that `slot` draws for this call; None without a slot."""
        return None if slot is None else Dropout(slot, self.p, self.site, self.row0, self.col0)


class Call(NamedTuple):
    """A `LoRASpec` and the tensors that it refers to.

    Attributes:
        spec: scaling, dropout probability and which columns of the FP8 state to use.
        slot: int64 [2] random slot; None draws no mask (dropout off).
        state_x, state_dy: `FP8State.forward` and `.backward`; None over a plain base.
    """

    spec: LoRASpec
    slot: Tensor | None = None
    state_x: Tensor | None = None
    state_dy: Tensor | None = None

    @property
    def scaling_x(self) -> Scaling | None:
        return self.spec.of_state(self.state_x)

    @property
    def dropout(self) -> Dropout | None:
        return self.spec.dropout(self.slot)


class Adapter(NamedTuple):
    """A [R, K], B [N, R], and s = D(x) Aᵀ [M, R] where it has been computed; all None without an adapter."""

    A: Tensor | None = None
    B: Tensor | None = None
    s: Tensor | None = None


class Needs(NamedTuple):
    """Which gradients to compute. `ds` is the gradient of an s that was computed outside of this node."""

    x: bool
    A: bool
    B: bool
    bias: bool
    ds: bool = False


def save_for_gradients(
    ctx: Any,
    needs: Needs,
    x: Scaled,
    weight: Weight,
    bias: Tensor | None,
    adapter: Adapter,
    call: Call,
) -> None:
    """Keep what `gradients` reads."""
    lora_A, lora_B, s = adapter
    ctx.save_for_backward(
        weight.data if needs.x else None,
        weight.scale_inv if needs.x else None,
        weight.t if needs.x else None,
        lora_A if needs.x else None,
        lora_B if needs.x or needs.A or needs.B or needs.ds else None,
        call.slot if needs.x or needs.A else None,
        x.data if needs.A else None,
        x.scale_inv if needs.A else None,
        s if needs.B else None,
    )
    ctx.state_dy, ctx.spec = call.state_dy, call.spec
    ctx.dtypes = tuple(None if t is None else t.dtype for t in (lora_A, bias))


def through_dispatcher(op: Any, *arguments: Any) -> Any:
    return op(*arguments)


def gradients(
    ctx: Any, needs: Needs, dy: Tensor, run: Callable[..., Any] = through_dispatcher
) -> tuple[Tensor | None, ...]:
    """(dx [M, K], dA, dB, dbias, ds) from a contiguous dy [M, N]; None for what is not needed.

    `run(op, *arguments)` calls an op.
    """
    weight, w_scale_inv, weight_t, lora_A, lora_B, slot, x8, x_scale_inv, s = ctx.saved_tensors
    spec: LoRASpec = ctx.spec
    scaling, dropout = spec.of_state(ctx.state_dy), spec.dropout(slot)
    up = None if lora_B is None else Up(lora_B, s, spec.scaling)
    frozen = Weight(weight, w_scale_inv, weight_t)
    dx = dA = dbias = None
    if needs.A and needs.x and up is not None and hands_mask_over(dy, up, dropout, frozen):
        dy8, dy_scale_inv, ds, dB, dropped = run(
            ops.quantize_grad_and_mask,
            dy,
            up,
            scaling,
            spec.backward_dtype,
            dropout,
            weight.shape[1],
        )
        assert dropout is not None
        dropout = dropout._replace(dropped=dropped)
    else:
        dy8, dy_scale_inv, ds, dB = run(ops.quantize_grad, dy, up, scaling, spec.backward_dtype)
    if needs.A:
        dA = run(ops.lora_grad_a, ds, Scaled(x8, x_scale_inv), dropout, ctx.dtypes[0])
    if needs.x:
        dx = run(
            ops.fp8_grad_input,
            Scaled(dy) if scaling is None else Scaled(dy8, dy_scale_inv),
            spec.backward_dtype,
            frozen,
            ds if lora_A is not None else None,
            lora_A,
            dropout,
            dy.dtype,
            spec.split_dgrad,
        )
    if needs.bias:
        dbias = dy.float().sum(0).to(ctx.dtypes[1])
    return dx, dA, dB if needs.B else None, dbias, ds if needs.ds else None


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        lora_A: Tensor | None,
        lora_B: Tensor | None,
        weight: Weight,
        call: Call,
    ) -> Tensor:
        x8, x_scale_inv, s = ops.quantize_lora_down(x, lora_A, call.scaling_x, call.dropout)
        operand = Scaled(x) if call.state_x is None else Scaled(x8, x_scale_inv)
        spec = call.spec
        up = None if lora_A is None or lora_B is None else Up(lora_B, s, spec.scaling)
        y = ops.fp8_linear_lora(operand, weight, bias, up, x.dtype, spec.split_fprop)
        adapter = Adapter(lora_A, lora_B, s)
        save_for_gradients(ctx, _needs(ctx), operand, weight, bias, adapter, call)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dA, dB, dbias, _ = gradients(ctx, _needs(ctx), dy.contiguous())
        return dx, dbias, dA, dB, None, None


def _needs(ctx: Any) -> Needs:
    x, bias, lora_A, lora_B = ctx.needs_input_grad[:4]
    return Needs(x, lora_A, lora_B, bias)


def check_input(x: Tensor, weight: Tensor) -> None:
    """Refuse an x that `lora_linear` cannot take: TypeError for its dtype, ValueError for shape or device."""
    if x.dtype not in FLOATS:
        is_fp8 = x.is_floating_point() and x.element_size() == 1
        cause = "; is it cast to an FP8 layer's weight.dtype?" if is_fp8 else ""
        raise TypeError(f"x must be float32, bfloat16 or float16, found {x.dtype}{cause}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must have shape [..., {weight.shape[1]}], found {tuple(x.shape)}")
    if x.device != weight.device:
        raise ValueError(
            f"x is on {x.device}, the weight on {weight.device}; they must be the same"
        )


def lora_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, adapter: Adapter, call: Call
) -> Tensor:
    """y = x Wᵀ + bias + scaling · D(x) Aᵀ Bᵀ, differentiable in x, bias, A and B; W is frozen.

    Args:
        x: [..., K] fp32, bf16 or fp16, any strides; under autocast it is cast to the autocast dtype first.
        weight: [N, K], e4m3 (or its bytes, uint8) with a scale_inv [1], or of a plain dtype without.
        bias: [N] or None.
        adapter: A and B, fp32, bf16 or fp16; both or neither.
        call: the numbers of this call, its random slot and its FP8 state.

    Returns:
        [..., N] in x's dtype (the autocast dtype under autocast).

    Raises:
        TypeError: x is not fp32, bf16 or fp16.
        ValueError: x's last dimension is not K, or x and W are on two devices.
    """
    check_input(x, weight.data)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = _LoRALinear.apply(rows, bias, adapter.A, adapter.B, in_bytes(weight), call)
    return y.view(*x.shape[:-1], weight.data.shape[0])


def in_bytes(weight: Weight) -> Weight:
    """`weight`, with e4m3 data viewed as uint8, which the ops take."""
    if weight.data.dtype == E4M3:
        return weight._replace(data=weight.data.view(torch.uint8))
    return weight
