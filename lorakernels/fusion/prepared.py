# SPDX-License-Identifier: Apache-2.0
"""What a FusedGroup (group.py) keeps between its calls."""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.autograd.linear.projections import Projections
from lorakernels.autograd.linear.values import LoRASpec
from lorakernels.modules.linear.lora import LoRALinear, rows_of_call
from lorakernels.values import Dropout


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
        at = self.spec
        return None if slot is None else Dropout(slot, p, site, at.row0, chunks=at.chunks)


class Prepared(NamedTuple):
    """A call without its masks. It serves as long as what was seen is the same.

    Attributes:
        seen: what it depends on, when it was made: objects, and numbers. None if that cannot be told.
        variant: of the mode and the adapters.
        adapted: the members whose adapters are active.
        to: the Projections, with None for every mask.
        params: the flat list of tensors that autograd gets (`fused_node.Trained`).
    """

    seen: tuple[list[Any], list[Any]] | None
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
        each_A, each_B = zip(*factors, strict=True)
        to = to._replace(lora_A=torch.cat([a.detach() for a in each_A], -2), planned=None)
        return to, [*each_A, *each_B, *self.params[2 * len(factors) :]]

    def holds(self, now: tuple[list[Any], list[Any]] | None) -> bool:
        """Whether what the call depends on is still what was seen; `now` is None if that cannot be told."""
        if self.seen is None or now is None:
            return False
        (objects, numbers), (those, then) = now, self.seen
        return numbers == then and len(objects) == len(those) and all(map(is_, objects, those))
