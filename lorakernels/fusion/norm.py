# SPDX-License-Identifier: Apache-2.0
"""FusedRMSNorm: the class that `fuse` gives a model's last norm. The norm's weight and name stay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.autograd.decoder.rms_norm import rms_norm
from lorakernels.fusion.families.spec import epsilon, scale
from lorakernels.modules.marks import became, mark


class FusedRMSNorm(nn.Module):
    """Mixin before a norm's class.

    That class's own forward runs if weight and input differ in dtype, or if no gradient is computed. Generation then
    has the bits of the model that is not fused.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., K] → [..., K], normed over the last dimension."""
        norm: Any = self
        if hidden_states.dtype != norm.weight.dtype or not torch.is_grad_enabled():
            normed: Tensor = super().forward(hidden_states)
            return normed
        return rms_norm(hidden_states, scale(norm, became(norm).adds_one), epsilon(norm))


_classes: dict[type, type] = {}


def fuse_norm(norm: nn.Module, adds_one: bool) -> None:
    """Change the norm's class, in place. `unfuse_norm` puts the old class back.

    `adds_one`: whether the norm multiplies by 1 + its weight.
    """
    mark(norm, adds_one=adds_one)
    norm.__class__ = _fused_class(type(norm))


def unfuse_norm(norm: nn.Module) -> None:
    norm.__class__ = _original(norm)
    mark(norm, adds_one=False)


def _fused_class(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _classes:
        names = {"__reduce_ex__": _reduce, "__module__": kind.__module__}
        _classes[kind] = type(f"Fused{kind.__name__}", (FusedRMSNorm, kind), names)
    return _classes[kind]


def _original(norm: nn.Module) -> type[nn.Module]:
    classes = type(norm).__mro__
    kind: type[nn.Module] = classes[classes.index(FusedRMSNorm) + 1]
    return kind


def _reduce(self: nn.Module, _: Any) -> tuple[Any, ...]:
    """For pickle and deepcopy: loading makes the class again, as no module defines it."""
    return _new, (_original(self),), self.__dict__


def _new(kind: type[nn.Module]) -> nn.Module:
    fused = _fused_class(kind)
    norm: nn.Module = fused.__new__(fused)
    return norm
