# SPDX-License-Identifier: Apache-2.0
"""n ≥ 1 projections of one x with their adapters: the functions that every node with a linear layer runs.

    W = [W_1; …; W_n] [ΣN, K]      A = [A_1; …; A_n] [ΣR, K]      B = diag(B_1, …, B_n) [ΣN, ΣR]

    forward    x8, s = quantize_lora_down(x, A)                    │  y = fp8_linear_lora(x8, W8, s, B, bias)  │
    backward   dy8, ds, dB = quantize_grad(dy, B, s)
               dA = lora_grad_a(ds, x8)                            │  dx = fp8_grad_input(dy8, W8, ds, A)      │

The bars are the places for communication between ranks, before and after each GEMM. Layers that are split over ranks
communicate there (parallel/tensor/projections.py). `project` alone multiplies by W in forward, and `grad_x` in
backward; rows.py has them for some rows. Their arguments are sent before the GEMM, and their results after it.

`quantize_lora_down` draws the dropout mask. In backward, `quantize_grad` draws it again for the other two ops, if all
three can (`hands_mask_over`). Otherwise each of those two draws it. Over ranks a kernel of its own draws it for both.
dy B is computed first: it is rank-sized, so no [N, K] product is ever formed.

With one mask for all, n projections are one of rank ΣR. Each W_i keeps its own scale. Forward multiplies columns by
their own scale_inv [ΣN]. Backward takes dy'_i = m_i dy_i with m_i = scale_inv_i / max_j scale_inv_j. So one
scale_inv [1], the maximum, is enough:

    ds = scaling · dy' B',   B'_i = (ρ_i / m_i) B_i      dB_i = (ρ_i / m_i) scaling · dy'_iᵀ s_i      dx = dy' W + ds A

ρ_i = scaling_i / scaling. If masks differ by projection, there is still one GEMM over W. But s, dA and the term ds A
of dx are then computed projection by projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.autograd.linear.projections import (
    Adapters,
    Needs,
    ProjectionGradients,
    Projections,
)
from lorakernels.numerics.fp8 import E4M3
from lorakernels.numerics.segments import adapters_of, rows_times
from lorakernels.ops.quantize_grad import hands_mask_over
from lorakernels.values import Dropout, Scaled, Scaling, Up, Weight

Run = Callable[..., Any]


def through_dispatcher(op: Any, *arguments: Any) -> Any:
    """The `run` of eager nodes. Every `run(op, *arguments)` calls an op."""
    return op(*arguments)


def lora_down(x: Tensor, to: Projections) -> Tensor | None:
    """s = D(x) Aᵀ [M, ΣR] of x [M, K]; None without adapters."""
    if to.lora_A is None:
        return None
    if len(to.masks) == 1:
        return ops.quantize_lora_down(x, to.lora_A, None, to.masks[0])[2]
    parts = zip(to.parts(to.lora_A), to.masks, strict=True)
    return torch.cat([ops.quantize_lora_down(x, a, None, mask)[2] for a, mask in parts], 1)


def quantize_down(
    x: Tensor, to: Projections, run: Run = through_dispatcher
) -> tuple[Scaled, Tensor | None]:
    """(x8 and scale_inv, or x itself over a plain base; s) of x [M, K], which is read once if there is one mask.

    `run` calls an op, where there is one mask at most.
    """
    one = len(to.masks) <= 1
    mask = to.masks[0] if to.masks and one else None
    operand, s = Scaled(x), None
    if to.quantized or (to.adapted and one):
        lora_A, power = to.lora_A if one else None, to.spec.power_of_two
        scaling = to.scaling_x(x)
        x8, scale_inv, s = run(ops.quantize_lora_down, x, lora_A, scaling, mask, power)
        operand = Scaled(x8, scale_inv) if to.in_fp8 else operand
    operand = quantize_in_blocks(operand, to.spec.power_of_two, run=run)
    return operand, s if one and to.adapted else lora_down(x, to)


def quantize_in_blocks(
    x: Scaled,
    power_of_two: bool | None,
    fp8_dtype: torch.dtype = E4M3,
    run: Run = through_dispatcher,
) -> Scaled:
    """x8 [M, K] with a scale_inv fp32 [⌈K/128⌉, M], as the recipe's `power_of_two` says.

    It is x itself if that is None, or if x has scales. It may be traced.
    """
    if power_of_two is None or x.scale_inv is not None:
        return x
    return Scaled(*run(ops.quantize_blocks, x.data, fp8_dtype, power_of_two))


def project(
    operand: Scaled,
    s: Tensor | None,
    to: Projections,
    stacked_B: Tensor | None,
    out_dtype: torch.dtype,
    residual: Tensor | None = None,
    run: Run = through_dispatcher,
) -> Tensor:
    """y [M, ΣN] = x Wᵀ + bias + scaling · s Bᵀ + residual. `stacked_B` is the first result of `stack_B`."""
    up = None if stacked_B is None else Up(stacked_B, s, to.spec.scaling)
    weight = Weight(to.weight, to.scale_inv)
    x, split = quantize_in_blocks(operand, to.spec.power_of_two, run=run), to.spec.split_fprop
    side = to.diagonal
    y: Tensor = run(ops.fp8_linear_lora, x, weight, to.bias, up, out_dtype, split, residual, side)
    return y


def projected(
    operand: Scaled,
    s: Tensor | None,
    to: Projections,
    stacked_B: Tensor | None,
    out_dtype: torch.dtype,
    residual: Tensor | None = None,
    keeps_s: bool = True,
    run: Run = through_dispatcher,
) -> tuple[Tensor, Tensor | None]:
    """(y as of `project`, s as backward reads it), also over ranks. Without `keeps_s`, backward does not read it."""
    if to.over is not None:
        return to.over.project(operand, s, to, stacked_B, out_dtype, residual, keeps_s)
    return project(operand, s, to, stacked_B, out_dtype, residual, run), s


def gradients(
    to: Projections,
    dy: Tensor,
    dy8: Scaled | None,
    operand: Callable[[], Scaled],
    adapters: Adapters,
    needs: Needs,
    dtype: torch.dtype | None = None,
    run: Run = through_dispatcher,
) -> ProjectionGradients:
    """Gradients of `project`.

    Args:
        to: the projections.
        dy: dy' [M, ΣN], which contains the factors `to.multiplier`. With `dy8` and no adapters it may be empty.
        dy8: the bytes of dy' and their scale_inv, or None to quantize dy here.
        operand: returns x, or x8 and its scale_inv. It is called if dA is needed.
        adapters: as forward kept them.
        needs: which gradients to compute; the rest are None.
        dtype: of dx; None takes dy's.
        run: calls an op.
    """
    if to.over is not None:
        return to.over.gradients(to, dy, dy8, operand, adapters, needs, dtype or dy.dtype)
    s, dtype_A, lora_B, stacked_B = adapters
    block = (lora_B[0] if stacked_B is None else stacked_B) if to.adapted else None
    ds = dB = dropped = None
    scaling = to.spec.of_state(to.state_dy) if dy8 is None else None
    power = to.spec.power_of_two if dy8 is None and needs.x else None
    if scaling is not None or block is not None:
        up = None if block is None else Up(block, s if needs.B else None, to.spec.scaling)
        bytes8, scale_inv, ds, dB, dropped = _quantize(to, dy, up, scaling, power, needs, run)
        made = scaling is not None or power is not None
        dy8 = Scaled(bytes8, scale_inv) if made else dy8
    dy8 = dy8 or Scaled(dy)
    dA: list[Tensor | None] = [None] * len(lora_B)
    if needs.A and ds is not None and dtype_A is not None:
        batch = adapters_of(lora_B[0])
        dA = [*grad_A(to, ds, operand(), dtype_A, batch, dropped, run)]
    dx = grad_x(to, dy8, ds, dtype or dy.dtype, run, dropped) if needs.x else None
    unstacked = unstack_B(to, dB, len(lora_B)) if needs.B and dB is not None else None
    return ProjectionGradients(dx, dA, unstacked or [None] * len(lora_B))


def _quantize(
    to: Projections,
    dy: Tensor,
    up: Up | None,
    scaling: Scaling | None,
    power: bool | None,
    needs: Needs,
    run: Run,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(dy8, its scale_inv, ds, dB, the mask's bits if `lora_grad_a` and `fp8_grad_input` will read them).

    Without `scaling` and `power`, dy8 and its scale_inv are empty.
    """
    side, fp8_dtype = to.stacked_side, to.spec.backward_dtype
    mask = _mask_to_draw(to, dy, up, needs)
    cols = 0 if mask is None else to.weight.shape[1]
    results = run(ops.quantize_grad, dy, up, scaling, fp8_dtype, side, power, mask, cols)
    dy8, scale_inv, ds, dB, dropped = results
    return dy8, scale_inv, ds, dB, None if mask is None else dropped


def _mask_to_draw(to: Projections, dy: Tensor, up: Up | None, needs: Needs) -> Dropout | None:
    """The mask that `quantize_grad` draws for `lora_grad_a` and `fp8_grad_input`; None where each of them draws it."""
    if up is None or not (needs.A and needs.x) or len(to.masks) != 1:
        return None
    mask = to.masks[0]
    return mask if hands_mask_over(dy, up, mask, to.grad_weight, to.stacked_side) else None


def grad_A(
    to: Projections,
    ds: Tensor,
    x: Scaled,
    dtype: torch.dtype,
    batch: int = 0,
    dropped: Tensor | None = None,
    run: Run = through_dispatcher,
) -> list[Tensor]:
    """dA_i = ds_iᵀ D(x) of each adapter, in `dtype`. `batch`: J of adapters in one batch, else 0."""
    if len(to.masks) > 1:
        pieces = zip(to.parts(ds, -1), to.masks, strict=True)
        return [run(ops.lora_grad_a, d.contiguous(), x, mask, dtype, batch) for d, mask in pieces]
    mask = _handed_over(to.masks[0], dropped)
    return to.parts(run(ops.lora_grad_a, ds, x, mask, dtype, batch))


def _handed_over(mask: Dropout | None, dropped: Tensor | None) -> Dropout | None:
    return mask if mask is None or dropped is None else mask._replace(dropped=dropped)


def grad_x(
    to: Projections,
    dy8: Scaled,
    ds: Tensor | None,
    dtype: torch.dtype,
    run: Run = through_dispatcher,
    dropped: Tensor | None = None,
) -> Tensor:
    """dx [M, K] in `dtype` = dy' W + mask ⊙ (ds A) / (1 − p), ds [M, ΣR]. `dropped`: the mask's bits, if drawn."""
    several = len(to.masks) > 1
    mask = _handed_over(to.masks[0], dropped) if to.masks else None
    lora_A = to.lora_A
    d, a = ds if lora_A is not None else None, lora_A
    if several and ds is not None and lora_A is not None:
        d, a = to.parts(ds, -1)[0].contiguous(), to.parts(lora_A)[0].contiguous()
    fp8_dtype, split = to.spec.backward_dtype, to.spec.split_dgrad
    dy8 = quantize_in_blocks(dy8, to.spec.power_of_two, fp8_dtype, run)
    dx: Tensor = run(ops.fp8_grad_input, dy8, fp8_dtype, to.grad_weight, d, a, mask, dtype, split)
    if several and ds is not None and lora_A is not None:
        rest = zip(to.parts(ds, -1)[1:], to.parts(lora_A)[1:], to.masks[1:], strict=True)
        for d, a, mask in rest:
            branch = rows_times(d, a.to(d.dtype))
            dx = run(ops.bias_dropout_add, branch, None, dx, mask)
    return dx


def stack_B(to: Projections, lora_B: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """diag(f_i B_i) [ΣN, ΣR] for forward (f_i = ρ_i) and for backward (f_i = ρ_i / m_i), in one launch.

    If `to.stacked_side` is set, the second has the f_i B_i stacked: [ΣN, R]. Of J adapters in one batch, all lead
    with J. Returns (B itself, None) for one projection, and (None, None) without adapters.
    """
    if not to.adapted:
        return None, None
    if to.factors is None:
        return lora_B[0], None
    first, second = ops.block_diagonal(
        list(lora_B), to.side, to.factors, to.stacked_side is not None
    )
    return first, second


def unstack_B(to: Projections, dB: Tensor, count: int) -> list[Tensor | None]:
    """dB_i of each adapter, from the gradient of the second result of `stack_B`."""
    if to.factors is None:
        return [dB]
    assert count == sum(1 for rank in to.ranks if rank)
    compact = to.stacked_side is not None
    return [*ops.block_diagonal_parts(dB, to.side, to.factors[1], compact)]


def bias_gradients(
    to: Projections, dy: Tensor, dtypes: Sequence[torch.dtype | None]
) -> list[Tensor | None]:
    """Σ_rows dy_i [N_i] for each projection with a dtype in `dtypes`, else None. m_i is divided out of dy' [M, ΣN]."""
    dbias: list[Tensor | None] = [None] * len(dtypes)
    for i, dtype in enumerate(dtypes):
        if dtype is not None:
            total = dy.split(list(to.rows), 1)[i].float().sum(0)
            dbias[i] = (total if to.multiplier is None else total / to.multiplier[i]).to(dtype)
    return dbias if to.over is None else to.over.complete(dbias)
