# SPDX-License-Identifier: Apache-2.0
"""The types of conftest.py's fixtures."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

Load = Callable[[str], ModuleType]
Run = Callable[..., int]
RowsOf = Callable[[str], list[dict[str, str]]]
