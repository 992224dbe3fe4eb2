# SPDX-License-Identifier: Apache-2.0
"""The values of one call of a linear layer with an adapter, besides x, W and the bias."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.ops.hardware import FLOATS
from lorakernels.recipes import Recipe
from lorakernels.recorded.shared import shared
from lorakernels.values import Dropout, Scaling


@dataclass(frozen=True)
class LoRASpec:
    """The numbers of one call.

    A recipe becomes arguments of ops here alone, by `following`: `of_state` has the scale of a whole tensor, and
    `power_of_two` says how each block is scaled. Both are None over a plain base.

    Attributes:
        scaling: factor of B A.
        p: dropout probability, in [0, 1).
        site: the layer's dropout stream.
        row0, chunks, col0: where x[0, 0], and its rows, lie in the tensor that the mask is drawn for.
        column, delayed, backward_dtype, split_fprop, split_dgrad: as of `recipes.CallScaling`.
        power_of_two: likewise; None where x and dy have no blocks.
        memo: {name: `LastCalls` of this layer} (recorded.py).
    """

    scaling: float = 1.0
    p: float = 0.0
    site: int = 0
    row0: int = 0
    chunks: tuple[int, ...] = ()
    col0: int = 0
    column: int = 0
    delayed: bool = False
    backward_dtype: torch.dtype = torch.float8_e5m2
    split_fprop: bool = False
    split_dgrad: bool = True
    power_of_two: bool | None = None
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def following(self, recipe: Recipe | None, column: int, training: bool) -> LoRASpec:
        """A copy for a base that follows `recipe`; itself over a plain one."""
        return self if recipe is None else replace(self, **recipe.of_call(column, training))

    @cached_property
    def numbers(self) -> SharedSpec:
        """These numbers without what differs from layer to layer: the column and the site are 0."""
        return shared(SharedSpec, replace(self, column=0, site=0))

    def of_state(self, state: Tensor | None) -> Scaling | None:
        """This call's scale in one direction of an FP8 state; None over a plain base."""
        return None if state is None else Scaling(state, self.column, self.delayed)

    def dropout(self, slot: Tensor | None) -> Dropout | None:
        """The mask that `slot` draws for this call; None without a slot."""
        if slot is None:
            return None
        return Dropout(slot, self.p, self.site, self.row0, self.col0, chunks=self.chunks)


@dataclass(frozen=True, eq=False)
class SharedSpec:
    """A `LoRASpec` of several layers, compared by identity: equal ones are one object."""

    spec: LoRASpec


class Call(NamedTuple):
    """A `LoRASpec` and the tensors that it refers to.

    Attributes:
        spec: scaling, dropout probability and which columns of the FP8 state to use.
        slot: int64 [2] random slot; None draws no mask (dropout off).
        state_x, state_dy: `FP8State.forward` and `.backward`; None over a plain base.
        over: how ranks hold the layer together, an `OverRanks` of projections.py; None where one has all of it.
    """

    spec: LoRASpec
    slot: Tensor | None = None
    state_x: Tensor | None = None
    state_dy: Tensor | None = None
    over: Any = None

    @property
    def dropout(self) -> Dropout | None:
        return self.spec.dropout(self.slot)


class Adapter(NamedTuple):
    """A [R, K], B [N, R], and s = D(x) Aᵀ [M, R] where it has been computed; all None without an adapter."""

    A: Tensor | None = None
    B: Tensor | None = None
    s: Tensor | None = None


def check_frozen(weight: Tensor, name: str = "the layer") -> None:
    """RuntimeError if gradients are computed and W is to train: no backward here computes its gradient."""
    if weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}: weight.requires_grad must be False, found True. A frozen weight gets no gradient: call "
            "weight.requires_grad_(False)"
        )


def refuse_trace() -> None:
    """RuntimeError in torch.jit.trace."""
    if torch.jit.is_tracing():
        raise RuntimeError(
            "torch.jit.trace cannot record this layer: use torch.compile or torch.export, or call merge_and_unload and "
            "trace the plain layers that it leaves"
        )


def check_input(x: Tensor, weight: Tensor) -> None:
    """Refuse an x that `lora_linear` cannot take: TypeError for its dtype, ValueError for shape or device. RuntimeError
    for a weight that is to train, and in torch.jit.trace, which records no autograd nodes of Python."""
    if weight.requires_grad:
        check_frozen(weight)
    refuse_trace()
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
