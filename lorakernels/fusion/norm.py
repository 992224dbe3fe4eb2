# SPDX-License-Identifier: Apache-2.0
"""FusedRMSNorm: what the last norm of a model becomes by `fuse`; its weight and name stay."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lorakernels.autograd.rms_norm import rms_norm


class FusedRMSNorm(nn.Module):
    """Mixed in before a norm's class. Where weight and input differ in dtype, that class's own forward runs."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., K] → [..., K]."""
        norm: Any = self
        if hidden_states.dtype != norm.weight.dtype:
            own: Tensor = super().forward(hidden_states)
            return own
        return rms_norm(hidden_states, norm.weight, norm.variance_epsilon)


_classes: dict[type, type] = {}


def fuse_norm(norm: nn.Module) -> None:
    """In place; `unfuse_norm` puts the class back."""
    norm.__class__ = _fused_class(type(norm))


def unfuse_norm(norm: nn.Module) -> None:
    norm.__class__ = _original(norm)


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
    """For pickle and deepcopy: the class is made where it is loaded."""
    return _new, (_original(self),), self.__dict__


def _new(kind: type[nn.Module]) -> nn.Module:
    fused = _fused_class(kind)
    norm: nn.Module = fused.__new__(fused)
    return norm
