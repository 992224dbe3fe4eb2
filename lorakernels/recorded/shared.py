# SPDX-License-Identifier: Apache-2.0
"""One object for equal values, so that keys made of them compare by identity, which is quicker."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, TypeVar, cast

T = TypeVar("T")
MOST_SHARED = 8192


@lru_cache(MOST_SHARED)
def _shared(make: Callable[[Any], Any], value: Hashable) -> Any:
    return make(value)


def shared(make: Callable[[Any], T], value: Hashable) -> T:
    """`make(value)`, the same object for equal values. One that was forgotten costs a second recording."""
    return cast(T, _shared(make, value))
