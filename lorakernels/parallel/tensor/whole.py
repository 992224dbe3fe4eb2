# SPDX-License-Identifier: Apache-2.0
"""Whole tensors, of which the ranks of a tensor-parallel group hold parts, and parts of whole tensors."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lorakernels.modules.marks import SplitModule, became
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.layers import own_part


class PartPlace(NamedTuple):
    """Where a part lies in the whole tensor.

    Attributes:
        ranks: the group that holds the parts.
        dim: the dimension in which it is cut.
    """

    ranks: Ranks
    dim: int

    def shape(self, part: Tensor) -> tuple[int, ...]:
        """The whole tensor's shape."""
        shape = list(part.shape)
        shape[self.dim] *= self.ranks.size
        return tuple(shape)

    def gather(self, part: Tensor) -> Tensor:
        """Collective: the whole tensor of every rank's `part`."""
        rows = comm.gather_rows(self.ranks.group, part.movedim(self.dim, 0))
        return rows.movedim(0, self.dim).contiguous()

    def part(self, whole: Tensor) -> Tensor:
        """A copy of this rank's part of `whole`."""
        return own_part(whole, self.dim, self.ranks)


def places(model: nn.Module) -> dict[int, PartPlace]:
    """{id of a parameter: its place} of the parameters of `model` that are cut. It is empty for a whole model.

    It is also empty inside `TensorParallel.whole`.
    """
    if became(model).adapters_are_whole:
        return {}
    return {
        id(parameter): PartPlace(module.ranks, module.dimensions[name])
        for module in model.modules()
        if isinstance(module, SplitModule)
        for name, parameter in module.named_parameters(recurse=False)
        if name in module.dimensions
    }


def group_of(model: nn.Module) -> Any:
    """The tensor-parallel group over which `model` is split, or None."""
    return next((place.ranks.group for place in places(model).values()), None)


def whole_of(tensor: Tensor, place: PartPlace | None) -> Tensor:
    """A copy of the whole tensor of a parameter, or of a value of its shape. Collective if it is cut."""
    values = tensor.detach()
    return values.clone() if place is None else place.gather(values)


def check_alike(group: Any, tensors: dict[str, Tensor], what: str) -> None:
    """Collective: ValueError on all ranks unless they have the same tensors.

    Args:
        group: torch's process group, or None for one process.
        tensors: {name: tensor} on the CPU.
        what: where they come from, for the message.
    """
    if group is None:
        return
    mine = {name: _digest(tensor) for name, tensor in tensors.items()}
    first, *others = comm.agree(group, mine)
    for rank, other in enumerate(others, 1):
        for name in (*first, *other):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"all ranks must read the same tensors from {what}, but {name} differs between rank 0 and rank "
                    f"{rank}"
                )


def _digest(tensor: Tensor) -> str:
    """A hash of shape, dtype and bytes of a tensor on the CPU."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(raw).hexdigest()}"
