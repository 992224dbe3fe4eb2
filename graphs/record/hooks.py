# SPDX-License-Identifier: Apache-2.0
"""Hooks that stay behind when their module is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _NoHook:
    def __call__(self, *_: Any, **__: Any) -> None:
        return None


class Hook:
    """A hook that becomes one without effect in copies and pickles of its module, which no recorder watches."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoHook, ()
