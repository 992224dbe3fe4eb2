# SPDX-License-Identifier: Apache-2.0
"""Projections that share an input x: q, k, v; gate, up. In evaluation order, i over the projections:

    forward    x8, [s_1 … s_n] = quantize_lora_down(x, [A_1; …; A_n])        y_i = fp8_linear_lora(x8, W8_i, s_i, B_i)
    backward   dy8_i, ds_i, dB_i = quantize_grad(dy_i, B_i, s_i)        dx_i = fp8_grad_input(dy8_i, W8_i, ds_i, A_i)
               [dA_1; …; dA_n] = lora_grad_a([ds_1 … ds_n], x8)        dx = Σ dx_i, added up by autograd

Each projection is an autograd node of its own, which runs as soon as its dy exists. Before them in the graph is a node
for the s_i: its backward gets their gradients ds_i and computes all dA_i in one product. Saved for backward: x8 and its
scale_inv once, s_i per projection, one slot. A projection with its own mask computes s_i = D_i(x) A_iᵀ and dA_i by its
own ops, over the same x8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorakernels import ops
from lorakernels.autograd.linear_node import Needs, gradients, in_bytes, save_for_gradients
from lorakernels.autograd.linear_values import Adapter, Call, LoRASpec
from lorakernels.ops.quantize_lora_down import MAX_RANK
from lorakernels.values import Scaled, Up, Weight


@dataclass(frozen=True)
class SharedInput:
    """What projections of one x share.

    Attributes:
        rows: [M, K], x in the compute dtype, outside of autograd.
        x8, x_scale_inv: e4m3 bytes [M, K] and fp32 [1]; None for a plain base.
        s: {projection: [M, R]}, with the mask of `slot` and of `spec`'s p and site.
        slot: int64 [2], or None without dropout.
        spec: the mask's numbers, and x's column in the FP8 state.
        spent: empty until a backward has gone through a stacked s.
    """

    rows: Tensor
    x8: Tensor | None
    x_scale_inv: Tensor | None
    s: dict[int, Tensor]
    slot: Tensor | None
    spec: LoRASpec
    spent: list[bool]

    @property
    def operand(self) -> Scaled:
        return Scaled(self.rows) if self.x8 is None else Scaled(self.x8, self.x_scale_inv)


class _StackedDown(torch.autograd.Function):
    """Splits a stacked s [M, ΣR] into one part per A. Backward computes all dA in one product."""

    @staticmethod
    def forward(
        ctx: Any,
        s: Tensor,
        operand: Tensor,
        x_scale_inv: Tensor | None,
        slot: Tensor | None,
        spent: list[bool] | None,
        spec: LoRASpec,
        *lora_A: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        needed = any(ctx.needs_input_grad)
        ctx.save_for_backward(*(t if needed else None for t in (operand, x_scale_inv, slot)))
        ctx.spec, ctx.spent = spec, spent
        ctx.shapes = [(a.shape[0], a.dtype) for a in lora_A]
        parts = s.split([a.shape[0] for a in lora_A], dim=1)
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *ds: Tensor | None) -> tuple[Tensor | None, ...]:
        operand, x_scale_inv, slot = ctx.saved_tensors
        spec = ctx.spec
        if ctx.spent is not None:
            ctx.spent.append(True)
        used = {i: t for i, t in enumerate(ds) if t is not None and ctx.needs_input_grad[6 + i]}
        dA: list[Tensor | None] = [None] * len(ds)
        if used:
            ranks, dtypes = zip(*(ctx.shapes[i] for i in used), strict=True)
            stacked = ops.lora_grad_a(
                _cat(list(used.values()), 1),
                Scaled(operand, x_scale_inv),
                spec.dropout(slot),
                reduce(torch.promote_types, dtypes),
            )
            parts = stacked.split(list(ranks))
            for i, part, dtype in zip(used, parts, dtypes, strict=True):
                dA[i] = part.to(dtype, copy=True)  # no .grad may share another's storage
        return (None,) * 6 + tuple(dA)


class _Projection(torch.autograd.Function):
    """y of one projection, from the shared x8 (over a plain base, x itself) and the projection's s."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        lora_A: Tensor | None,
        lora_B: Tensor | None,
        bias: Tensor | None,
        s: Tensor | None,
        shared: SharedInput,
        weight: Weight,
        call: Call,
    ) -> Tensor:
        up = None if lora_B is None else Up(lora_B, s, call.spec.scaling)
        y = ops.fp8_linear_lora(
            shared.operand, weight, bias, up, shared.rows.dtype, call.spec.split_fprop
        )
        needs = Needs(*ctx.needs_input_grad[:5])
        adapter = Adapter(lora_A, lora_B, s)
        save_for_gradients(ctx, needs, shared.operand, weight, bias, adapter, call)
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        return y.view(*x.shape[:-1], weight.data.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy = dy.reshape(-1, dy.shape[-1]).contiguous()
        dx, *others = gradients(ctx, Needs(*ctx.needs_input_grad[:5]), dy)
        if dx is not None:
            dx = dx.view(ctx.x_shape).to(ctx.x_dtype)
        return (dx, *others) + (None,) * 3


def share_input(x: Tensor, lora_A: Mapping[int, Tensor], call: Call) -> SharedInput:
    """Compute x8, and s of the projections in `lora_A` with the one mask of `call.slot`, in one read of x.

    Args:
        x: [..., K] fp32, bf16 or fp16, any strides; under autocast it is cast to the autocast dtype first.
        lora_A: {projection: [R, K]}; may be empty. Where the ranks sum to more than `quantize_lora_down` takes at
            once (MAX_RANK), x is read again for the rest.
        call: the mask's numbers and slot, and x's place in the FP8 state.
    """
    spec, slot, state_x, _ = call
    with torch.no_grad():
        rows = x
        if torch.is_autocast_enabled(x.device.type):
            rows = x.to(torch.get_autocast_dtype(x.device.type))
        rows = rows.reshape(-1, x.shape[-1]).contiguous().detach()
    x8 = x_scale_inv = None
    parts: dict[int, Tensor] = {}
    spent: list[bool] = []
    for chunk in _chunks(lora_A):
        stack = [a.detach() for a in chunk.values()]
        a = _cat(stack) if len(stack) > 1 else stack[0] if stack else None
        state = state_x if x8 is None else None
        out = ops.quantize_lora_down(rows, a, spec.of_state(state), spec.dropout(slot))
        if state is not None:
            x8, x_scale_inv = out[:2]
        if len(chunk) > 1:
            operand = rows if x8 is None else x8
            note = None if torch.compiler.is_compiling() else spent
            tied = _StackedDown.apply(
                out[2], operand, x_scale_inv, slot, note, spec, *chunk.values()
            )
            parts.update(zip(chunk, tied, strict=True))
        elif chunk:
            parts[next(iter(chunk))] = out[2]
    return SharedInput(rows, x8, x_scale_inv, parts, slot, spec, spent)


def _cat(matrices: list[Tensor], dim: int = 0) -> Tensor:
    kind = matrices[0].device.type
    if not torch.is_autocast_enabled(kind):
        return torch.cat(matrices, dim)
    with torch.autocast(kind, enabled=False):  # autocast's cat refuses the other 16-bit dtype
        return torch.cat(matrices, dim)


def _chunks(lora_A: Mapping[int, Tensor]) -> list[dict[int, Tensor]]:
    """Split the A's, in order, into chunks with a sum of ranks up to MAX_RANK. Without an A, one chunk is empty."""
    chunks: list[dict[int, Tensor]] = [{}]
    total = 0
    for index, a in lora_A.items():
        if chunks[-1] and total + a.shape[0] > MAX_RANK:
            chunks.append({})
            total = 0
        chunks[-1][index] = a
        total += a.shape[0]
    return chunks


def lora_projection(
    x: Tensor,
    shared: SharedInput,
    index: int,
    weight: Weight,
    bias: Tensor | None,
    adapter: Adapter,
    call: Call,
) -> Tensor:
    """`lora_linear` of projection `index`, over the result of `share_input(x, …)`. It is differentiable likewise.

    Its s is `shared.s[index]`. If there is none, s is computed here from `shared.rows`. `call` holds the mask for s,
    whether s exists or is computed here, and the column of dy.

    Returns:
        [..., N] in the dtype of `shared.rows`.
    """
    lora_A, lora_B, s = adapter
    if lora_A is not None:
        s = shared.s.get(index)
        if s is None:
            s = ops.quantize_lora_down(shared.rows, lora_A.detach(), None, call.dropout)[2]
        elif s.requires_grad:
            lora_A = lora_A.detach()  # A's gradient flows through s
    y: Tensor = _Projection.apply(x, lora_A, lora_B, bias, s, shared, in_bytes(weight), call)
    return y
