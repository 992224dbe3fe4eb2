# SPDX-License-Identifier: Apache-2.0
"""Nodes multiply by a frozen weight in one place each way, so that communication before and after it has one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lorakernels import autograd

HEAD = "loss.py"  # the loss's own, over the output head


def functions_that_use(name: str) -> set[tuple[str, str]]:
    """(file, function) wherever a function of autograd/ uses `ops.<name>`."""
    found = set()
    home = Path(autograd.__file__).parent
    for path in sorted(home.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
            uses = (n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute))
            if name in uses and path.name != HEAD:
                found.add((path.relative_to(home).as_posix(), function.name))
    return found


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("fp8_linear_lora", {("linear/linear.py", "project")}),
        ("fp8_grad_input", {("linear/linear.py", "grad_x")}),
    ],
    ids=["forward", "backward"],
)
def test_one_function_multiplies_by_a_frozen_weight(
    op: str, expected: set[tuple[str, str]]
) -> None:
    """Compiled calls and layers over ranks run it, too."""
    assert functions_that_use(op) == expected
