# SPDX-License-Identifier: Apache-2.0
"""Submodules as attributes of a package: `lorakernels.fusion.fuse` is imported at its first use."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def submodule(package: str, name: str) -> ModuleType | None:
    """The module `name` of `package`; None if there is none."""
    path = f"{package}.{name}"
    exists = not name.startswith("__") and find_spec(path) is not None
    return import_module(path) if exists else None


def offer_submodules(package: str) -> None:
    """Give `package`, which calls this with its own name, a `__getattr__` (PEP 562).

    No type checker sees it: that would take any name for one that is there.
    """

    def find(name: str) -> ModuleType:
        module = submodule(package, name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return module

    vars(sys.modules[package])["__getattr__"] = find
