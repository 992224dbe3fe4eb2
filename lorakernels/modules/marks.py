# SPDX-License-Identifier: Apache-2.0
"""What a module has become, in one record at one key of its `__dict__`.

The record is no child and no buffer: state_dict lacks it, deepcopy and pickle carry it. It is never changed in place,
so that restoring a module's attributes restores its marks. Graphs refuse a module whose record was replaced.

A sharded base lends a layer its weight while it runs. Outside of its layer's forward and backward, the memory of such a
weight has other bytes. Code that reads it first calls `bring`; a write or a move is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lorakernels.autograd.linear.projections import OverRanks
    from lorakernels.fusion.parts import Parts
    from lorakernels.fusion.rewire import Changed
    from lorakernels.modules.model.trained_parts import Originals
    from lorakernels.parallel.context.attention import ContextAttention
    from lorakernels.parallel.context.share import ContextParallel
    from lorakernels.parallel.pipeline.cut import PipelineCut
    from lorakernels.parallel.pipeline.run import PipelineParallel
    from lorakernels.parallel.ranks.group import Ranks
    from lorakernels.parallel.tensor.split import LoadedParts

KEY = "lorakernels"


class Holder(Protocol):
    def bring(self) -> None:
        """Put the layer's weights into their memory, until another layer's come. It may be a collective."""


@dataclass(frozen=True, eq=False, repr=False)
class Became:
    """What calls have made of one module. A default says that they have not.

    Attributes:
        fused: how a decoder layer runs.
        adds_one: whether a fused norm multiplies by 1 + its weight.
        fused_projection: the layer that a fused layer runs for a linear of another library.
        before_fuse: of the model that `fuse` changed, the parts as they were.
        weight_holder: the sharded base that has a linear's weight.
        loaded_part: of a part that was read by itself, until `parallelize`: how ranks hold its layer together.
        parts_as_loaded: of a model with such parts.
        adapters_are_whole: the model is inside `TensorParallel.whole`.
        rows_over_ranks: ranks share the rows that the module gets.
        context_attention: the attention of an attention module then.
        context_parallel: of a model with shared rows.
        pipeline_cut: which modules of a model other ranks have.
        pipeline_parallel: how its stages run.
        originals: values of parameters from before training.
        saved: whether the module is one of `modules_to_save`.
        original_base: the linear that a PEFT layer had before its base became FP8.
    """

    fused: Parts | None = None
    adds_one: bool = False
    fused_projection: nn.Module | None = None
    before_fuse: Changed | None = None
    weight_holder: Holder | None = None
    loaded_part: OverRanks | None = None
    parts_as_loaded: LoadedParts | None = None
    adapters_are_whole: bool = False
    rows_over_ranks: bool = False
    context_attention: ContextAttention | None = None
    context_parallel: ContextParallel | None = None
    pipeline_cut: PipelineCut | None = None
    pipeline_parallel: PipelineParallel | None = None
    originals: Originals | None = None
    saved: bool = False
    original_base: nn.Module | None = None

    is_watched: ClassVar[bool] = True  # graphs/compare/attributes.py

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        said = (n if v is True else f"{n}: {type(v).__name__}" for n, v in values.items() if v)
        return f"<{', '.join(said)}>"


_NOTHING = Became()


def became(module: nn.Module) -> Became:
    """What `module` has become. To read it changes nothing."""
    record: Became = module.__dict__.get(KEY, _NOTHING)
    return record


def mark(module: nn.Module, **changes: Any) -> None:
    """Note `changes`, fields of Became, in the record of `module`. A default takes a mark away."""
    record = replace(became(module), **changes)
    if all(getattr(record, f.name) is f.default for f in fields(record)):
        module.__dict__.pop(KEY, None)
    else:
        module.__dict__[KEY] = record


class SplitModule:
    """One rank's part of a module. The rest is on the other ranks of a tensor-parallel group.

    Attributes:
        ranks: the group.
        dimensions: {parameter: the dimension in which it is cut}.
    """

    ranks: Ranks
    dimensions: ClassVar[Mapping[str, int]]


def is_held(linear: nn.Module) -> bool:
    return became(linear).weight_holder is not None


def bring(linear: nn.Module) -> None:
    """Before the weight of `linear` is read outside of its layer's forward and backward."""
    if (holder := became(linear).weight_holder) is not None:
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


def is_loaded_part(linear: nn.Module) -> bool:
    """Whether `linear` is a part that was read by itself, and `parallelize` has not seen it yet."""
    return became(linear).loaded_part is not None
