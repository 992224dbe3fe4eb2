# SPDX-License-Identifier: Apache-2.0
"""LoRALinear's forward and backward, in evaluation order.

    forward    x8, s = quantize_lora_down(x, A)        y  = fp8_linear_lora(x8, W8, s, B, bias)
    backward   dy8, ds, dB = quantize_grad(dy, B, s)   dA = lora_grad_a(ds, x8)   dx = fp8_grad_input(dy8, W8, ds, A)

Forward draws the dropout mask in `quantize_lora_down`; in backward `quantize_grad` draws it again, for both others.

`dy B` first: it is rank-sized, so no [N, K] product is ever formed. Saved for backward: x8 and its 4-byte scale_inv
(x itself when the base is not FP8), s, and the 16-byte slot; only what the gradients asked for need. The parameters are
saved by reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorakernels import checks, ops, reference
from lorakernels.config import DelayedScaling
from lorakernels.device import capability_of
from lorakernels.kernels import ladder


@dataclass(frozen=True)
class LoRASpec:
    """What one call needs besides tensors.

    `column` is the layer's place in its FP8State, and `delayed` whether it follows it (else each tensor is scaled
    by its own amax); `site` is its dropout stream, and x[0, 0] lies at (row0, col0) of the tensor that the mask is
    drawn for. `split_fprop` and `split_dgrad` have the FP8 GEMMs add partial sums in fp32.
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
        """The same over an FP8 base that follows `recipe`."""
        return replace(
            self,
            column=column,
            delayed=delayed,
            backward_dtype=recipe.backward_dtype,
            split_fprop=recipe.fp8_gemm_fprop.use_split_accumulator,
            split_dgrad=recipe.fp8_gemm_dgrad.use_split_accumulator,
        )


class Needs(NamedTuple):
    """Which gradients to compute; `ds` is that of an s which others made."""

    x: bool
    A: bool
    B: bool
    bias: bool
    ds: bool = False


def save_for_gradients(
    ctx: Any,
    needs: Needs,
    x8: Tensor,
    x_scale_inv: Tensor | None,
    weight: Tensor,
    weight_scale_inv: Tensor | None,
    weight_t: Tensor | None,
    bias: Tensor | None,
    lora_A: Tensor | None,
    lora_B: Tensor | None,
    s: Tensor | None,
    slot: Tensor | None,
    state_dy: Tensor | None,
    spec: LoRASpec,
) -> None:
    """Keep what `gradients` reads. Over a plain base x8 is x and `x_scale_inv` None."""
    ctx.save_for_backward(
        weight if needs.x else None,
        weight_scale_inv if needs.x else None,
        weight_t if needs.x else None,
        lora_A if needs.x else None,
        lora_B if needs.x or needs.A or needs.B or needs.ds else None,
        slot if needs.x or needs.A else None,
        x8 if needs.A else None,
        x_scale_inv if needs.A else None,
        s if needs.B else None,
    )
    ctx.state_dy, ctx.spec = state_dy, spec
    ctx.dtypes = tuple(None if t is None else t.dtype for t in (lora_A, bias))


def gradients(ctx: Any, needs: Needs, dy: Tensor, via: Any = ops) -> tuple[Tensor | None, ...]:
    """(dx [M, K], dA, dB, dbias, ds) from a contiguous dy [M, N]; None for what is not needed.

    `via` has the ops, or their implementations on dy's device.
    """
    weight, w_scale_inv, weight_t, lora_A, lora_B, slot, x8, x_scale_inv, s = ctx.saved_tensors
    spec, state_dy = ctx.spec, ctx.state_dy
    dx = dA = dbias = dropped = None
    place = (spec.row0, spec.col0)
    arguments = (
        dy,
        lora_B,
        s,
        state_dy,
        spec.column,
        spec.delayed,
        spec.scaling,
        spec.backward_dtype,
    )
    if (
        needs.A
        and needs.x
        and draws_mask(dy, lora_B, s, lora_A, x_scale_inv, slot, spec.p, weight, spec.col0)
    ):
        mask = (slot, spec.p, spec.site, weight.shape[1], *place)
        dy8, dy_scale_inv, ds, dB, dropped = via.quantize_grad_and_mask(*arguments, *mask)
    else:
        dy8, dy_scale_inv, ds, dB = via.quantize_grad(*arguments)
    if needs.A:
        source = (x8, x_scale_inv, slot, spec.p, spec.site)
        dA = via.lora_grad_a(ds, *source, ctx.dtypes[0], *place, dropped)
    if needs.x:
        quantized = state_dy is not None
        dx = via.fp8_grad_input(
            dy8 if quantized else dy,
            dy_scale_inv if quantized else None,
            spec.backward_dtype,
            weight,
            w_scale_inv,
            weight_t,
            ds if lora_A is not None else None,
            lora_A,
            slot,
            spec.p,
            spec.site,
            dy.dtype,
            *place,
            spec.split_dgrad,
            dropped,
        )
    if needs.bias:
        dbias = dy.float().sum(0).to(ctx.dtypes[1])
    return dx, dA, dB if needs.B else None, dbias, ds if needs.ds else None


def draws_mask(
    dy: Tensor,
    lora_B: Tensor,
    s: Tensor | None,
    lora_A: Tensor,
    scale_inv: Tensor | None,
    slot: Tensor | None,
    p: float,
    weight: Tensor,
    col0: int = 0,
    rows: Sequence[int] | None = None,
) -> bool:
    """Whether `quantize_grad` draws the mask for `lora_grad_a` and `fp8_grad_input`, a bit an element for the length of
    one backward: over an FP8 base (`scale_inv`), where all three are kernels that can. A trace asks the dtypes and
    ranks only: on a GPU without these kernels its mask is drawn once more, and dA and dx are the same."""
    if scale_inv is None or slot is None or not dy.is_cuda or dy.dtype == torch.float32:
        return False
    if reference.dropout_threshold(p) == 0 or lora_A.shape[0] > ladder.GRAD_A_RANK or col0 % 8:
        return False
    if torch.compiler.is_compiling():
        return True
    readable = ladder.can_hand_mask_over(capability_of(dy.device), *weight.shape)
    return readable and not ladder.why_not_one_pass(dy, lora_B, s, rows)


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_scale_inv: Tensor | None,
        weight_t: Tensor | None,
        bias: Tensor | None,
        lora_A: Tensor | None,
        lora_B: Tensor | None,
        slot: Tensor | None,
        state_x: Tensor | None,
        state_dy: Tensor | None,
        spec: LoRASpec,
    ) -> Tensor:
        x8, x_scale_inv, s = ops.quantize_lora_down(
            x,
            lora_A,
            state_x,
            spec.column,
            spec.delayed,
            slot,
            spec.p,
            spec.site,
            spec.row0,
            spec.col0,
        )
        if state_x is None:
            x8, x_scale_inv = x, None
        y = ops.fp8_linear_lora(
            x8,
            x_scale_inv,
            weight,
            weight_scale_inv,
            bias,
            s if lora_A is not None else None,
            lora_B,
            spec.scaling,
            x.dtype,
            spec.split_fprop,
        )
        needs = _needs(ctx)
        base = (x8, x_scale_inv, weight, weight_scale_inv, weight_t, bias)
        save_for_gradients(ctx, needs, *base, lora_A, lora_B, s, slot, state_dy, spec)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dA, dB, dbias, _ = gradients(ctx, _needs(ctx), dy.contiguous())
        return dx, None, None, None, dbias, dA, dB, None, None, None, None


def _needs(ctx: Any) -> Needs:
    return Needs(*(ctx.needs_input_grad[i] for i in (0, 5, 6, 4)))


def check_input(x: Tensor, weight: Tensor) -> None:
    """Refuse an x that `lora_linear` cannot take: TypeError for its dtype, ValueError for shape or device."""
    if x.dtype not in checks.COMPUTE_DTYPES:
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
    x: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor | None = None,
    bias: Tensor | None = None,
    lora_A: Tensor | None = None,
    lora_B: Tensor | None = None,
    *,
    spec: LoRASpec,
    slot: Tensor | None = None,
    weight_t: Tensor | None = None,
    state_x: Tensor | None = None,
    state_dy: Tensor | None = None,
) -> Tensor:
    """y = x Wᵀ + bias + scaling · D(x) Aᵀ Bᵀ, differentiable in x, bias, A and B; W is frozen.

    Args:
        x: [..., K] fp32, bf16 or fp16, any strides; under autocast it is cast to the autocast dtype first.
        weight: [N, K], e4m3 (or its bytes, uint8) with `weight_scale_inv` fp32 [1], or a plain dtype without.
        bias: [N] or None.
        lora_A, lora_B: [R, K] and [N, R], fp32, bf16 or fp16; both or neither.
        spec: scaling, dropout probability and which columns of the FP8 state to use.
        slot: int64 [2] random slot; None draws no mask (dropout off).
        weight_t: [K, N] second copy of an FP8 weight's bytes, or None.
        state_x, state_dy: `FP8State.forward` and `.backward`; None with a plain weight.

    Returns:
        [..., N] in x's dtype (the autocast dtype under autocast).

    Raises:
        TypeError: x is not fp32, bf16 or fp16.
        ValueError: x's last dimension is not K.
    """
    check_input(x, weight)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if weight.dtype == torch.float8_e4m3fn:
        weight = weight.view(torch.uint8)
    y = _LoRALinear.apply(
        rows,
        weight,
        weight_scale_inv,
        weight_t,
        bias,
        lora_A,
        lora_B,
        slot,
        state_x,
        state_dy,
        spec,
    )
    return y.view(*x.shape[:-1], weight.shape[0])
