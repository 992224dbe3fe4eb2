# SPDX-License-Identifier: Apache-2.0
"""Attributes of layers as they are at one moment, and which of them stay the same while the layers run."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

PLAIN_TYPES = (bool, int, float, str, type(None))
Attributes = dict[nn.Module, dict[str, Any]]


def plain_attributes(module: nn.Module) -> Attributes:
    """The attributes that a graph relies on, of `module` and its submodules: plain values, tensors, random states."""
    return {m: {k: v for k, v in vars(m).items() if _is_watched(v)} for m in module.modules()}


def _is_watched(value: object) -> bool:
    return (
        type(value) in PLAIN_TYPES or isinstance(value, Tensor) or hasattr(type(value), "advance")
    )


def is_unchanged(before: object, now: object) -> bool:
    return before is now or (
        type(before) is type(now) and type(before) in PLAIN_TYPES and before == now
    )


def unchanged_attributes(before: Attributes, now: Attributes) -> Attributes:
    """The entries of `now` that are as they were `before`. Layers change all other entries themselves as they run."""
    return {
        m: {
            k: v
            for k, v in entries.items()
            if k in before.get(m, {}) and is_unchanged(before[m][k], v)
        }
        for m, entries in now.items()
    }
