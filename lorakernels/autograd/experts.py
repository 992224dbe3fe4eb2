# SPDX-License-Identifier: Apache-2.0
"""The autograd nodes of a mixture's experts: one launch for all experts, of tokens sorted by numerics/groups.py.

    forward    x8, s = grouped_quantize_lora_down(x, A)            y = grouped_linear_lora(x8, W8, s, B)
    backward   dy8, ds, dB = grouped_quantize_grad(dy, B, s)       dx = grouped_grad_input(dy8, W8, ds, A)
               dA = grouped_lora_grad_a(ds, x8)

Each expert keeps the scales that it has as a layer of its own. The host reads nothing from the device, so that a CUDA
graph can hold all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.numerics.groups import Routing
from lorakernels.recorded.once import once_differentiable
from lorakernels.values import Groups, Scaled, Scaling, Up, Weight


class ExpertStack(NamedTuple):
    """Experts' layers: values that do not depend on the tokens.

    Attributes:
        weight: [G, N, K] e4m3 bytes with a scale_inv fp32 [G].
        lora_A, lora_B: each expert's [R, K] and [N, R]; empty without adapters.
        scaling: factor of B A.
        forward, backward: of the FP8 state, and whether it is followed.
        backward_dtype, split_dgrad: FP8 dtype of dy, and whether the GEMM for dx adds partial sums in fp32.
    """

    weight: Weight
    lora_A: Sequence[Tensor]
    lora_B: Sequence[Tensor]
    scaling: float
    forward: Scaling
    backward: Scaling
    backward_dtype: torch.dtype
    split_dgrad: bool


class GroupedCall(NamedTuple):
    """The arguments of one call except x and the adapters.

    Attributes:
        stack: the experts' layers. Its adapters are not read here.
        groups: the rows of each expert.
        rows: int32 [M], the row of x that each row is a copy of; −1 for none.
        place: int32 [T, J], the rows that are copies of each row of x; None if rows are not copied.
    """

    stack: ExpertStack
    groups: Groups
    rows: Tensor
    place: Tensor | None


class GroupedLinearNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: GroupedCall, *adapters: Tensor) -> Tensor:
        """y [M, N] of x [T, K]; `adapters`: A_g [R, K] of every group, then every B_g [N, R], or none."""
        groups = len(adapters) // 2
        lora_A = lora_B = None
        if adapters:
            lora_A = torch.stack(adapters[:groups]).to(x.dtype)
            lora_B = torch.stack(adapters[groups:])
        stack, row_groups, rows, _ = call
        x8, scale_inv, s = ops.grouped_quantize_lora_down(
            x, rows, row_groups, lora_A, stack.forward
        )
        up = None if lora_B is None else Up(lora_B, s, stack.scaling)
        y = ops.grouped_linear_lora(Scaled(x8, scale_inv), stack.weight, row_groups, up, x.dtype)
        needs_A = any(ctx.needs_input_grad[2 : 2 + groups])
        needs_B = any(ctx.needs_input_grad[2 + groups :])
        ctx.needs = needs_A, needs_B
        ctx.dtype_A = adapters[0].dtype if adapters else None
        ctx.call = call
        ctx.save_for_backward(
            lora_A if ctx.needs_input_grad[0] else None,
            lora_B,
            s if needs_B else None,
            x8 if needs_A else None,
            scale_inv if needs_A else None,
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        lora_A, lora_B, s, x8, x_scale_inv = ctx.saved_tensors
        (stack, groups, _, place), (needs_A, needs_B) = ctx.call, ctx.needs
        dtype = stack.backward_dtype
        up = None if lora_B is None else Up(lora_B, s, stack.scaling)
        dy8, scale_inv, ds, dB = ops.grouped_quantize_grad(
            dy.contiguous(), groups, up, stack.backward, dtype
        )
        adapted = lora_B is not None
        dA = None
        if needs_A:
            dA = ops.grouped_lora_grad_a(ds, Scaled(x8, x_scale_inv), groups, ctx.dtype_A)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = ops.grouped_grad_input(
                Scaled(dy8, scale_inv),
                dtype,
                stack.weight,
                groups,
                ds if adapted else None,
                lora_A,
                dy.dtype,
                stack.split_dgrad,
            )
            if place is not None:
                dx = ops.expert_sum(dx, place, None)
        count = 0 if lora_B is None else len(lora_B)
        of_A = [None] * count if dA is None else dA.unbind()
        of_B = dB.unbind() if needs_B else [None] * count
        return dx, None, *of_A, *of_B


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        """silu(gate) ⊙ up, [M, F] of gate_up [M, 2 F]."""
        ctx.save_for_backward(gate_up)
        act: Tensor = ops.swiglu_quantize(Scaled(gate_up), None, True)[0]
        return act

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dact: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        ones = torch.ones(2, device=dact.device)
        e5m2 = torch.float8_e5m2
        dgate_up: Tensor = ops.swiglu_quantize_grad(
            dact.contiguous(), Scaled(gate_up), ones, None, e5m2, True
        )[0]
        return dgate_up


class ExpertSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, place: Tensor) -> Tensor:
        """Σ_j weights_tj · y[place_tj], [T, N] of y [M, N]."""
        ctx.save_for_backward(y, weights, place)
        out: Tensor = ops.expert_sum(y, place, weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        y, weights, place = ctx.saved_tensors
        dy, dweights = ops.expert_sum_backward(dout.contiguous(), y, place, weights)
        return dy, dweights, None


def grouped_linear(x: Tensor, routing: Routing, gathers: bool, stack: ExpertStack) -> Tensor:
    """y [M, N] of x's rows as `routing` has them: of tokens [T, K] if it `gathers`, or of rows [M, K]."""
    rows, place = (routing.source, routing.place) if gathers else (routing.row, None)
    call = GroupedCall(stack, routing.groups, rows, place)
    y: Tensor = GroupedLinearNode.apply(x, call, *stack.lora_A, *stack.lora_B)
    return y
