# SPDX-License-Identifier: Apache-2.0
"""graphs/ in rooms: a module imports from its own room or from a lower one, and no module from itself by a detour."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.test_layering import imports

ROOT = Path(__file__).parents[2] / "graphs"
# Lowest first. A name is a folder or a module at the top; "" is `import lorakernels.graphs`: the public names.
ROOMS = (
    ("compare", "plan"),
    ("device",),
    ("interface",),
    ("record",),
    ("replay",),
    ("capture",),
    ("layers", "whole"),
    ("",),
)
RANK = {name: rank for rank, names in enumerate(ROOMS) for name in names}
SOURCES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("**/*.py"))


def module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix("__init__").removesuffix(".")


MODULES = {module(path) for path in SOURCES}


def imported(text: str, path: str) -> Iterator[str]:
    """Modules of graphs/ that `text`, the file at `path`, imports, by their names within it."""
    package = ".".join(["graphs", *path.split("/")[:-1]])
    for name in imports(text, package):
        parts = name.split(".")
        if parts[0] == "graphs":
            inner = ".".join(parts[1:])
            yield inner if inner in MODULES else ".".join(parts[1:-1])


def upward(text: str, path: str) -> list[str]:
    here = module(path).split(".")[0]
    names = [(name, name.split(".")[0]) for name in imported(text, path)]
    return [name for name, room in names if room != here and RANK[room] >= RANK[here]]


def test_every_module_has_a_room() -> None:
    tops = {name.split(".")[0] for name in MODULES}
    assert tops == set(RANK)


@pytest.mark.parametrize("path", SOURCES)
def test_imports_go_down(path: str) -> None:
    assert upward((ROOT / path).read_text(), path) == []


def test_no_circles() -> None:
    """Imports for type checkers count: a module can be read after those that it names."""
    found = {module(path): set(imported((ROOT / path).read_text(), path)) for path in SOURCES}
    assert len(list(TopologicalSorter(found).static_order())) == len(MODULES)


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("record/tracer.py", "from ..plan.order import Step", []),
        ("plan/plan.py", "from .call_spec import Key", []),
        ("plan/plan.py", "from ..capture.layer import Layer", ["capture.layer"]),
        ("plan/plan.py", "from ..compare import signature", ["compare.signature"]),
        ("plan/plan.py", "from .. import StepGraph", [""]),
        ("replay/watch.py", "def f():\n    from ..layers import manager", ["layers.manager"]),
    ],
    ids=["down", "same room", "up", "beside", "top", "in a function"],
)
def test_the_check_itself(path: str, line: str, found: list[str]) -> None:
    assert upward(line, path) == found
