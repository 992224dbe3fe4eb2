# SPDX-License-Identifier: Apache-2.0
"""The dtype of autocast on a kind of device. "meta" has no autocast: torch raises for it, these functions do not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype to which autocast casts on devices of `kind`, such as "cuda"; None if it is off."""
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def under_autocast(x: Tensor) -> Tensor:
    """x in autocast's dtype; x itself where that is off."""
    dtype = autocast_dtype(x.device.type)
    return x if dtype is None else x.to(dtype)


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Inside, autocast is off on devices of `kind`."""
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)
