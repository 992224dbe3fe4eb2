# SPDX-License-Identifier: Apache-2.0
"""Entries of a layer's state_dict: its columns of the FP8State, and a merged layer's weight, merged or apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from lorakernels.recipes import DelayedScaling

STATE_KEYS = ("fp8_scale", "fp8_amax_history", "fp8_max")
_APART: ContextVar[bool] = ContextVar("base and adapter apart", default=False)


def is_apart() -> bool:
    """Whether a merged layer's state_dict holds its base and its adapter. Otherwise it holds their sum."""
    return _APART.get()


@contextmanager
def apart() -> Iterator[None]:
    """Inside the context, `is_apart()` is True."""
    token = _APART.set(True)
    try:
        yield
    finally:
        _APART.reset(token)


def columns_of(entries: dict[str, Tensor], recipe: DelayedScaling) -> Tensor:
    """The FP8 entries of a state_dict as fp32 [amax_history_len + 1, 2], which `FP8State.set_values` takes.

    Args:
        entries: fp32 fp8_scale [2], fp8_amax_history [amax_history_len, 2] and fp8_max [2].
        recipe: the recipe of the layer that loads them.

    Raises:
        ValueError: a shape does not fit the recipe, or the scales were made for other formats.
    """
    length = recipe.amax_history_len
    shapes = {"fp8_scale": (2,), "fp8_amax_history": (length, 2), "fp8_max": (2,)}
    for key, shape in shapes.items():
        if entries[key].shape != shape:
            raise ValueError(
                f"{key} of shape {tuple(entries[key].shape)} does not fit {shape}, the recipe's "
                f"amax_history_len is {length}"
            )
    made_for = entries["fp8_max"].tolist()
    ours = [recipe.fp8_max_forward, recipe.fp8_max_backward]
    if made_for != ours:
        raise ValueError(
            f"fp8_scale was made for formats with maxima {made_for}, this layer's recipe has {ours}"
        )
    return torch.cat((entries["fp8_amax_history"], entries["fp8_scale"][None]))


def take_columns(
    state_dict: dict[str, Any],
    prefix: str,
    recipe: DelayedScaling | None,
    missing_keys: list[str],
    error_msgs: list[str],
) -> Tensor | None:
    """Remove a layer's FP8 entries from `state_dict`, the layer's part of one; returns them as `columns_of` does.

    Returns None if the layer has no recipe, or if an entry is absent or does not fit; then `missing_keys` or
    `error_msgs` says so.
    """
    entries = {k: state_dict.pop(prefix + k, None) for k in STATE_KEYS}
    if recipe is None:
        return None
    absent = [prefix + k for k, v in entries.items() if v is None]
    if absent:
        missing_keys += absent
        return None
    try:
        return columns_of(entries, recipe)
    except ValueError as error:
        error_msgs.append(f"{prefix or 'this layer'}: {error}")
        return None
