# SPDX-License-Identifier: Apache-2.0
"""Functions have at most eight parameters: values that travel together are one type. Files have at most 500 lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = 8
LINES = 500
SCHEMA = "torch.library reads the op's flat schema off its signature"
OPTIONS = "an entry point whose options are keywords"
MORE = {
    ("lorakernels/autograd/compiled/linear.py", "lora_linear_forward"): SCHEMA,
    ("lorakernels/autograd/compiled/linear.py", "_fake_forward"): SCHEMA,
    ("lorakernels/autograd/compiled/linear.py", "lora_linear_backward"): SCHEMA,
    ("lorakernels/autograd/compiled/linear.py", "_fake_backward"): SCHEMA,
    ("lorakernels/autograd/bias_dropout_add.py", "bias_dropout_add"): OPTIONS,
    ("lorakernels/autograd/loss.py", "linear_cross_entropy"): OPTIONS,
    ("lorakernels/checkpoints/loading/load.py", "load_quantized"): OPTIONS,
    ("lorakernels/loops/attached.py", "attach"): OPTIONS,
    ("lorakernels/modules/linear/lora.py", "__init__"): "nn.Linear's five, and what makes it FP8",
}
SOURCES = sorted(  # with the extension's functions, in _C.pyi
    path
    for folder in ("lorakernels", "graphs")
    for path in (ROOT / folder).rglob("*.py*")
    if path.suffix in (".py", ".pyi")
)
OTHERS = sorted(
    path
    for folder in ("tests", "benchmarks", "csrc", "examples")
    for path in (ROOT / folder).rglob("*.*")
    if path.suffix in (".py", ".cu", ".h", ".cpp")
)


def longer(text: str) -> Iterator[tuple[str, int]]:
    """Functions of `text` with more than MOST parameters: name, how many. Triton's kernels are apart."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls", "ctx") for argument in named)
        decorators = getattr(node, "decorator_list", [])
        if count > MOST and not any("triton.jit" in ast.unparse(d) for d in decorators):
            yield getattr(node, "name", "lambda"), count


def test_functions_are_small() -> None:
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        assert [(f, n) for f, n in longer(path.read_text()) if (name, f) not in MORE] == [], name


def test_files_are_small() -> None:
    files = [*SOURCES, *OTHERS]
    lines = {path.relative_to(ROOT).as_posix(): path.read_text().count("\n") for path in files}
    assert len(lines) > 700
    assert {path: n for path, n in lines.items() if n > LINES} == {}


def test_every_exception_is_needed() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in SOURCES
        for name, _ in longer(path.read_text())
    }
    assert set(MORE) <= found, f"no longer exceptions: {sorted(set(MORE) - found)}"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def f(a, b, c, d, e, f, g, h): ...", 0),
        ("def f(a, b, c, d, e, *, f, g, h, i): ...", 1),
        ("class A:\n    def f(self, a, b, c, d, e, f, g, h): ...", 0),
        ("@triton.jit\ndef f(a, b, c, d, e, f, g, h, i): ...", 0),
        ("f = lambda a, b, c, d, e, f, g, h, i: a", 1),
    ],
    ids=["eight", "nine", "without self", "a Triton kernel", "a lambda"],
)
def test_the_check_itself(text: str, count: int) -> None:
    assert len(list(longer(text))) == count
