# SPDX-License-Identifier: Apache-2.0
"""Linear layers of one x that quantize it once: q, k, v; gate, up. Each has an autograd node of its own (`LinearNode`).

Saved for backward: x8 and its scale_inv once, s and the adapter's own tensors in each node, one slot for each mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.autograd.compiled.linear import rows_of
from lorakernels.autograd.linear.linear import quantize_in_blocks
from lorakernels.autograd.linear.node import Given, LinearNode, in_bytes
from lorakernels.autograd.linear.values import Adapter, Call, LoRASpec
from lorakernels.numerics.autocast import without_autocast
from lorakernels.ops.quantize_lora_down import MAX_RANK
from lorakernels.values import Scaled, Weight


@dataclass(frozen=True)
class SharedInput:
    """What linear layers share of one x.

    Attributes:
        rows: [M, K], x in the compute dtype, outside of autograd.
        operand: x8 and its scale_inv, [1] or one for each 1 × 128; over a plain base, `rows`.
        s: {layer: [M, R]}, with the mask of `slot` and of `spec`'s p and site.
        slot: int64 [2], or None without dropout.
        spec: the mask's numbers, and x's column in the FP8 state.
    """

    rows: Tensor
    operand: Scaled
    s: dict[int, Tensor]
    slot: Tensor | None
    spec: LoRASpec


def share_input(x: Tensor, lora_A: Mapping[int, Tensor], call: Call) -> SharedInput:
    """Compute x8, and s of the layers in `lora_A` with the one mask of `call.slot`.

    Args:
        x: [..., K] fp32, bf16 or fp16, any strides; under autocast it is cast to the autocast dtype first.
        lora_A: {layer: [R, K]}; may be empty. One read of x serves all, if `quantize_lora_down` takes the sum of their
            ranks (MAX_RANK). If not, each has a read of x.
        call: the mask's numbers and slot, and x's place in the FP8 state, or the recipe of a base in blocks.
    """
    rows, scaling = rows_of(x.detach()), call.scaling_x
    each = [a.detach() for a in lora_A.values()]
    ranks = [a.shape[0] for a in each]
    stacked = [_cat(each)] if len(each) > 1 and sum(ranks) <= MAX_RANK else each
    found = list[Tensor]()
    operand = quantize_in_blocks(Scaled(rows), call.spec.blocks)
    for a in stacked or (None,):
        x8, scale_inv, s = ops.quantize_lora_down(rows, a, scaling, call.dropout)
        if scaling is not None:
            operand, scaling = Scaled(x8, scale_inv), None
        found.append(s)
    if len(stacked) < len(each):
        found = [part.contiguous() for part in found[0].split(ranks, 1)]
    s_of = dict(zip(lora_A, found, strict=False))  # one that is found for no A is empty
    return SharedInput(rows, operand, s_of, call.slot, call.spec)


def _cat(matrices: Sequence[Tensor]) -> Tensor:
    with without_autocast(matrices[0].device.type):
        return torch.cat([*matrices])  # autocast's cat refuses the other 16-bit dtype


def shared_linear(
    x: Tensor,
    shared: SharedInput,
    index: int,
    weight: Weight,
    bias: Tensor | None,
    adapter: Adapter,
    call: Call,
) -> Tensor:
    """`lora_linear` of layer `index`, over the result of `share_input(x, …)`. It is differentiable likewise.

    Its s is `shared.s[index]`. If there is none, s is computed here from `shared.rows`. `call` holds the mask for s,
    whether s exists or is computed here, and the column of dy.

    Returns:
        [..., N] in the dtype of `shared.rows`.
    """
    lora_A, lora_B, _ = adapter
    s = None if lora_A is None else shared.s.get(index)
    if s is None and lora_A is not None:
        s = ops.quantize_lora_down(shared.rows, lora_A.detach(), None, call.dropout)[2]
    given = Given(shared.operand, s, shared.rows.dtype)
    rows = x.reshape(-1, x.shape[-1])  # for its gradient; the values are the operand's
    y: Tensor = LinearNode.apply(rows, bias, lora_A, lora_B, in_bytes(weight), call, given)
    return y.view(*x.shape[:-1], y.shape[1])
