# SPDX-License-Identifier: Apache-2.0
"""Variables, parameters and fields are named by what they hold, not by how they came: `layers`, not `found`.

A class name has one meaning.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EMPTY = {"found", "own", "at", "each", "given", "told", "asked", "known"}
SOURCES = sorted(
    path for folder in ("lorakernels", "graphs") for path in (ROOT / folder).rglob("*.py")
)


def empty_names(text: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each name in EMPTY that `text` binds: every assignment, loop, parameter and field."""
    for node in ast.walk(ast.parse(text)):
        name = None
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            name = node.name
        if name in EMPTY:
            yield node.lineno, name


def test_names_say_what_they_hold() -> None:
    assert len(SOURCES) > 400
    offenders = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in SOURCES
        for line, name in empty_names(path.read_text())
    ]
    assert offenders == []


def test_a_class_name_has_one_meaning() -> None:
    files: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert len(files) > 200
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


@pytest.mark.parametrize(
    "text",
    [
        "found = 1", "for own in x: pass", "[each for each in x]", "with x as given: pass", "if (told := f()): pass",
        "def f(*asked): pass", "lambda known: known", "self.at = 1", "class A:\n    at: int", "a, (b, *at) = x",
        "try: pass\nexcept E as found: raise", "match x:\n    case {'a': found}: pass",
    ],
)  # fmt: skip
def test_the_check_itself(text: str) -> None:
    assert len(list(empty_names(text))) == 1
    assert not list(empty_names("x.at, f(found=own), {'each': given}"))
