# SPDX-License-Identifier: Apache-2.0
"""A frozen linear layer with an adapter: by a recorded call if there can be one, otherwise by the ops."""

from __future__ import annotations

from torch import Tensor

from lorakernels.autograd.linear.node import LinearNode, in_bytes
from lorakernels.autograd.linear.recorded import recorded_linear
from lorakernels.autograd.linear.values import Adapter, Call
from lorakernels.numerics.autocast import autocast_dtype
from lorakernels.values import Weight


def lora_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, adapter: Adapter, call: Call
) -> Tensor:
    """y = x Wᵀ + bias + scaling · D(x) Aᵀ Bᵀ, differentiable in x, bias, A and B; W is frozen.

    Args:
        x: [..., K] fp32, bf16 or fp16, any strides, which `check_input` has taken. Under autocast it is cast to the
            autocast dtype first.
        weight: [N, K], e4m3 (or its bytes, uint8) with a scale_inv [1], or of a plain dtype without. With
            `call.spec.power_of_two` the scale_inv is [⌈N/128⌉, ⌈K/128⌉].
        bias: [N] or None.
        adapter: A and B, fp32, bf16 or fp16; both or neither.
        call: the numbers of this call, its random slot and its FP8 state.

    Returns:
        [..., N] in x's dtype (the autocast dtype under autocast).
    """
    kind = "cuda" if x.is_cuda else x.device.type
    if (dtype := autocast_dtype(kind)) is not None:
        x = x.to(dtype)
    x = x if x.is_contiguous() else x.contiguous()
    may_record = kind == "cuda" and call.over is None
    y = recorded_linear(x, weight, bias, adapter, call) if may_record else None
    if y is not None:
        return y
    weight, shape = in_bytes(weight), x.shape
    rows = x if len(shape) == 2 else x.reshape(-1, shape[-1])
    y = LinearNode.apply(rows, bias, adapter.A, adapter.B, weight, call)
    return y if len(shape) == 2 else y.view(*shape[:-1], y.shape[1])
