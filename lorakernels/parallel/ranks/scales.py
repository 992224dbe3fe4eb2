# SPDX-License-Identifier: Apache-2.0
"""One scale for the parts of one tensor that ranks hold together.

A part's own amax would give each rank another scale. Where the FP8 state has no scale yet, and in evaluation, the
largest amax of all ranks comes before the cast. Once the state has a scale, no rank waits: the amaxes are reduced when
the scales are updated (`FP8State.shared_over`).
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lorakernels.numerics.fp8 import E4M3, FP8_MAX, amax_of, scale_of
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.state.fp8 import FP8State, reduce_amax
from lorakernels.values import Scaling

_Known = tuple[int, int, list[bool]]


class SharedScales:
    """The scales of an FP8 state where the ranks of `group` hold parts of one tensor. `shared` makes them."""

    def __init__(self, state: FP8State, group: Any) -> None:
        self.state, self.group = state, group
        self._known: dict[bool, _Known] = {}

    def of(self, part: Tensor, column: int, delayed: bool, backward: bool = False) -> Scaling:
        """The scaling of `part`, this rank's part of x (with `backward`, of dy). Collective while no scale is known.

        It is the same on all ranks. Its amax goes to the state if `delayed`.
        """
        known = self.known(column, delayed, backward)
        if known is not None:
            return known
        tensor = self.state.backward if backward else self.state.forward
        amax = amax_of(part)
        reduce_amax(amax, self.group)
        fp8_dtype = self.state.recipe.backward_dtype if backward else E4M3
        scale = scale_of(amax, FP8_MAX[fp8_dtype])
        if delayed:
            row0 = tensor[0, column : column + 1]
            row0.copy_(torch.maximum(row0, amax))
        return Scaling(torch.stack((torch.zeros_like(scale), scale)), 0, True)

    def known(self, column: int, delayed: bool, backward: bool = False) -> Scaling | None:
        """As `of`, if the state has a scale, which all ranks then have; else None. Not collective."""
        tensor = self.state.backward if backward else self.state.forward
        if delayed and self._has_scale(tensor, column, backward):
            return Scaling(tensor, column, True)
        return None

    def _has_scale(self, tensor: Tensor, column: int, backward: bool) -> bool:
        """Whether an update gave the column a scale. It reads the device once after an update, until all have one.

        Raises:
            RuntimeError: a CUDA graph is captured, in which it cannot read, and no scale was known before.
        """
        state = self.state
        updates, rewrites, known = self._known.get(backward, (-1, -1, []))
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            if column < len(known) and known[column]:
                return True  # the capture has put back the states in which the graph's warm-up found a scale
            raise RuntimeError(
                "ranks have no FP8 scale yet, and cannot ask each other in a CUDA graph: train and update the scales "
                "eagerly once before it is captured"
            )
        same = rewrites == state.rewrites and column < len(known)
        if same and (known[column] or updates == state.updates):
            return known[column]
        known = (tensor[-1] > 0).tolist()
        self._known[backward] = (state.updates, state.rewrites, known)
        return known[column]


# by the state's id: they hold the state, and the layers hold them
_SHARED: WeakValueDictionary[int, SharedScales] = WeakValueDictionary()


def shared(state: FP8State | None, ranks: Ranks) -> SharedScales | None:
    """The shared scales of `state`, whose updates reduce over the ranks from now on; None without a state.

    Raises:
        ValueError: another group shares the state already.
    """
    if state is None:
        return None
    if state.shared_over not in ((), (ranks.group,)):
        raise ValueError("one FP8State cannot be shared by two tensor-parallel groups")
    state.shared_over = (ranks.group,)
    return _SHARED.setdefault(id(state), SharedScales(state, ranks.group))
