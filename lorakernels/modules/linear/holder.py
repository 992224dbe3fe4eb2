# SPDX-License-Identifier: Apache-2.0
"""What lorakernels.parallel has made of a layer, as far as other packages have to know it.

A sharded base lends a layer its weight while it runs. Outside of its layer's forward and backward, the memory of such a
weight has other bytes. Who reads it first calls `bring`; what would write or move it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_HOLDER = "weight_holder"  # plain attribute of the linear
_LOADED = "loaded_part"  # likewise
# likewise, of each module with parameters whose model's rows are over ranks (lorakernels.parallel.context.share)
ROWS_OVER_RANKS = "rows_over_ranks"


class Holder(Protocol):
    def bring(self) -> None:
        """Put the layer's weights into their memory, until another layer's come. It may be a collective."""


def hold(linear: Any, holder: Holder | None) -> None:
    """Say that `holder` holds the weight of `linear`, or, with None, that the layer has its own again."""
    if holder is None:
        linear.__dict__.pop(_HOLDER, None)
    else:
        linear.__dict__[_HOLDER] = holder


def is_held(linear: Any) -> bool:
    return _HOLDER in linear.__dict__


def bring(linear: Any) -> None:
    """Before the weight of `linear` is read outside of its layer's forward and backward."""
    holder: Holder | None = linear.__dict__.get(_HOLDER)
    if holder is not None:
        holder.bring()


def refuse_held(linear: Any, what: str) -> None:
    """RuntimeError if `what` cannot be done, because the weight of `linear` is held."""
    if is_held(linear):
        raise RuntimeError(
            f"{getattr(linear, 'name', '') or 'this layer'}: cannot {what} a weight of a sharded base, which each rank "
            "holds a part of: call its unshard() first"
        )


def refuse_move(linear: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """RuntimeError if `fn`, as for `nn.Module._apply`, would give a weight that is held other memory."""
    if is_held(linear):
        byte = torch.zeros(1, dtype=torch.uint8, device=linear.weight_scale_inv.device)
        if fn(byte).data_ptr() != byte.data_ptr():
            refuse_held(linear, "move")


def is_split(linear: Any) -> bool:
    """Whether `linear` is one rank's part of a layer (lorakernels.parallel.tensor.layers)."""
    return "ranks" in linear.__dict__


def is_loaded_part(linear: Any) -> bool:
    """Whether `linear` is a part that was read by itself, and `parallelize` has not seen it yet."""
    return _LOADED in linear.__dict__


def mark_loaded_part(linear: Any, over: Any) -> None:
    """Say so, or with None that `parallelize` has seen it. `over`: what a fused layer asks before it runs."""
    if over is None:
        linear.__dict__.pop(_LOADED, None)
    else:
        linear.__dict__[_LOADED] = over


def over_of_loaded_part(linear: Any) -> Any:
    """What `mark_loaded_part` was given, or None."""
    return linear.__dict__.get(_LOADED)


def refuse_split(path: str, linear: Any, what: str) -> None:
    """ValueError if `linear` is a rank's part, with which `what` is not there yet."""
    if is_split(linear):
        raise ValueError(f"{path} is split over tensor-parallel ranks: {what} is not there yet")


def refuse_rows_over_ranks(model: nn.Module, what: str) -> None:
    """ValueError if the rows of `model` are over ranks, which know its layers as they were: `what` comes before."""
    for path, module in model.named_modules():
        if ROWS_OVER_RANKS in vars(module):
            raise ValueError(
                f"{path or type(module).__name__}: the model's rows are over ranks since context_parallel, so it is "
                f"too late to {what}: call ContextParallel.close, do it, and call context_parallel again"
            )
