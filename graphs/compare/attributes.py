# SPDX-License-Identifier: Apache-2.0
"""Attributes of layers as they are at one moment, and which of them stay the same while the layers run."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

PLAIN_TYPES = (bool, int, float, str, type(None))
Attributes = dict[nn.Module, dict[str, Any]]


def plain_attributes(module: nn.Module) -> Attributes:
    """The attributes that a graph relies on, of `module` and its submodules.

    They are plain values, tensors, random states, and objects whose class says `is_watched`.
    """
    return {m: {k: v for k, v in vars(m).items() if _is_watched(v)} for m in module.modules()}


def _is_watched(value: object) -> bool:
    is_state = isinstance(value, Tensor) or hasattr(type(value), "advance")
    return says_itself(value) or is_state


def says_itself(value: object) -> bool:
    """Whether `value` is plain, or of a class that says `is_watched`: then its repr says what it is."""
    return type(value) in PLAIN_TYPES or getattr(type(value), "is_watched", False)


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
