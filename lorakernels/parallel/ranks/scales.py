# SPDX-License-Identifier: Apache-2.0
"""One FP8 scale for a tensor whose parts lie on several ranks.

The amax of a rank's part alone would give each rank another scale. Where the FP8 state has no scale yet, and in
evaluation, the ranks reduce their amaxes before the cast. Once the state has a scale, no rank waits: the amaxes are
reduced when the scales are updated (`FP8State.shared_over`).
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

_HasScale = tuple[
    int, int, list[bool]
]  # (updates, rewrites, for each column whether it has a scale)


class SharedScales:
    """The scales of an FP8 state whose tensors are split over the ranks of `group`. `shared` makes this object."""

    def __init__(self, state: FP8State, group: Any) -> None:
        self.state, self.group = state, group
        self._has: dict[bool, _HasScale] = {}

    def of(self, part: Tensor, column: int, delayed: bool, backward: bool = False) -> Scaling:
        """The scaling of `part`, this rank's part of x (with `backward`, of dy), the same on all ranks.

        Collective while the state has no scale. The amax goes to the state if `delayed`.
        """
        scaling = self.known(column, delayed, backward)
        if scaling is not None:
            return scaling
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
        """As `of` if the state has a scale, as then all ranks have it; else None. Not collective."""
        tensor = self.state.backward if backward else self.state.forward
        if delayed and self._has_scale(tensor, column, backward):
            return Scaling(tensor, column, True)
        return None

    def _has_scale(self, tensor: Tensor, column: int, backward: bool) -> bool:
        """Whether an update gave the column a scale. It reads the device once after an update, until all have one.

        Raises:
            RuntimeError: no scale was read yet, and a CUDA graph is being captured, in which none can be read.
        """
        state = self.state
        updates, rewrites, has = self._has.get(backward, (-1, -1, []))
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            if column < len(has) and has[column]:
                return (
                    True  # the capture has restored the states in which the warm-up found a scale
                )
            raise RuntimeError(
                "ranks have no FP8 scale yet, and cannot reduce one in a CUDA graph: train and update the scales "
                "eagerly once before the capture"
            )
        same = rewrites == state.rewrites and column < len(has)
        if same and (has[column] or updates == state.updates):
            return has[column]
        has = (tensor[-1] > 0).tolist()
        self._has[backward] = (state.updates, state.rewrites, has)
        return has[column]


# by the id of the state; the layers keep a SharedScales alive, and it keeps its state alive
_SHARED: WeakValueDictionary[int, SharedScales] = WeakValueDictionary()


def shared(state: FP8State | None, ranks: Ranks) -> SharedScales | None:
    """The shared scales of `state`. Its updates reduce over the ranks from now on. None without a state.

    Raises:
        ValueError: the state is shared over another group already.
    """
    if state is None:
        return None
    if state.shared_over not in ((), (ranks.group,)):
        raise ValueError("one FP8State cannot be shared by two tensor-parallel groups")
    state.shared_over = (ranks.group,)
    return _SHARED.setdefault(id(state), SharedScales(state, ranks.group))
