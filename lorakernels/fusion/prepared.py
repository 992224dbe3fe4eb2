# SPDX-License-Identifier: Apache-2.0
"""The data that a FusedGroup (group.py) keeps between its calls."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.autograd.linear.projections import Projections
from lorakernels.autograd.linear.values import LoRASpec
from lorakernels.modules.linear.calls import rows_of_call
from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.values import Dropout

CallState = tuple[list[Any], list[Any]]  # objects, which are compared by identity, and numbers


class Derived(NamedTuple):
    """Tensors derived from the members' weights. `Projections` describes each."""

    scale_inv: Tensor | None
    grad_scale_inv: Tensor | None
    multiplier: Tensor


class Variant(NamedTuple):
    """Numbers that depend on the mode (training or eval), on the active adapters and on the rows that a rank has.

    `masks` holds, for each adapter, the index of the adapter that draws its mask; one entry if one mask serves all.
    """

    spec: LoRASpec
    ranks: tuple[int, ...]
    drops: bool
    masks: tuple[int, ...]

    def mask(self, slot: Tensor | None, p: float, site: int) -> Dropout | None:
        """The mask that `slot` draws for x's rows; None without a slot."""
        if slot is None:
            return None
        return Dropout(slot, p, site, self.spec.row0, chunks=self.spec.chunks)


class Prepared(NamedTuple):
    """A call without its masks. It serves until the state of its members changes.

    Attributes:
        made_from: `state_of_call` when it was made. None if it serves one call only.
        variant: of the mode and the adapters.
        adapted: the members with an active adapter.
        to: the Projections, with None for every mask.
        params: the flat list of tensors that autograd gets (`fused_node.Trained`).
    """

    made_from: CallState | None
    variant: Variant
    adapted: tuple[LoRALinear, ...]
    to: Projections
    params: list[Tensor | None]

    def with_masks(
        self, masks: tuple[Dropout | None, ...]
    ) -> tuple[Projections, list[Tensor | None]]:
        """`to` with the masks, and `params`; of the adapters that AdapterBatch.rows has named, if it has."""
        to = self.to._replace(masks=masks)
        rows = rows_of_call(self.adapted[0]) if self.adapted else None
        if rows is None:
            return to, self.params
        factors = [rows.factors(m.lora_A, m.lora_B) for m in self.adapted]
        rows_A, rows_B = zip(*factors, strict=True)
        to = to._replace(lora_A=torch.cat([a.detach() for a in rows_A], -2), recorded=None)
        return to, [*rows_A, *rows_B, *self.params[2 * len(factors) :]]

    def holds(self, now: CallState | None) -> bool:
        """Whether the members' state `now` is the one that it was made from. None is the state of no call."""
        if self.made_from is None or now is None:
            return False
        (objects, numbers), (old_objects, old_numbers) = now, self.made_from
        if numbers != old_numbers or len(objects) != len(old_objects):
            return False
        return all(map(is_, objects, old_objects))


def state_of_call(members: Sequence[FrozenFP8Linear]) -> CallState | None:
    """What a prepared call of `members` depends on. None if a member is not a module of ours."""
    objects: list[Any] = []
    numbers: list[Any] = []
    for member in members:
        attributes = member.__dict__
        if "_handle" not in attributes:
            return None
        parameters, buffers = attributes["_parameters"], attributes["_buffers"]
        weight, scale = parameters["weight"], buffers["weight_scale_inv"]
        lora_A, lora_B, bias = (parameters.get(name) for name in ("lora_A", "lora_B", "bias"))
        objects += (weight, scale, lora_A, lora_B, bias)
        # there is a new handle after a number of the layer changed
        objects.append(attributes["_handle"])
        numbers += (weight.data_ptr(), weight._version, attributes["training"])
        to_train = weight.requires_grad and torch.is_grad_enabled()
        numbers += (attributes.get("merged"), attributes.get("disable_adapters"), to_train)
        if scale is not None:
            numbers += (scale.data_ptr(), scale._version)
        if lora_A is not None and lora_B is not None:
            numbers += (lora_A.data_ptr(), lora_A.dtype, lora_A.shape, lora_B.dtype)
            numbers += (lora_B.shape, lora_B.is_contiguous())
        if bias is not None:
            numbers += (bias.data_ptr(), bias.dtype, bias.requires_grad)
    state = members[0].fp8_state
    if state is not None:
        objects += (state.forward, state.backward)
    return objects, numbers
